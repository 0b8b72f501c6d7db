"""An import holds one trace at a time, however many there are, and says what it wrote and what it left out."""

import json
import weakref

import pytest

from turntree.core.config import Part, from_mapping
from turntree.core.errors import ConfigError, InputError
from turntree.stages import import_traces as stage
from turntree.traces.schema import Trace, read_traces


def header_of(path):
    return json.loads(path.read_text().splitlines()[0])


def test_an_import_holds_one_trace_at_a_time_and_writes_what_it_counted(tmp_path, monkeypatch):
    alive = most = made = 0

    class Counted(Trace):
        def __post_init__(self):
            nonlocal alive, most, made
            super().__post_init__()
            made, alive = made + 1, alive + 1
            most = max(most, alive)
            weakref.finalize(self, ended)

    def ended():
        nonlocal alive
        alive -= 1

    source = tmp_path / "log.jsonl"
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows = [{"messages": [*talk, {"role": "user", "content": f"{i}"}, talk[1]], "id": f"t{i}"} for i in range(60)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr("turntree.traces.assemble.Trace", Counted)
    report = stage.import_traces([source], tmp_path / "out.jsonl", stage.ImportConfig(dev=0.5))
    assert made >= 60 and most <= 4
    written = list(read_traces(tmp_path / "out.jsonl"))
    assert [trace.id for trace in written] == [f"t{i}" for i in range(60)]
    assert report["traces_kept"] == 60 == sum(report["splits"].values())
    assert header_of(tmp_path / "out.jsonl")["report"]["splits"] == report["splits"]


def talks(path, count, **more):
    """A log of so many rows, each a question of its own with its answer."""
    rows = [
        {
            "messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "a"}],
            "id": f"t{i}",
            **more,
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_what_was_counted_is_what_was_written_in_the_file_its_header_and_its_report(tmp_path):
    source, out = talks(tmp_path / "log.jsonl", 40), tmp_path / "out.jsonl"
    found = stage.import_traces([source], out, stage.ImportConfig(seed=1))
    written = [trace.split for trace in read_traces(out)]
    assert found["path"] == str(out)
    assert found["splits"] == {split: written.count(split) for split in ("dev", "train")}
    assert list(found["splits"]) == ["dev", "train"] and 0 < found["splits"]["dev"] < 12, "a tenth by default"
    report = json.loads((tmp_path / "out.jsonl.report.json").read_text())
    header = header_of(out)
    assert report == header["report"] == {key: value for key, value in found.items() if key != "path"}
    assert (header["made_by"], header["sources"]) == ("import", [str(source)])
    stage.import_traces([source], tmp_path / "other.jsonl", stage.ImportConfig(seed=2))
    assert [trace.split for trace in read_traces(tmp_path / "other.jsonl")] != written


@pytest.mark.parametrize(("dev", "splits"), [(0, {"train": 6}), (1, {"dev": 6})])
def test_all_may_be_of_one_split(tmp_path, dev, splits):
    assert (
        stage.import_traces([talks(tmp_path / "log.jsonl", 6)], tmp_path / "o.jsonl", stage.ImportConfig(dev=dev))[
            "splits"
        ]
        == splits
    )


@pytest.mark.parametrize("dev", [-0.1, 1.1])
def test_a_share_lies_from_0_to_1(dev):
    with pytest.raises(ConfigError, match=f"dev': is {dev:g};"):
        from_mapping(stage.ImportConfig, {"dev": dev})


def test_nothing_to_train_on_is_refused_and_nothing_written(tmp_path):
    with pytest.raises(InputError, match=r"leaves nothing to train on \(1 in dev\)"):
        stage.import_traces(
            [talks(tmp_path / "log.jsonl", 1)], tmp_path / "out.jsonl", stage.ImportConfig(dev=0.999999)
        )
    failed = talks(tmp_path / "log.jsonl", 3, success=False)
    with pytest.raises(InputError, match=r"log\.jsonl: keeps none of 3 traces \(3 not_successful\)"):
        stage.import_traces([failed], tmp_path / "out.jsonl", stage.ImportConfig(success_only=True))
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]


def test_every_choice_of_an_import_is_heeded(tmp_path):
    unknown, out = talks(tmp_path / "log.jsonl", 3, mood="good"), tmp_path / "out.jsonl"
    with pytest.raises(InputError, match="mood"):
        stage.import_traces([unknown], out, stage.ImportConfig(dev=0))
    assert stage.import_traces([unknown], out, stage.ImportConfig(dev=0, unknown_keys="keep"))["traces_kept"] == 3
    with unknown.open("a") as more:
        more.write('{"messages": 7}\n')
    with pytest.raises(InputError, match=r"log\.jsonl:4"):
        stage.import_traces([unknown], out, stage.ImportConfig(dev=0, unknown_keys="keep"))
    assert (
        stage.import_traces([unknown], out, stage.ImportConfig(dev=0, unknown_keys="keep", on_error="drop"))[
            "traces_kept"
        ]
        == 3
    )
    with pytest.raises(InputError, match="no trace format 'none of these'"):
        stage.import_traces([unknown], out, stage.ImportConfig(dev=0, format=Part("none of these")))


def test_a_file_that_was_cut_off_after_its_import_is_noticed(tmp_path):
    out = tmp_path / "out.jsonl"
    stage.import_traces([talks(tmp_path / "log.jsonl", 8)], out, stage.ImportConfig())
    assert header_of(out)["traces"] == 8
    out.write_text("".join(out.read_text().splitlines(keepends=True)[:5]))
    with pytest.raises(InputError, match="holds 4 traces, and its header counts 8"):
        list(read_traces(out))


def test_a_mistake_in_the_file_of_tools_is_that_files_and_drops_no_trace(tmp_path):
    tools = tmp_path / "tools.json"
    tools.write_text('[{"type": "function", "function": {"nam": "look"}}]')
    config = stage.ImportConfig(tools=str(tools), on_error="drop")
    with pytest.raises(InputError, match=r"tools\.json: field 'tools\[0\]': has no function name"):
        stage.import_traces([talks(tmp_path / "log.jsonl", 3)], tmp_path / "out.jsonl", config)
