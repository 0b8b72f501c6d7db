"""A run goes on from what it wrote itself, all of it, or not at all."""

import errno
import io
import json
import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.core.cost import NO_COST
from turntree.core.errors import InputError, TurntreeError
from turntree.core.progress import notice, progress
from turntree.report.read import read_metrics
from turntree.run.files import write_json
from turntree.run.folder import open_folder, open_run
from turntree.run.identity import require_same

CONFIG = {"seed": 0, "checkpoints": {"every": 10}}
INPUTS = {"policy_hash": "w", "tokenizer_hash": "t", "template_hash": "c"}


def opened(path, **more):
    return open_run(path, "train", more.pop("config", CONFIG), more.pop("inputs", INPUTS), logs=("more.jsonl",), **more)


@pytest.fixture
def logged(tmp_path):
    """A run that had logged three steps when it was saved, and a part of a fourth when it was killed."""
    with opened(tmp_path) as run:
        for step in (1, 2, 3):
            run.append("more.jsonl", [{"iteration": step, "group": group} for group in range(2)])
            run.log({"step": step})
        saved = json.loads(json.dumps(run.logged()))
        run.append("more.jsonl", [{"iteration": 4, "group": 0}])
        with (tmp_path / "more.jsonl").open("a") as handle:
            handle.write('{"iteration": 4, "gr')
    return run, saved


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85"])
def test_a_reason_with_another_line_break_is_one_row(tmp_path, mark) -> None:
    rows = [{"step": 1, "censored_reasons": {f"cannot read: caf{mark}e": 2}}, {"step": 2}]
    with opened(tmp_path / "run") as run:
        for row in rows:
            run.log(row)
    assert run.metrics() == rows and list(read_metrics(tmp_path / "run" / "metrics.jsonl")) == rows


def test_what_a_killed_process_wrote_after_the_checkpoint_is_forgotten(logged) -> None:
    run, saved = logged
    run.rewind(saved)
    assert [row["step"] for row in run.metrics()] == [1, 2, 3]
    lines = (run.path / "more.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [1, 1, 2, 2, 3, 3]
    assert run.logged() == saved
    run.rewind(None)
    assert run.logged() == {}


@pytest.mark.parametrize("name", ["metrics.jsonl", "more.jsonl"])
@pytest.mark.parametrize("kind", ["last", "first", "all", "file"])
def test_rows_that_are_missing_are_noticed_and_nothing_is_cut(logged, name, kind) -> None:
    run, saved = logged
    path, length = run.path / name, saved[name]
    lines = path.read_text()[:length].splitlines(keepends=True)
    path.write_text("".join({"last": lines[:-1], "first": lines[1:], "all": [], "file": []}[kind]))
    if kind == "file":
        path.unlink()
    left = {each.name: each.read_bytes() for each in run.path.glob("*.jsonl")}
    with pytest.raises(InputError, match=rf"{name}: has \d+ bytes of the {length} .*: rows are missing"):
        run.rewind(saved)
    assert {each.name: each.read_bytes() for each in run.path.glob("*.jsonl")} == left


def test_a_log_that_was_cut_inside_a_row_is_noticed(logged) -> None:
    run, saved = logged
    (run.path / "metrics.jsonl").write_text('{"step": 111111111111111111111111111111111111}\n')
    with pytest.raises(InputError, match=r"metrics\.jsonl: has no row that ends at byte"):
        run.rewind(saved)


@pytest.mark.parametrize("made", ["metrics.jsonl", "cost.json", "checkpoints", "model"])
def test_what_another_run_left_is_not_gone_on_with_where_its_configuration_is_gone(tmp_path, made) -> None:
    (tmp_path / made).mkdir() if "." not in made else (tmp_path / made).write_text("{}")
    for overwrite in (False, True):
        with pytest.raises(InputError, match=f"holds {made}, and no config.json"):
            opened(tmp_path, overwrite=overwrite).__enter__()
    assert (tmp_path / made).exists()


@pytest.mark.parametrize("key", sorted(INPUTS))
def test_a_run_goes_on_with_the_inputs_that_it_began_with(tmp_path, key) -> None:
    with opened(tmp_path):
        pass
    with opened(tmp_path, config={**CONFIG, "checkpoints": {"every": 3}}):
        pass
    with pytest.raises(InputError, match=rf"differs in inputs\.{key} \('.', not 'other'\)"):
        opened(tmp_path, inputs={**INPUTS, key: "other"}).__enter__()


def test_a_finished_run_keeps_no_checkpoint(tmp_path) -> None:
    with opened(tmp_path) as run:
        run.checkpoints.mkdir()
        run.write_cost(NO_COST)
    assert not run.checkpoints.exists()


def test_a_folder_of_runs_has_the_same_lock_and_the_same_refusal(tmp_path) -> None:
    with open_folder(tmp_path, "quickstart", CONFIG):
        with pytest.raises(InputError, match="in use by another process"), open_folder(tmp_path, "quickstart", CONFIG):
            pass
        with pytest.raises(InputError, match="in use by another process"), opened(tmp_path):
            pass
    with pytest.raises(InputError, match=r"differs in seed \(0, not 1\)"):
        open_folder(tmp_path, "quickstart", {**CONFIG, "seed": 1}).__enter__()
    with open_folder(tmp_path, "quickstart", {**CONFIG, "seed": 1}, overwrite=True):
        pass
    write_json(tmp_path / "config.json", {"model_type": "qwen3"})
    with pytest.raises(InputError, match="not the folder of a training run"):
        open_folder(tmp_path, "quickstart", CONFIG, overwrite=True).__enter__()


VALUES = st.recursive(
    st.booleans() | st.integers() | st.text(max_size=200),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1), inner, max_size=4),
)


