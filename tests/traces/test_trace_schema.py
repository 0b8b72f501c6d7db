"""The trace file: what is written is what is read, and what this version does not know is an error with its place."""

from __future__ import annotations

import gzip
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_strategies import traces

from turntree.core.errors import InputError
from turntree.core.messages import Message, ToolCall
from turntree.traces.schema import Trace, read_traces, write_traces

HEADER = '{"schema": "turntree.traces/1"}\n'
ROW: dict[str, Any] = {
    "schema": "turntree.trace/1",
    "id": "t1",
    "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}],
}


def a_trace(trace_id: str = "t1", **fields: Any) -> Trace:
    return Trace(id=trace_id, messages=(Message("user", "hi"), Message("assistant", "hello")), **fields)


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        list(read_traces(path))
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(str(path))


class TestRoundTrip:
    @settings(max_examples=25, deadline=None)
    @given(st.lists(traces(), max_size=3, unique_by=lambda trace: trace.id))
    def test_what_is_written_is_what_is_read(self, written: list[Trace]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "traces.jsonl"
            assert write_traces(path, written) == len(written)
            assert list(read_traces(path)) == written

    def test_a_trace_survives_json(self) -> None:
        trace = Trace(
            id="t",
            messages=(
                Message("assistant", "", (ToolCall("f", {"x": [1, None]}, "c1"),)),
                Message("tool", "1", (), "c1"),
            ),
            tools=({"type": "function", "function": {"name": "f"}},),
            domain="shop",
            split="dev",
            success=False,
            environment={"seed": 3},
            meta={"group": "g"},
        )
        assert Trace.from_json(json.loads(json.dumps(trace.to_json()))) == trace

    def test_traces_whose_group_is_null_are_groups_of_their_own(self) -> None:
        one, two = (replace(a_trace(), id=name, meta={"group": None}) for name in "ab")
        assert (one.group, two.group) == ("a", "b")
        assert replace(one, meta={"group": 0}).group == "0"

    def test_the_header_says_what_the_writer_says_and_the_schema_comes_first(self, tmp_path: Path) -> None:
        path = tmp_path / "t.jsonl"
        write_traces(path, [a_trace()], {"seed": 7, "schema": "mine"})
        assert json.loads(path.read_text().splitlines()[0]) == {"schema": "turntree.traces/1", "seed": 7, "traces": 1}
        assert path.read_text().startswith('{"schema"')

    @pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
    def test_equal_traces_give_equal_bytes(self, tmp_path: Path, suffix: str) -> None:
        one, two = tmp_path / f"one{suffix}", tmp_path / f"two{suffix}"
        write_traces(one, [a_trace()])
        write_traces(two, [a_trace()])
        assert one.read_bytes() == two.read_bytes()
        assert list(read_traces(one)) == [a_trace()]

    def test_a_line_separator_inside_a_message_does_not_break_the_line(self, tmp_path: Path) -> None:
        path = tmp_path / "t.jsonl"
        trace = Trace(id="t", messages=(Message("assistant", "a\u2028b\x85c\nd"),))
        write_traces(path, [trace])
        assert list(read_traces(path)) == [trace]


class TestWriting:
    def test_a_failure_leaves_the_old_file_and_no_other(self, tmp_path: Path) -> None:
        path = tmp_path / "t.jsonl"
        write_traces(path, [a_trace()])
        with pytest.raises(InputError, match="cannot be written as JSON"):
            write_traces(path, [a_trace("new"), a_trace("bad", meta={"x": float("nan")})])
        assert [trace.id for trace in read_traces(path)] == ["t1"]
        assert list(tmp_path.iterdir()) == [path]

    def test_one_id_twice_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="'t1' is already the trace of line 2"):
            write_traces(tmp_path / "t.jsonl", [a_trace(), a_trace()])


