"""The importer: nothing is lost without being counted, and a malformed row has a place and a remedy."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_fixtures import adds_up
from trace_strategies import row, untidy_lines

from chat_import import import_chat
from turntree.core import parts
from turntree.core.config import Part
from turntree.core.errors import ConfigError, InputError
from turntree.core.messages import Message, ToolCall
from turntree.traces.assemble import reports_error
from turntree.traces.candidates import candidates
from turntree.traces.schema import read_traces, write_traces

USER = {"role": "user", "content": "do it"}
HELLO = {"role": "assistant", "content": "hello"}


def call(name: str = "f", arguments: Any = "{}", call_id: str | None = "1", content: str = "") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": content, "tool_calls": [{"id": call_id, "function": function}]}


def answer(call_id: str = "1") -> dict[str, Any]:
    return {"role": "tool", "content": "ok", "tool_call_id": call_id}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


@pytest.fixture
def file(tmp_path: Path) -> Any:
    def write(*rows: Any, name: str = "traces.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in rows))
        return path

    return write


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        import_chat([path], **options)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(str(path))


class TestLaws:
    @settings(max_examples=150, deadline=None)
    @given(untidy_lines, st.booleans(), st.sampled_from(["stop", "keep"]))
    def test_the_report_adds_up_and_every_kept_turn_is_a_candidate(
        self, lines: list[str], success_only: bool, unknown_keys: Any
    ) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "t.jsonl"
            path.write_text("\n".join(lines))
            traces, report = import_chat(
                [path], on_error="drop", success_only=success_only, unknown_keys=unknown_keys, format="chat"
            )
        assert adds_up(report)
        assert report.traces_read == len(lines)
        assert report.traces_kept == len(traces)
        assert report.turns_kept == sum(len(candidates(trace)) for trace in traces)
        assert all(candidates(trace) for trace in traces)
        assert min([0, *report.dropped_turns.values(), *report.dropped_traces.values()]) == 0

    @settings(max_examples=100, deadline=None)
    @given(untidy_lines)
    def test_an_import_that_does_not_stop_drops_nothing_malformed(self, lines: list[str]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "t.jsonl"
            path.write_text("\n".join(lines))
            try:
                stopping = import_chat([path])
            except InputError:
                return
            assert stopping == import_chat([path], on_error="drop")
            assert set(stopping[1].dropped_traces) <= {"duplicate", "no_candidate_turn"}

    @settings(max_examples=50, deadline=None)
    @given(untidy_lines)
    def test_imported_traces_survive_the_trace_file(self, lines: list[str]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder) / "s.jsonl", Path(folder) / "t.jsonl"
            source.write_text("\n".join(lines))
            traces, _ = import_chat([source], on_error="drop", unknown_keys="keep")
            write_traces(target, traces)
            assert list(read_traces(target)) == traces


class TestStopping:
    @pytest.mark.parametrize(
        ("bad", "message", "reason"),
        [
            ('{"messages": [{"role": "us', ":2: is not complete JSON (Unterminated string", "not_a_json_object"),
            ("[1, 2]", ":2: is list, not an object;", "not_a_json_object"),
            (row(USER, HELLO, sucess=True), ":2: field 'sucess': unknown key; did you mean 'success'?", "unknown_key"),
            (row(USER, HELLO, licence="x"), ":2: field 'licence': unknown key; import with unknown_keys='keep'",
             "unknown_key"),
            (row(USER, {"role": "assistant", "contnet": "x"}),
             ":2: field 'messages[1].contnet': unknown key; did you mean 'content'?", "unknown_key"),
            (row(USER), ":2: field 'messages': hold no assistant turn;", "no_assistant_turn"),
            (row(), ":2: field 'messages': hold no assistant turn;", "no_assistant_turn"),
            ({"message": []}, ":2: is of no known format (keys: message). Tried agentbench, atif,", "unknown_format"),
            (row(USER, HELLO, reward="1"), ":2: field 'reward': is '1', not a number;", "malformed_field"),
            (row(USER, HELLO, success="yes"), ":2: field 'success': is 'yes'; write true", "malformed_field"),
            (row(USER, HELLO, split="valid"), ":2: field 'split': is 'valid';", "malformed_field"),
            (row(USER, HELLO, tools="[{"), ":2: field 'tools': is text that is not complete JSON", "malformed_field"),
            (row(USER, HELLO, tools=[3]), ":2: field 'tools[0]': is int, not an object", "malformed_field"),
            (row(USER, HELLO, meta={"skip_turns": {"7": "x"}}), ":2: field 'meta.skip_turns': of", "malformed_field"),
        ],
    )  # fmt: skip
    def test_a_malformed_row_stops_with_its_place_or_is_dropped_and_counted(
        self, file: Any, bad: Any, message: str, reason: str
    ) -> None:
        path = file(row(USER, HELLO, id="good"), bad)
        stopped = refusal(path)
        assert stopped.startswith(message)
        assert stopped.endswith("drop and count such rows with on_error='drop' (--on-error drop)")
        traces, report = import_chat([path], on_error="drop")
        assert [trace.id for trace in traces] == ["good"]
        assert report.dropped_traces == {reason: 1}

    @pytest.mark.parametrize("arguments", ["{oops", '{"x": NaN}', "[1]", "3", '{"x": 1'])
    def test_arguments_that_are_not_a_json_object_stop_or_end_the_trace_before_them(
        self, file: Any, arguments: str
    ) -> None:
        path = file(row(USER, call(call_id="0"), answer("0"), call(arguments=arguments), answer(), HELLO))
        assert refusal(path).startswith(":1: field 'messages[3].tool_calls.arguments': the arguments of 'f'")
        traces, report = import_chat([path], on_error="drop")
        assert [len(trace.messages) for trace in traces] == [3]
        assert traces[0].meta["cut"] == "arguments_not_json"
        assert report.dropped_turns == {"arguments_not_json": 1, "after_malformed_message": 1}
        assert (report.turns_read, report.turns_kept) == (3, 1)

    def test_half_a_turn_is_never_kept(self, file: Any) -> None:
        path = file(row(USER, HELLO, call(arguments="{oops")))
        traces, report = import_chat([path], on_error="drop")
        assert traces == []
        assert report.dropped_turns == {"arguments_not_json": 1}
        assert report.dropped_traces == {"no_candidate_turn": 1}

    def test_an_image_in_the_history_ends_the_trace(self, file: Any) -> None:
        image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
        path = file(row(USER, HELLO, image, HELLO))
        assert refusal(path).startswith(
            ":1: field 'messages[2].content': holds a part of type 'image_url' that is not text;"
        )
        traces, report = import_chat([path], on_error="drop")
        assert len(candidates(traces[0])) == 1
        assert report.dropped_turns == {"after_malformed_message": 1}

    def test_one_id_with_two_contents_is_malformed_and_an_equal_copy_is_counted(self, file: Any) -> None:
        path = file(row(USER, HELLO, id="a"), row(USER, HELLO, id="a"), row(USER, call(), id="a"))
        assert refusal(path).startswith(
            ":3: field 'id': 'a' names another trace already ({'file': 'traces.jsonl', 'line': 1})"
        )
        _, report = import_chat([path], on_error="drop")
        assert report.dropped_traces == {"duplicate": 1, "duplicate_id": 1}
        assert report.dropped_turns == {"in_dropped_trace": 1, "duplicate_id": 1}
        assert report.turns_read == 3 and adds_up(report)

    def test_options_that_do_not_exist_are_refused(self, file: Any) -> None:
        with pytest.raises(InputError, match=r"no trace format 'shargpt'; registered: .*chat, .*responses, .*tau2"):
            import_chat([file(row(USER, HELLO))], format="shargpt")
        with pytest.raises(ConfigError, match="'format': has no options"):
            import_chat([file(row(USER, HELLO))], format=Part("auto", {"key": 1}))


class TestRows:
    def test_columns_become_fields(self, file: Any) -> None:
        columns = {"trajectory_id": 7, "instance_id": "bug-1", "resolved": 1, "domain": "code", "split": "dev"}
        path = file(row(USER, HELLO, environment={"seed": 1}, meta={"by": "me"}, **columns))
        [trace], _ = import_chat([path])
        assert (trace.id, trace.group, trace.success, trace.domain, trace.split) == ("7", "bug-1", True, "code", "dev")
        assert trace.environment == {"seed": 1}
        assert trace.meta == {"by": "me", "group": "bug-1", "source": {"file": "traces.jsonl", "line": 1}}

    @pytest.mark.parametrize(
        ("columns", "success"),
        [({}, None), ({"reward": 1}, True), ({"reward": 0.99}, False), ({"reward": 0.2, "success": True}, True)],
    )
    def test_the_outcome_is_success_else_a_full_reward_else_unknown(
        self, file: Any, columns: dict[str, Any], success: bool | None
    ) -> None:
        [trace], _ = import_chat([file(row(USER, HELLO, **columns))])
        assert trace.success is success
        assert trace.meta.get("reward") == columns.get("reward")

    def test_columns_may_be_json_text(self, file: Any) -> None:
        path = file({"messages": json.dumps([USER, call(arguments={"x": 1})]), "tools": json.dumps([tool("f")])})
        [trace], _ = import_chat([path])
        assert trace.messages[1].tool_calls == (ToolCall("f", {"x": 1}, "1"),)
        assert trace.tools == (tool("f"),)

    def test_arguments_may_be_text_object_empty_or_null(self, file: Any) -> None:
        given = ['{"x": 1}', {"x": 1}, "", None]
        traces, _ = import_chat([file(*(row(USER, call(arguments=a), id=str(i)) for i, a in enumerate(given)))])
        assert [trace.messages[1].tool_calls[0].arguments for trace in traces] == [{"x": 1}, {"x": 1}, {}, {}]

    def test_flat_tools_are_nested_and_repeated_ones_merged(self, file: Any) -> None:
        flat = {"type": "function", "name": "f", "parameters": {"type": "object"}}
        [trace], report = import_chat([file(row(USER, HELLO, tools=[flat, tool("f"), {"type": "web_search"}]))])
        assert trace.tools == (tool("f"),)
        assert report.ignored == {"tools[] of type 'web_search'": 1}

    def test_a_developer_speaks_as_the_system(self, file: Any) -> None:
        [trace], _ = import_chat([file(row({"role": "developer", "content": "rules"}, USER, HELLO))])
        assert trace.messages[0].role == "system"

    @pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
    def test_reasoning_is_kept_apart_from_the_content(self, file: Any, key: str) -> None:
        [trace], report = import_chat([file(row(USER, {**HELLO, key: "hm", "refusal": None}))])
        assert trace.messages[1] == Message.from_chat({**HELLO, "reasoning_content": "hm"})
        assert trace.messages[1].reasoning == "hm"
        assert not report.ignored

    def test_reasoning_that_is_no_text_is_counted(self, file: Any) -> None:
        [trace], report = import_chat([file(row(USER, {**HELLO, "thinking": {"signature": "x"}}))])
        assert trace.messages[1].to_chat() == HELLO
        assert report.ignored == {"messages[].thinking": 1}

    def test_unknown_keys_are_kept_on_request(self, file: Any) -> None:
        path = file(row(USER, {**HELLO, "score": 2}, licence="MIT", empty=None))
        [trace], report = import_chat([path], unknown_keys="keep")
        assert trace.meta["extra"] == {"licence": "MIT"}
        assert report.ignored == {"unknown key messages[].score": 1, "unknown key licence": 1}

    def test_a_turn_with_weight_zero_is_history_only(self, file: Any) -> None:
        path = file(row(USER, {**HELLO, "weight": 0}, USER, {**HELLO, "weight": 1}))
        [trace], report = import_chat([path])
        assert [state.turn for state in candidates(trace)] == [1]
        assert report.dropped_turns == {"marked_not_trained": 1}

    def test_a_turn_that_the_token_limit_cut_is_history_only(self, file: Any) -> None:
        cut = {**HELLO, "finish_reason": "length"}
        [trace], report = import_chat([file(row(USER, cut, USER, {**HELLO, "finish_reason": "stop"}))])
        assert [state.turn for state in candidates(trace)] == [1]
        assert report.dropped_turns == {"marked_not_trained": 1} and not report.ignored

    @pytest.mark.parametrize("weight", ["0", -1, 0.5, [0]])
    def test_a_weight_that_is_neither_0_nor_1_is_refused_and_not_taken_for_1(self, file: Any, weight: Any) -> None:
        path = file(row(USER, {**HELLO, "weight": weight}))
        assert ": field 'messages[1].weight': is " in refusal(path)

    def test_a_json_list_and_mislabelled_json_lines_are_read(self, file: Any) -> None:
        whole = file(json.dumps([row(USER, HELLO), row(USER)], indent=1), name="list.json")
        assert refusal(whole).startswith(": field '[1].messages': hold no assistant turn;")
        lines = file(row(USER, HELLO, id="1"), row(USER, HELLO, id="2"), name="lines.json")
        assert len(import_chat([lines])[0]) == 2

    def test_a_document_that_is_cut_off_stops_or_loses_only_its_end(self, file: Any) -> None:
        path = file("[" + json.dumps(row(USER, HELLO, id="whole")) + ', {"messages"', name="broken.json")
        assert refusal(path).startswith(": field 'after [0]': is not complete JSON (it ends inside a value)")
        [trace], report = import_chat([path], on_error="drop")
        assert (trace.id, report.dropped_traces) == ("whole", {"not_a_json_object": 1})


class TestTurns:
    def test_text_and_calls_in_messages_of_their_own_are_one_turn(self, file: Any) -> None:
        parallel = [HELLO, call("f", call_id="1"), call("g", call_id="2"), answer("1"), answer("2")]
        [trace], report = import_chat([file(row(USER, *parallel, HELLO))])
        assert trace.messages[1].content == "hello"
        assert [c.name for c in trace.messages[1].tool_calls] == ["f", "g"]
        assert (len(candidates(trace)), report.turns_read, report.merged_messages) == (2, 2, 2)

    def test_text_followed_by_more_text_is_one_turn(self, file: Any) -> None:
        [trace], report = import_chat([file(row(USER, HELLO, HELLO, call(content="now")))])
        assert [message.content for message in trace.messages] == ["do it", "hello\nhello\nnow"]
        assert (report.turns_kept, report.merged_messages) == (1, 2)

    def test_text_after_a_call_is_another_turn(self, file: Any) -> None:
        [_], report = import_chat([file(row(USER, call(), HELLO, USER, HELLO))])
        assert report.dropped_turns == {"unanswered_call": 1, "after_assistant": 1}
        assert (report.turns_read, report.merged_messages) == (3, 0)

    def test_turns_that_are_no_candidates_never_stop_an_import(self, file: Any) -> None:
        path = file(
            row(USER, {"role": "assistant", "content": ""}, USER, call("g"), answer(), HELLO, tools=[tool("f")])
        )
        [trace], report = import_chat([path])
        assert len(trace.messages) == 6
        assert report.dropped_turns == {"empty_turn": 1, "undeclared_tool": 1}

    def test_only_successes_on_request_and_unknown_outcomes_counted_apart(self, file: Any) -> None:
        path = file(
            row(USER, HELLO, success=True, id="1"), row(USER, HELLO, reward=0, id="2"), row(USER, HELLO, id="3")
        )
        traces, report = import_chat([path], success_only=True)
        assert [trace.id for trace in traces] == ["1"]
        assert report.dropped_traces == {"not_successful": 1, "success_unknown": 1}
        assert report.dropped_turns == {"in_dropped_trace": 2}


class TestNames:
    def test_a_row_without_an_id_is_named_by_its_content(self, file: Any) -> None:
        one, two = file(row(USER, HELLO), name="a.jsonl"), file(row(USER, HELLO, domain=""), name="b.jsonl")
        [first], [second] = import_chat([one])[0], import_chat([two])[0]
        assert first.id == second.id
        assert import_chat([one, two])[1].dropped_traces == {"duplicate": 1}

    def test_equal_words_with_another_outcome_are_another_trace(self, file: Any) -> None:
        outcomes: list[dict[str, Any]] = [{}, {"reward": 0}, {"reward": 1}, {"success": True}]
        traces, report = import_chat([file(*(row(USER, HELLO, **one) for one in outcomes))])
        assert [trace.success for trace in traces] == [None, False, True, True]
        assert len({trace.id for trace in traces}) == 4 and not report.dropped_traces
        named = file(row(USER, HELLO, id="a", reward=0), row(USER, HELLO, id="a", reward=1))
        assert refusal(named).startswith(":2: field 'id': 'a' names another trace already")

    def test_traces_of_one_task_are_one_group_and_prefixes_of_one_trajectory_too(self, file: Any) -> None:
        path = file(row(USER, HELLO), row(USER, HELLO, USER, HELLO), row({**USER, "content": "other"}, HELLO))
        groups = [trace.group for trace in import_chat([path])[0]]
        assert groups[0] == groups[1] != groups[2]

    def test_talks_that_share_a_greeting_are_no_group_and_prefixes_of_one_are(self, file: Any) -> None:
        greeted = ({"role": "system", "content": "You are a clerk."}, {**HELLO, "content": "How can I help?"})
        asked = [{**USER, "content": text} for text in ("Where is W1?", "Where is W2?")]
        rows = [(asked[0], HELLO), (asked[0], HELLO, USER, HELLO), (asked[1], HELLO)]
        traces, _ = import_chat([file(*(row(*greeted, *rest) for rest in rows))])
        groups = [trace.group for trace in traces]
        assert groups[0] == groups[1] != groups[2]


class TestOneCallToldTwice:
    def imported(self, file: Any, said: dict[str, Any], **columns: Any) -> tuple[Message, dict[str, int]]:
        [trace], report = import_chat([file(row(USER, said, answer(), HELLO, **columns))])
        return trace.messages[1], dict(report.ignored)

    def test_in_the_form_of_old_and_in_todays(self, file: Any) -> None:
        old = {"name": "f", "arguments": '{"at": 1}'}
        both = call(arguments={"at": 1}) | {"function_call": old}
        said, ignored = self.imported(file, both)
        assert said.tool_calls == (ToolCall("f", {"at": 1}, "1"),) and list(ignored.values()) == [1]
        assert refusal(file(row(USER, {"role": "assistant", "function_call": "f()"}))).startswith(
            ":1: field 'messages[1].function_call': is not an object"
        )
        other = both | {"function_call": old | {"arguments": '{"at": 2}'}}
        assert refusal(file(row(USER, other))).startswith(":1: field 'messages[1].function_call': is another call")

    def test_in_the_text_and_beside_it(self, file: Any) -> None:
        told = '<tool_call>\n{"name": "f", "arguments": {"at": 1}}\n</tool_call>'
        said, ignored = self.imported(file, call(arguments={"at": 1}, content=f"<think>{told}</think>I go.\n{told}"))
        assert (said.content, len(said.tool_calls)) == (f"<think>{told}</think>I go.", 1)
        assert ignored == {"calls that are told twice": 1}
        said, ignored = self.imported(file, call(arguments={"at": 2}, content=told))
        assert (said.content, len(said.tool_calls), ignored) == (told, 1, {})

    def test_with_one_id(self, file: Any) -> None:
        twice = call()
        twice["tool_calls"] *= 2
        assert self.imported(file, twice)[1] == {"calls that are told twice": 1}
        parallel = call(call_id=None)
        parallel["tool_calls"] *= 2
        [trace], report = import_chat([file(row(USER, parallel, answer(), answer(), HELLO))])
        assert len(trace.messages[1].tool_calls) == 2 and not report.ignored, "calls without ids may be equal"


@given(st.sampled_from(["planner", None]), st.sampled_from(["writer", "", None]))
def test_two_speakers_are_two_turns_and_one_keeps_its_name(one: str | None, two: str | None) -> None:
    said = [HELLO | {"name": one}, HELLO | {"name": two}]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.jsonl"
        path.write_text(json.dumps(row(USER, *said)))
        [trace], report = import_chat([path])
    names = [message.name for message in trace.messages[1:]]
    assert names == ([one] if one == two else [one, two])
    assert report.merged_messages == (one == two)


@pytest.mark.parametrize("text", [
    '{"error": "city not found"}', '{"errors": ["x"]}', '{"isError": true, "content": []}', '{"success": false}',
    '{"status": "error"}', '{"output": "", "metadata": {"exit_code": 2}}', "Error: no such order",
    "ERROR: bash: no such file",
    "error", "[ERROR] x", "Error executing tool f: x", "Traceback (most recent call last):\n...", "KeyError: 'x'",
    "{'error': 'no such city'}", "<tool_use_error>x</tool_use_error>", "Exception: x", "Error (404)", "  error!",
    "json.decoder.JSONDecodeError: x",
])  # fmt: skip
def test_a_result_that_tells_an_error_is_one(text: str) -> None:
    assert reports_error(text.strip())


@pytest.mark.parametrize("text", [
    "Error rate: 3%", "Errors: 0\n4 C", "errors were not found", "error_log.txt", '{"error": null, "response": "4 C"}',
    '{"error": "", "x": 1}', '{"errors": []}', '{"error": false}', '{"error": 0.03, "epoch": 3}', '{"error": "none"}',
    '{"status": "failed", "payment": 7}', '{"a": "error"}', "No error.", "", "{error: broken}", "Error: none",
    "{'error': None, 'x': 1}", "{}", "Error: 0", '{"exit_code": 0}', "ErrorBars: 3 values",
])  # fmt: skip
def test_a_result_that_only_names_errors_is_none(text: str) -> None:
    assert not reports_error(text.strip())


@pytest.mark.parametrize(("name", "beginning", "what"), [
    ("a.jsonl", b"PK\x03\x04\n{}", "a zip archive"),
    ("a.json", b"\x1f\x8b\x08", "a gzip archive"),
    ("a.txt", b"\x28\xb5\x2f\xfd\xff", "a zstd archive"), ("a.jsonl", b"SQLite format 3\x00", "an SQLite database"),
    ("a.jsonl", b"ARROW1\x00\x00", "an Arrow file"),
])  # fmt: skip
def test_a_file_that_is_no_text_is_called_what_it_is(tmp_path: Path, name: str, beginning: bytes, what: str) -> None:
    path = tmp_path / name
    path.write_bytes(beginning)
    said = refusal(path)
    assert what in said and "not text" in said and "UTF-8" not in said


@pytest.mark.parametrize("indent", [None, 0, 2])
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a"])
def test_a_pretty_printed_list_is_read_whatever_its_file_is_called(
    tmp_path: Path, name: str, indent: int | None
) -> None:
    path = tmp_path / name
    text = json.dumps([row(USER, HELLO, id="1"), row(USER, HELLO, id="2")], indent=indent)
    path.write_text(text if indent is not None else text.replace("}, {", "},\n{"))
    assert [trace.id for trace in import_chat([path])[0]] == ["1", "2"]


def test_a_nearest_key_is_one_that_the_row_lacks_and_hides_no_advice(file: Any) -> None:
    assert "did you mean" not in refusal(file(row(USER, HELLO, images=[])))
    said = refusal(file(row(USER, HELLO, rewards=1)))
    assert "did you mean 'reward'?" in said and "--unknown-keys keep" in said


def test_roles_of_other_libraries_are_named_also_where_no_turn_is_left(file: Any) -> None:
    for role, ours in (("human", "user"), ("ai", "assistant")):
        said = refusal(file(row({"role": role, "content": "x"}, *([HELLO] if role == "human" else []))))
        assert said.startswith(f":1: field 'messages[0].role': unknown role {role!r}; write {ours!r} for it")


def test_what_matches_no_format_is_told_all_that_were_tried_in_whole_words(file: Any) -> None:
    said = refusal(file({"query": "x", "conversations": [], "surprise": 1}))
    assert all(f" {name}" in said for name in parts.names("trace_formats")) and "characters ...]" not in said
    assert "sharegpt (no 'conversations' of {from, value})" in said


def test_an_id_may_be_a_whole_float_as_pandas_writes_them(tmp_path):
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps({"id": 1.0, "messages": talk}))
    [trace], _ = import_chat([path])
    assert trace.id == "1"
    path.write_text(json.dumps({"id": 1.5, "messages": talk}))
    with pytest.raises(InputError, match="field 'id': is float"):
        import_chat([path])


@pytest.mark.parametrize("place", ["call", "part", "declaration"])
def test_an_unknown_key_inside_a_chat_row_is_refused_with_advice_that_works(file: Any, place: str) -> None:
    said, declared = call(arguments={"at": 1}), tool("f")
    said["content"] = [{"type": "text", "text": "I go."}]
    held = {"call": said["tool_calls"][0]["function"], "part": said["content"][0], "declaration": declared["function"]}
    held[place]["mood"] = "calm"
    path = file(row(USER, said, answer(), HELLO, tools=[declared]))
    told = refusal(path)
    assert ".mood': unknown key;" in told and "--unknown-keys keep" in told
    [trace], report = import_chat([path], unknown_keys="keep")
    assert [key for key in report.ignored if key.endswith(".mood")] and len(candidates(trace)) == 2
