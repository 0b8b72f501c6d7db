"""Files are whole or absent; a damaged table names its line."""

import json
from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from turntree.core.config import Part
from turntree.core.errors import InputError
from turntree.pivots.select import SelectConfig
from turntree.run.artifacts import Table
from turntree.run.files import read_json, require_replaceable
from turntree.run.jsonl import json_line, replacing
from turntree.stages.demonstrate import demonstrate
from turntree.stages.import_traces import import_traces
from turntree.stages.select import run_select
from turntree.traces.chat import ImportConfig


def test_a_failed_write_leaves_the_old_file_and_no_debris(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(RuntimeError), replacing(path) as handle:
        handle.write(b"new")
        raise RuntimeError("interrupted")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


@dataclass
class Header:
    pass


@dataclass
class Row:
    trace_id: str
    turn: int


TABLE = Table("table", "x/1", Header, Row)


def test_a_table_round_trips(tmp_path):
    path, rows = tmp_path / "t.jsonl", [{"trace_id": "a", "turn": 1}, {"trace_id": "ü", "turn": 1}]
    assert TABLE.write(path, {}, rows) == 2
    assert TABLE.read(path) == ({"schema": "x/1"}, rows)


def test_a_truncated_line_is_named(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"schema": "x/1"}\n{"trace_id": "a", "turn": 1}\n{"a": ')
    with pytest.raises(InputError, match=r"t\.jsonl:3: is not complete JSON"):
        TABLE.read(path)


def test_another_schema_is_refused(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"schema": "y/1"}\n')
    with pytest.raises(InputError, match="'y/1', not 'x/1'"):
        TABLE.read(path)


def test_a_missing_file_is_one_clear_line(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        read_json(tmp_path / "none.json")


@pytest.mark.parametrize(
    "text, replaced",
    [("", True), ('{"schema": "a.b/1"}\n', True), ("my notes\n", False), ('{"schema": "a.c/1"}', False)],
)
def test_a_file_of_another_kind_is_not_written_over(tmp_path, text, replaced):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    if replaced:
        require_replaceable(path, '{"schema": "a.b/')
    else:
        with pytest.raises(InputError):
            require_replaceable(path, '{"schema": "a.b/')


def test_what_would_be_lost_is_named_before_anything_is_read(tmp_path):
    (tmp_path / "notes").write_text("mine\n")
    for work in (
        lambda out: run_select(tmp_path / "none", SelectConfig(), out),
        lambda out: import_traces([tmp_path / "none"], out, ImportConfig()),
        lambda out: demonstrate(Part("none"), out),
    ):
        with pytest.raises(InputError) as refused:
            work(tmp_path / "notes")
        assert refused.value.path == tmp_path / "notes"
    assert (tmp_path / "notes").read_text() == "mine\n"


@given(st.text(st.characters(), max_size=8))
@example("\x85\u2028\u2029\x1c\x0b\ud800 und ü")
def test_a_line_is_one_line_for_every_reader_and_says_the_same(text):
    line = json_line({"text": text})
    assert len(line.splitlines()) == 1 and json.loads(line.encode()) == {"text": text}


def test_text_stays_readable():
    assert "räumt auf, 你好" in json_line({"text": "räumt auf, 你好"})