class TestReading:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"schema": "turntree.trace/2"}, ":2: field 'schema': is 'turntree.trace/2'; this version reads"),
            ({"sucess": True}, ":2: field 'sucess': unknown key; did you mean 'success'?"),
            ({"success": "yes"}, ":2: field 'success': is str; it must be true or false"),
            ({"split": "validation"}, ":2: field 'split': is 'validation'; use one of train, dev, test, or null"),
            ({"id": 3}, ":2: field 'id': is int; it must be text"),
            ({"messages": "hi"}, ":2: field 'messages': is str; it must be a list"),
            ({"messages": [{"role": "user", "content": "hi"}]}, ":2: field 'messages': hold no assistant turn;"),
            ({"messages": [{"role": "assistant", "contents": "hi"}]},
             ":2: field 'messages[0].contents': unknown key; did you mean 'content'?"),
            ({"messages": ["hi"]}, ":2: field 'messages[0]': is str, not an object"),
            ({"messages": [{"role": "bot"}]}, ":2: field 'messages[0].role': unknown role 'bot';"),
            ({"messages": [{"role": "assistant", "tool_call_id": 4}]},
             ":2: field 'messages[0].tool_call_id': is int, not text;"),
            ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{x"}}]}]},
             ":2: field 'messages[0].tool_calls.arguments': the arguments of 'f' are not JSON"),
            ({"tools": [{"name": "f"}]}, ":2: field 'tools[0]': has no function name;"),
            ({"tools": [{"function": {"name": "f"}}] * 2}, ":2: field 'tools[1]': declares 'f' a second time;"),
        ],
    )  # fmt: skip
    def test_a_wrong_field_is_named_with_its_line(self, tmp_path: Path, change: Any, message: str) -> None:
        path = tmp_path / "t.jsonl"
        path.write_text(HEADER + json.dumps({**ROW, **change}) + "\n")
        assert refusal(path).startswith(message)

    def test_a_truncated_line_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "t.jsonl"
        path.write_text(HEADER + json.dumps(ROW) + "\n" + json.dumps(ROW)[:50])
        assert refusal(path).startswith(":3: is not complete JSON (")

    def test_traces_before_a_damaged_line_have_been_read(self, tmp_path: Path) -> None:
        path = tmp_path / "t.jsonl"
        path.write_text(HEADER + json.dumps(ROW) + "\n{")
        reader = read_traces(path)
        assert next(reader).id == "t1"
        with pytest.raises(InputError):
            next(reader)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", ": is empty;"),
            (json.dumps(ROW), ":1: field 'schema': is 'turntree.trace/1';"),
            ('{"messages": []}', ":1: field 'schema': is missing"),
            ('{"schema": "turntree.traces/9"}', ":1: field 'schema': is 'turntree.traces/9';"),
            (
                HEADER + json.dumps(ROW) + "\n\n" + json.dumps(ROW),
                ":4: field 'id': 't1' is already the trace of line 2;",
            ),
            (HEADER + '{"a": NaN}', ":2: is not JSON (NaN is not a JSON number);"),
            (HEADER + "[" * 100_000, ":2: is nested too deeply to read"),
        ],
    )
    def test_a_wrong_file_says_what_is_wrong(self, tmp_path: Path, text: str, message: str) -> None:
        path = tmp_path / "t.jsonl"
        path.write_text(text)
        assert refusal(path).startswith(message)

    def test_bytes_that_are_no_text_are_named(self, tmp_path: Path) -> None:
        path = tmp_path / "t.jsonl"
        path.write_bytes(HEADER.encode() + b'{"id": "\xff"}\n')
        assert refusal(path).startswith(":2: is not UTF-8 (invalid start byte at byte 8)")

    def test_a_missing_file_and_a_folder(self, tmp_path: Path) -> None:
        assert refusal(tmp_path / "none.jsonl").startswith(": does not exist;")
        assert refusal(tmp_path).startswith(": is a folder;")

    @pytest.mark.parametrize("suffix", [".gz", ".xz"])
    def test_a_cut_archive_is_named(self, tmp_path: Path, suffix: str) -> None:
        path = tmp_path / f"t.jsonl{suffix}"
        write_traces(path, [a_trace(str(i), meta={"text": "x" * 50}) for i in range(50)])
        path.write_bytes(path.read_bytes()[:-12])
        assert "the compressed file is damaged or cut off" in refusal(path)

    def test_what_only_claims_to_be_an_archive_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "t.jsonl.gz"
        path.write_text(HEADER)
        assert "the compressed file is damaged or cut off" in refusal(path)
        path.write_bytes(gzip.compress(HEADER.encode()))
        assert list(read_traces(path)) == []


def test_a_trace_file_with_parameters_under_another_key_is_refused_and_odd_ones_are_read_as_they_were_written(tmp_path):
    said = (Message("user", "go"), Message("assistant", "gone"))
    odd = {"type": "function", "function": {"name": "a", "parameters": {"city": {"type": "str"}}, "return": {}}}
    write_traces(tmp_path / "t.jsonl", [Trace(id="1", messages=said, tools=(odd,))])
    assert [trace.tools for trace in read_traces(tmp_path / "t.jsonl")] == [(odd,)]
    lost = {"type": "function", "function": {"name": "a", "input_schema": {"type": "object"}}}
    write_traces(tmp_path / "t.jsonl", [Trace(id="1", messages=said, tools=(lost,))])
    with pytest.raises(InputError) as error:
        list(read_traces(tmp_path / "t.jsonl"))
    assert (error.value.line, error.value.field) == (2, "tools[0].input_schema")
