"""Files, documents, folders and archives: every row is read, and only one is held."""

from __future__ import annotations

import io
import json
import random
import tarfile
import tempfile
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_fixtures import TAU2
from trace_strategies import json_objects, json_values

from chat_import import import_chat
from turntree.core.errors import InputError
from turntree.traces import documents
from turntree.traces.chat import stream_chat
from turntree.traces.documents import document_rows
from turntree.traces.sources import source_files, source_rows

TALK = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def rows_of(text: str, chunk: int) -> list[tuple[Any, Any]]:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder) / "d.json"
        path.write_text(text)
        patch.setattr(documents, "CHUNK", chunk)
        return list(document_rows(path))


texts = json_values | st.sampled_from(['"', "\\\\", '\\\\"', "]}", '{"a": ['])
nested = st.dictionaries(st.text(max_size=3), texts, max_size=3)
layouts = st.sampled_from([{}, {"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}])


@settings(max_examples=150, deadline=None)
@given(st.lists(texts | nested, max_size=5), st.integers(1, 9), layouts)
def test_a_list_read_in_chunks_is_the_list(items: list[Any], chunk: int, layout: dict[str, Any]) -> None:
    found = rows_of(json.dumps(items, **layout), chunk)
    assert [value for (_, value), _ in found] == items
    assert [index for (index, _), _ in found] == [f"[{i}]" for i in range(len(items))]


@settings(max_examples=80, deadline=None)
@given(st.lists(nested, max_size=4), json_objects, st.booleans(), st.integers(1, 9), layouts)
def test_simulations_come_one_by_one_with_the_info_of_their_document_wherever_it_stands(
    items: list[Any], info: dict[str, Any], info_first: bool, chunk: int, layout: dict[str, Any]
) -> None:
    members = {"info": info, "tasks": [{}], "simulations": items}
    document = members if info_first else dict(reversed(members.items()))
    found = rows_of(json.dumps(document, **layout), chunk)
    assert [value for (_, value), _ in found] == items
    assert all(of == info for _, of in found)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(max_size=3).filter(lambda key: key != "simulations"), texts, max_size=4), layouts)
def test_any_other_object_is_one_row_or_one_for_each_number(value: dict[str, Any], layout: dict[str, Any]) -> None:
    found = {index: one for (index, one), _ in rows_of(json.dumps(value, **layout), 5)}
    numbered = {key: one for key, one in value.items() if f"[{key}]" in found}
    assert all(key.isdecimal() and isinstance(one, dict) for key, one in numbered.items())
    whole = {key: one for key, one in value.items() if key not in numbered}
    rest = {None: whole} if whole or not value else {}
    assert found == {f"[{key}]": one for key, one in numbered.items()} | rest


@settings(max_examples=60, deadline=None)
@given(st.floats(0.01, 0.99), st.integers(1, 9))
def test_a_document_that_is_cut_off_ends_with_an_error(share: float, chunk: int) -> None:
    text = json.dumps(TAU2, indent=1)
    found = rows_of(text[: int(len(text) * share)], chunk)
    (_, last), _ = found[-1]
    assert isinstance(last, InputError)


def test_a_document_of_many_rows_is_not_held(tmp_path: Path) -> None:
    path = tmp_path / "big.json"
    row = json.dumps({"messages": TALK, "meta": {"filler": "x" * 20_000}})
    with path.open("w") as file:
        file.write('{"info": {}, "simulations": [')
        for i in range(1500):
            file.write(("," if i else "") + row[:-1] + f', "id": "{i}", "reward_info": null}}')
        file.write("]}")
    assert path.stat().st_size > 30_000_000
    (tmp_path / "small.json").write_text(f"[{row}]")
    stream_chat([tmp_path / "small.json"], lambda trace: None)  # loads the formats
    tracemalloc.start()
    report = stream_chat([path], lambda trace: None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report.traces_kept == 1500
    assert peak < 8_000_000, f"{peak} bytes were held at once"


def test_a_folder_and_an_archive_hold_what_their_files_hold(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.jsonl").write_text(json.dumps({"messages": TALK, "id": "1"}))
    (folder / "deep" / "b.json").write_text(json.dumps([{"messages": TALK, "id": "2"}]))
    (folder / "notes.yaml").write_text("no rows")
    with tarfile.open(tmp_path / "logs.tar.xz", "w:xz") as archive:
        archive.add(folder, "logs")
    for path in (folder, tmp_path / "logs.tar.xz"):
        traces, report = import_chat([path])
        assert [trace.id for trace in traces] == ["1", "2"]
        assert report.ignored == {"files named *.yaml": 1}


def test_what_holds_no_file_to_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.yaml").write_text("no rows")
    with pytest.raises(InputError, match=r"holds no file named \.json"):
        list(source_files(tmp_path, Counter()))
    (tmp_path / "x.tar").write_text("no archive")
    with pytest.raises(InputError, match="is not a readable tar archive"):
        list(source_files(tmp_path / "x.tar", Counter()))


def test_a_result_of_tau2_written_as_a_folder_is_the_result_written_as_a_file(tmp_path: Path) -> None:
    (tmp_path / "run" / "simulations").mkdir(parents=True)
    header = {key: value for key, value in TAU2.items() if key != "simulations"}
    (tmp_path / "run" / "results.json").write_text(json.dumps(header | {"simulations": []}))
    for i, simulation in enumerate(TAU2["simulations"]):
        (tmp_path / "run" / "simulations" / f"{i}.json").write_text(json.dumps(simulation))
    (tmp_path / "results.json").write_text(json.dumps(TAU2))
    [apart], _ = import_chat([tmp_path / "run"])
    [together], _ = import_chat([tmp_path / "results.json"])
    assert apart.messages == together.messages
    assert apart.messages[0].content.startswith("<instructions>")
    assert apart.domain == "shop"


def test_a_result_of_tau2_as_a_folder_in_an_archive_is_refused(tmp_path: Path) -> None:
    """Its policy and tools may stand behind it, and without them its traces have no prompt."""
    simulation = json.dumps(TAU2["simulations"][0]).encode()
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        add_member(archive, "simulations/0.json", simulation)
        add_member(archive, "results.json", json.dumps(TAU2 | {"simulations": []}).encode())
    with pytest.raises(InputError, match=r"a\.tar/simulations/0\.json: is a result of tau2 as a folder"):
        import_chat([tmp_path / "a.tar"])


def test_lines_are_told_from_a_document_by_the_first(tmp_path: Path) -> None:
    def values(name: str, text: str) -> list[Any]:
        (tmp_path / name).write_text(text)
        return [row.value for row in source_rows(tmp_path / name)]

    assert values("a.json", '{"a": 1}\n{"a": 2}\n') == [{"a": 1}, {"a": 2}]
    assert values("b.json", '{"a":\n 1}\n') == [{"a": 1}]
    assert values("c.traj", '\ufeff\n [{"a": 1}, {"a": 2}]') == [{"a": 1}, {"a": 2}]
    assert values("d.jsonl", '[\n{"a": 1}\n]') == [{"a": 1}]
    assert values("e.jsonl", '{"a": 1}') == [{"a": 1}]


CHAT = b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'


def archive_of(path: Path, mode: Any, names: list[str], content: bytes = CHAT) -> Path:
    with tarfile.open(path, mode) as archive:
        for name in names:
            add_member(archive, name, content)
    return path


def add_member(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def test_an_archive_is_read_in_its_own_order_so_that_a_compressed_one_is_read_once(tmp_path: Path) -> None:
    names = [f"{k}.jsonl" for k in (3, 1, 2)]
    path = archive_of(tmp_path / "a.tar.gz", "w:gz", names)
    assert [file.shown.name for file in source_files(path, Counter())] == names


def test_no_member_of_an_archive_is_written_elsewhere_and_its_name_may_be_long(tmp_path: Path) -> None:
    names = [f"../../../../{tmp_path}/evil.jsonl", f"{tmp_path}/evil.jsonl", "x" * 300 + ".jsonl"]
    path = archive_of(tmp_path / "a.tar", "w", names)
    assert len([list(source_rows(file.path)) for file in source_files(path, Counter())]) == 3
    assert [file.name for file in tmp_path.iterdir()] == ["a.tar"]


def test_links_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    (folder / "inside").mkdir(parents=True)
    (folder / "a.jsonl").write_bytes(CHAT)
    (folder / "b.jsonl").symlink_to("nowhere")
    (folder / "more").symlink_to("inside")
    ignored: Counter[str] = Counter()
    assert len(list(source_files(folder, ignored))) == 1
    assert ignored == {"links that lead to no file, and devices": 2}
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(folder, "logs")
    ignored = Counter()
    assert len(list(source_files(tmp_path / "a.tar", ignored))) == 1
    assert ignored == {"links and devices in an archive": 2}


def test_a_compressed_archive_that_is_damaged_inside_is_said_so(tmp_path: Path) -> None:
    content = random.Random(0).randbytes(100_000).hex().encode()
    path = archive_of(tmp_path / "a.tar.xz", "w:xz", ["a.txt", "b.txt", "c.txt"], content)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)
    with pytest.raises(InputError, match="damaged or cut off"):
        list(source_files(path, Counter()))