@given(VALUES, VALUES)
def test_identities_are_the_same_exactly_where_they_are_equal(tmp_path_factory, one, two) -> None:
    path = tmp_path_factory.getbasetemp()
    require_same({"k": one}, {"k": one}, path)
    refused = None
    try:
        require_same({"k": one}, {"k": two}, path)
    except InputError as error:
        refused = str(error)
    assert (refused is not None) == (one != two)
    assert refused is None or (len(refused) < 3000 and "\n" not in refused)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_one_line_that_names_the_file(tmp_path, monkeypatch, number) -> None:
    def full(descriptor):
        raise OSError(number, os.strerror(number))

    with opened(tmp_path) as run:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(TurntreeError, match=r"metrics\.jsonl: cannot be written, because the disk or your quota"):
            run.log({"step": 1})
        with pytest.raises(TurntreeError, match=r"a\.json: cannot be written"):
            write_json(tmp_path / "a.json", {})
    assert not (tmp_path / "a.json").exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_device_without_space_is_named(tmp_path) -> None:
    with opened(tmp_path) as run:
        (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
        with pytest.raises(TurntreeError, match=r"metrics\.jsonl: cannot be written"):
            run.log({"step": 1})


@pytest.mark.parametrize(("terminal", "lines"), [(False, 0), (True, 52)])
def test_progress_of_a_short_stage_fills_no_log_file(terminal, lines, monkeypatch):
    """A terminal draws one line over and over; in a file each update is a line."""
    stderr = io.StringIO()
    stderr.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", stderr)
    with progress((), "tasks", total=50) as bar:
        for step in range(50):
            bar.update()
            bar.set_postfix(reward=step)
    assert stderr.getvalue().count("tasks: ") == lines


def test_a_terminal_of_80_columns_shows_every_figure_of_a_long_run() -> None:
    with progress((), "train online", total=200) as bar:
        bar.set_postfix({"reward": 0.25, "success": 0.625, "cut": 12})
        line = bar.format_meter(**{**bar.format_dict, "n": 100, "elapsed": 3900.0, "ncols": 80})
    assert len(line) <= 80
    assert line.endswith("reward=0.25, success=0.625, cut=12]")


def test_in_a_log_a_notice_and_what_follows_it_are_lines_of_their_own(capfd: pytest.CaptureFixture[str]) -> None:
    with progress((), "work", total=2):
        notice("nothing was trained")
    print("turntree: error: no reward", file=sys.stderr)
    said = [line.strip() for line in capfd.readouterr().err.replace("\r", "\n").splitlines() if line.strip()]
    assert said == ["turntree: nothing was trained", "turntree: error: no reward"]


def test_a_run_that_is_overwritten_leaves_no_searches_behind(tmp_path) -> None:
    with opened(tmp_path) as run:
        (run.path / "own").mkdir()
        (run.path / "own" / "pivots-21.jsonl").write_text("of the earlier run")
    with opened(tmp_path, overwrite=True):
        assert not (tmp_path / "own").exists()


def test_a_run_of_another_stage_that_is_overwritten_leaves_no_logs_behind(tmp_path) -> None:
    """A report and an audit of the folder would read them as logs of the new run."""
    logs = ("rollouts.jsonl", "trees.jsonl", "gate.jsonl", "held_out.jsonl")
    with open_run(tmp_path, "train online", CONFIG, INPUTS, logs=logs) as run:
        for name in logs:
            run.append(name, [{"of": "the earlier run"}])
    for page in ("report.html", "trees.html"):
        (tmp_path / page).write_text("of the earlier run")
    with open_run(tmp_path, "sft", CONFIG, INPUTS, overwrite=True):
        assert [path.name for path in tmp_path.iterdir() if path.suffix in (".jsonl", ".html")] == []


def test_a_search_that_was_killed_while_it_wrote_leaves_no_half_file_behind(tmp_path) -> None:
    with opened(tmp_path) as run:
        (run.path / "own").mkdir()
        for name in (".traces-00001.jsonl.17.partial", ".pivots-00001.jsonl.17.tmp", "traces-00001.jsonl"):
            (run.path / "own" / name).write_text("half")
    with opened(tmp_path):
        assert [path.name for path in (tmp_path / "own").iterdir()] == ["traces-00001.jsonl"]


def test_a_folder_that_was_moved_away_when_its_process_ended_is_put_back(tmp_path) -> None:
    with opened(tmp_path):
        aside = tmp_path / ".best.17.old"
        (aside / "best").mkdir(parents=True)
    with opened(tmp_path):
        assert (tmp_path / "best").exists() and not aside.exists()
