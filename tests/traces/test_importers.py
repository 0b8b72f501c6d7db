"""Every format: its fixture is recognised and counted, and no damage to it is met with a traceback or with silence."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_fixtures import CLAUDE, FIXTURES, SDK, Fixture, adds_up, claude, line, lines, text_item, use, used

from chat_import import import_chat
from turntree.core import parts
from turntree.core.config import Part
from turntree.core.errors import InputError
from turntree.traces.candidates import candidates
from turntree.traces.chat import ImportReport
from turntree.traces.formats.row import told
from turntree.traces.schema import Trace

every_format = pytest.mark.parametrize("name", FIXTURES)


def imported(fixture: Fixture, text: str | None = None, **options: Any) -> tuple[list[Trace], ImportReport]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / fixture.name
        path.write_text(fixture.text if text is None else text)
        return import_chat([path], **fixture.options, **options)


def test_every_registered_format_has_a_fixture_and_tells_its_rows() -> None:
    names = set(parts.names("trace_formats"))
    assert names == {name.split()[0] for name in FIXTURES}
    assert all(told(parts.load("trace_formats", name).target) is not None for name in names)


@every_format
def test_a_fixture_is_recognised_and_all_its_turns_are_accounted_for(name: str) -> None:
    fixture = FIXTURES[name]
    traces, report = imported(fixture)
    assert set(report.formats) == {name.split()[0]}
    assert (report.turns_read, report.turns_kept, report.dropped_turns) == (
        fixture.turns,
        fixture.kept,
        fixture.dropped,
    )
    assert adds_up(report) and len(traces) == fixture.traces
    assert tuple(trace.success for trace in traces) == fixture.success
    assert not fixture.unknown or report.ignored[fixture.unknown] >= 1, report.ignored
    assert all(trace.messages[0].role in ("system", "user", "assistant") for trace in traces)


@every_format
def test_a_format_that_is_named_reads_what_auto_reads(name: str) -> None:
    assert imported(FIXTURES[name], format=name.split()[0]) == imported(FIXTURES[name])


# damage


WELL_FORMED = {"duplicate", "no_candidate_turn", "left_out_by_format"}


@functools.cache
def whole(name: str) -> ImportReport:
    return imported(FIXTURES[name], on_error="drop")[1]


def account(report: ImportReport) -> tuple[Any, ...]:
    return report.dropped_traces, report.dropped_turns, report.cut_traces, report.ignored


def check(fixture: Fixture, text: str) -> ImportReport:
    """What stops an import (in one line) is counted by one that goes on; what does not stop it loses nothing more."""
    try:
        stopping = imported(fixture, text)
    except InputError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000
        stopping = None
    going_on = traces, report = imported(fixture, text, on_error="drop")
    assert adds_up(report)
    assert report.turns_kept == sum(len(candidates(trace)) for trace in traces)
    assert "format_failed" not in report.dropped_traces
    malformed = set(report.dropped_traces) - WELL_FORMED or report.cut_traces
    assert not malformed if stopping == going_on else malformed and stopping is None
    return report


@every_format
@settings(max_examples=8, deadline=None)
@given(share=st.floats(0.02, 0.98))
def test_a_file_that_is_cut_off_is_an_error_or_loses_only_what_is_counted(name: str, share: float) -> None:
    fixture = FIXTURES[name]
    if name != "react":  # a text has no end that could be missed
        check(fixture, fixture.text[: int(len(fixture.text) * share)])


def documents(fixture: Fixture) -> list[Any]:
    if fixture.name.endswith(".jsonl"):
        return [json.loads(line) for line in fixture.text.splitlines()]
    return [json.loads(fixture.text)]


def written(fixture: Fixture, values: list[Any]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [*([at] if at else []), *(place for key, one in inside for place in places(one, (*at, key)))]


def changed(values: list[Any], at: tuple[Any, ...], new: Any) -> list[Any]:
    values = copy.deepcopy(values)
    holder: Any = values
    for key in at[:-1]:
        holder = holder[key]
    if new is DELETE:
        del holder[at[-1]]
    else:
        holder[at[-1]] = new
    return values


DELETE = object()
WRONG = st.sampled_from([None, 3, 0.5, True, "", "text", [], {}, [3], {"a": 1}, [[]], "{oops", DELETE])
structured = pytest.mark.parametrize("name", [name for name in FIXTURES if name != "react"])


@structured
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_value_of_a_wrong_type_is_an_error_or_counted(name: str, data: st.DataObject) -> None:
    fixture = FIXTURES[name]
    values = documents(fixture)
    at = data.draw(st.sampled_from([place for place in places(values) if len(place) > 1]))
    old, new = functools.reduce(lambda value, key: value[key], at, values), data.draw(WRONG)
    report = check(fixture, written(fixture, changed(values, at, new)))
    fewer = report.turns_kept < whole(name).turns_kept
    if fewer and not isinstance(old, dict | list) and new is not None and new is not DELETE:
        assert account(report) != account(whole(name)), "turns are gone, and the report says nothing"


IDS = frozenset({"id", "call_id", "tool_call_id", "tool_call_ids", "callID", "tool_use_id", "source_call_id", "uuid"})
IDS |= {"parentUuid", "sessionId", "session_id", "trajectory_id", "instance_id", "task_id", "example_id", "index"}


@structured
def test_ids_that_are_missing_everywhere_leave_no_turn_uncounted(name: str) -> None:
    fixture = FIXTURES[name]

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without(one) for key, one in value.items() if key not in IDS}
        return [without(one) for one in value] if isinstance(value, list) else value

    values = [without(value) for value in documents(fixture)]
    if name == "claude_code":  # a line without any id is no longer told as one of theirs
        values = [value if isinstance(value, list) else value | {"uuid": "x"} for value in values]
    report = check(fixture, written(fixture, values))
    assert report.turns_read + report.dropped_traces.total() > 0


@structured
def test_a_row_that_stands_twice_is_counted_and_kept_once(name: str) -> None:
    fixture = FIXTURES[name]
    values = documents(fixture)
    with tempfile.TemporaryDirectory() as folder:
        for copy_of in ("a", "b"):
            (Path(folder) / copy_of).mkdir()
            (Path(folder) / copy_of / fixture.name).write_text(written(fixture, values))
        traces, report = import_chat([folder], on_error="drop", **fixture.options)
    once = whole(name)
    assert adds_up(report)
    assert (len(traces), report.turns_kept) == (once.traces_kept, once.turns_kept)
    assert report.turns_read == 2 * once.turns_read
    assert report.dropped_traces["duplicate"] == once.traces_kept


@pytest.mark.parametrize(
    ("name", "key"), [("openhands", "trajectory_id"), ("sharegpt", "id"), ("atif", "session_id"), ("opencode", "info")]
)
def test_one_id_with_two_contents_stops_or_counts_the_second_with_its_turns(name: str, key: str) -> None:
    fixture = FIXTURES[name]
    [one] = documents(fixture)
    other = json.loads(json.dumps(one).replace("look", "glance").replace("the issue", "it"))
    assert other != one
    text = "".join(json.dumps(row) + "\n" for row in (one, other))
    lines = Fixture("rows.jsonl", text, 0, 0, {})
    with pytest.raises(InputError, match="names another trace already"):
        imported(lines)
    _, report = imported(lines, on_error="drop")
    assert report.dropped_traces == {"duplicate_id": 1}
    assert report.dropped_turns["duplicate_id"] == fixture.turns and adds_up(report)


# what the fixtures become, where it is more than a change of names


def roles(trace: Trace) -> list[tuple[str, int]]:
    return [(message.role, len(message.tool_calls)) for message in trace.messages]


def only(name: str, **options: Any) -> Trace:
    [trace] = imported(FIXTURES[name], **options)[0]
    return trace


def test_parallel_calls_are_one_turn_though_results_were_logged_between_them() -> None:
    shape = [("system", 0), ("user", 0), ("assistant", 2), ("tool", 0), ("tool", 0), ("assistant", 1), ("tool", 0)]
    main, helper = imported(FIXTURES["claude_code"])[0]
    assert roles(main)[:6] == shape[1:]
    assert (main.messages[1].content, main.id, helper.id) == ("I look.", "s1", "s1/s1")


def test_what_a_user_rewound_to_before_is_not_in_the_history_of_what_follows() -> None:
    main, helper = imported(FIXTURES["claude_code"])[0]
    texts = [message.content for message in main.messages]
    assert "no, do it so" in texts and "That was wrong." not in texts
    assert main.group == helper.group == "s1"
    assert helper.messages[0].content == "you are a helper"


def test_after_a_compaction_a_session_goes_on_from_the_summary() -> None:
    before, after = imported(FIXTURES["codex"])[0]
    assert [message.content for message in after.messages[:3]] == [
        "You are Codex.", "What was done: all of it.", "and the tests?"
    ]  # fmt: skip
    assert (before.id, after.id, before.group, after.group) == ("s1", "s1#2", "s1", "s1")
    assert before.messages[4].tool_calls[0].arguments == {"input": "*** Begin"}


def test_one_screen_answers_all_calls_of_a_step() -> None:
    trace = only("atif")
    assert [(m.tool_call_id, m.content) for m in trace.messages[2:4]] == [("a", ""), ("b", "one screen for both")]


def test_calls_written_in_text_are_calls() -> None:
    trace = only("sharegpt")
    assert roles(trace) == [
        ("system", 0), ("user", 0), ("assistant", 1), ("tool", 0), ("assistant", 1), ("tool", 0), ("assistant", 0)
    ]  # fmt: skip
    assert (trace.messages[2].content, trace.messages[2].tool_calls[0].arguments) == (
        "<think>hm</think>",
        {"command": "ls"},
    )
    assert trace.messages[3].content == "a.py"


def test_thought_and_action_are_one_turn_of_a_react_text() -> None:
    first, second = imported(FIXTURES["react"])[0]
    assert [message.role for message in first.messages] == ["user", "assistant", "user", "assistant", "user"]
    assert first.messages[1].content == "Thought 1: I need to search it.\nAction 1: Search[It]"
    assert first.messages[2].content.endswith("a novel\nof 1986.")
    assert first.group != second.group and first.meta["answer"] == "Stephen King"


def test_a_rollout_without_input_takes_its_prompt_from_the_metadata() -> None:
    trace = only("responses")
    assert [message.content for message in trace.messages[:2]] == ["You repair code.", "fix the bug"]
    assert trace.meta["prompt_from"] == "responses_create_params.metadata.problem_statement"


def test_the_system_prompt_of_tau2_is_rebuilt_or_the_policy_alone() -> None:
    assert only("tau2").messages[0].content.startswith("<instructions>\nYou are a customer service agent")
    plain = Part("tau2", {"system_prompt": "policy"})
    assert only("tau2", format=plain).messages[0].content == "Be kind."


def test_calls_of_the_old_form_are_calls() -> None:
    trace = only("chat")
    assert roles(trace) == [("user", 0), ("assistant", 1), ("tool", 0), ("assistant", 0)]
    assert trace.messages[1].tool_calls[0].arguments == {"command": "ls"}
    assert trace.tools[0]["function"]["name"] == "bash"


@pytest.mark.parametrize(
    ("rule", "kept", "dropped"),
    [
        ("turns", 3, {}),
        ("tool_calls", 1, {"error_tool_call": 1, "not_a_tool_call": 1}),
        ("bash", 2, {"not_a_bash_action": 1}),
        ("search", 0, {"not_a_search_step": 3}),
    ],
)
def test_the_rule_of_the_candidates_can_be_chosen(rule: Any, kept: int, dropped: dict[str, int]) -> None:
    _, report = imported(FIXTURES["openhands"], candidates=rule)
    assert (report.turns_kept, report.dropped_turns) == (kept, dropped)


def test_a_session_with_a_damaged_line_ends_there_and_counts_what_followed() -> None:
    fixture = FIXTURES["codex"]
    text = fixture.text.splitlines()
    text[6] = text[6][:30]  # the result of the first call
    with pytest.raises(InputError, match=r"rollout-1\.jsonl:7: .*is not complete JSON"):
        imported(fixture, "\n".join(text))
    traces, report = imported(fixture, "\n".join(text), on_error="drop")
    assert report.turns_read == fixture.turns and adds_up(report)
    assert report.dropped_turns == {"after_malformed_message": 2} and report.cut_traces == {"malformed_message": 1}
    assert len(traces) == 2


def test_given_tools_are_declared_where_a_source_records_none() -> None:
    tools = [{"type": "function", "function": {"name": "Bash"}}, {"type": "function", "function": {"name": "Task"}}]
    assert all(trace.tools == tuple(tools) for trace in imported(FIXTURES["claude_code"], tools=tools)[0])
    assert only("openhands", tools=tools).tools[0]["function"]["name"] == "bash"


def test_two_formats_that_fit_one_row_are_both_named() -> None:
    row = {"query": "q", "turn_history": {"actions": []}, "output": {"history": []}}
    both = Fixture("x.jsonl", json.dumps(row), 0, 0, {})
    with pytest.raises(InputError, match="looks like agentbench and like intercode; name one of them with --format"):
        imported(both)


# commands that failed


def dropped_for_an_error(fixture: Fixture, *rows: Any) -> bool:
    text = json.dumps(rows[0]) if len(rows) == 1 else "".join(json.dumps(row) + "\n" for row in rows)
    return imported(fixture, text)[1].dropped_turns["error_tool_call"] > 0


@pytest.mark.parametrize("place", [{"exit_code": 2}, {"exit_code": None, "metadata": {"exit_code": 2}}])
def test_a_command_of_openhands_sdk_fails_by_its_exit_code(place: dict[str, Any]) -> None:
    def row(told: dict[str, Any]) -> dict[str, Any]:
        made = copy.deepcopy({**SDK, "history": SDK["history"][:4]})
        made["history"][3]["observation"] |= told
        return made

    _, report = imported(FIXTURES["openhands_events sdk"], json.dumps(row({"exit_code": 0})))
    assert report.turns_kept == 1
    traces, report = imported(FIXTURES["openhands_events sdk"], json.dumps(row(place)))
    assert not traces and report.dropped_turns == {"error_tool_call": 1}


CODEX_RESULTS = [
    ({"output": "no", "metadata": {"exit_code": 1}}, True),
    ({"output": "a", "metadata": {"exit_code": 0}}, False),
    (json.dumps({"output": "no", "metadata": {"exit_code": 1, "duration_seconds": 0.1}}), True),
    (json.dumps({"output": "a", "metadata": {"exit_code": 0}}), False),
    ("Exit code: 1\nWall time: 0.1 seconds\nOutput:\nno", True),
    ("Chunk ID: a\nWall time: 0.1 seconds\nProcess exited with code 2\nOutput:\nno", True),
    ("Exit code: 0\nWall time: 0.1 seconds\nOutput:\nExit code: 1", False),
    ("Wall time: 0.1 seconds\nOutput:\nExit code: 1", False),
]


@pytest.mark.parametrize(("output", "failed"), CODEX_RESULTS)
def test_a_command_of_codex_fails_by_its_exit_code(output: Any, failed: bool) -> None:
    call = line("response_item", type="function_call", name="shell", arguments="{}", call_id="c")
    result = line("response_item", type="function_call_output", call_id="c", output=output)
    meta = line("session_meta", id="s1", cwd="/w", cli_version="0.60")
    fine = [text_item("user", "go on"), call, line("response_item", type="function_call_output", call_id="c",
            output="fine")]  # fmt: skip
    assert dropped_for_an_error(FIXTURES["codex"], meta, text_item("user", "go"), call, result, *fine) is failed


def test_what_the_context_of_an_openhands_agent_adds_to_a_message_is_in_its_history() -> None:
    system, asked, *rest = copy.deepcopy(SDK["history"])
    system["dynamic_context"] = {"type": "text", "text": "It is a repository."}
    asked["extended_content"] = [{"type": "text", "text": "Of skills."}]
    [trace], _ = imported(FIXTURES["openhands_events sdk"], json.dumps(SDK | {"history": [system, asked, *rest]}))
    assert [message.content for message in trace.messages[:2]] == ["You help.\nIt is a repository.", "go\nOf skills."]


def test_a_turn_of_claude_code_that_the_token_limit_cut_is_no_demonstration() -> None:
    lines = copy.deepcopy(CLAUDE)
    lines[6]["message"]["stop_reason"] = "max_tokens"  # the last piece of a response of several lines
    _, whole = imported(FIXTURES["claude_code"])
    _, report = imported(FIXTURES["claude_code"], "".join(json.dumps(row) + "\n" for row in lines))
    assert report.dropped_turns - whole.dropped_turns == {"marked_not_trained": 1}
    assert report.turns_read == whole.turns_read


def codex_call(name: str) -> list[dict[str, Any]]:
    call = line("response_item", type="function_call", name="shell", arguments="{}", call_id=name)
    return [call, line("response_item", type="function_call_output", call_id=name, output="fine")]


@pytest.mark.parametrize(("turns", "left", "dropped"), [(1, ["setup", "first", "", "fine"], 2), (9, ["setup"], 3)])
def test_turns_of_codex_that_were_rolled_back_are_not_in_the_history_of_what_follows(
    turns: int, left: list[str], dropped: int
) -> None:
    meta = line("session_meta", id="s1", cwd="/w", cli_version="0.60")
    setup = "<environment_context>setup</environment_context>"
    before = [text_item("user", setup), text_item("user", "first"), *codex_call("a")]
    wrong = [text_item("user", "second"), *codex_call("b"), text_item("assistant", "done")]
    back = line("event_msg", type="thread_rolled_back", num_turns=turns)
    after = [text_item("user", "third"), *codex_call("c")]
    rows = [meta, *before, *wrong, back, *after]
    [trace], report = imported(FIXTURES["codex"], "".join(json.dumps(row) + "\n" for row in rows))
    assert [message.content for message in trace.messages] == [setup, *left[1:], "third", "", "fine"]
    assert report.dropped_turns == {"abandoned_branch": dropped} and adds_up(report)


def test_a_step_of_opencode_that_the_token_limit_cut_is_no_demonstration() -> None:
    def message(role: str, *parts: dict[str, Any], **info: Any) -> dict[str, Any]:
        return {"info": {"role": role, **info}, "parts": list(parts)}

    def used_tool(name: str, reason: str) -> list[dict[str, Any]]:
        state = {"status": "completed", "input": {}, "output": "fine"}
        tool = {"type": "tool", "tool": "bash", "callID": name, "state": state}
        return [{"type": "step-start"}, tool, {"type": "step-finish", "reason": reason}]

    steps = [*used_tool("a", "tool-calls"), *used_tool("b", "length"), *used_tool("c", "tool-calls")]
    cut = [{"type": "step-start"}, *used_tool("d", "tool-calls")[1:2]]
    said = [message("user", {"type": "text", "text": "go"}), message("assistant", *steps)]
    row = {"info": {"id": "o"}, "messages": [*said, message("assistant", *cut, finish="length")]}
    [trace], report = imported(FIXTURES["opencode"], json.dumps(row))
    assert trace.meta["skip_turns"] == {"1": "marked_not_trained", "3": "marked_not_trained"} and adds_up(report)


def test_reasoning_that_is_text_is_kept_and_other_forms_are_counted() -> None:
    thought = {"reasoning_content": "hm"}
    history = copy.deepcopy(SDK["history"])
    history[2] |= thought | {"thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "s"}]}
    done = {
        "id": "7",
        "source": "agent",
        "kind": "MessageEvent",
        "llm_message": {"role": "assistant", "content": "done"},
    }
    done["llm_message"] |= thought
    [trace], report = imported(FIXTURES["openhands_events sdk"], json.dumps(SDK | {"history": [*history, done]}))
    assert [message.reasoning for message in trace.messages if message.role == "assistant"] == ["hm", "", "hm"]
    assert report.ignored["thinking_blocks"] == 1

    said = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "done", **thought}]
    for name, key in (("swe_gym", "messages"), ("openhands", "trajectory")):
        row = json.dumps({key: said, "run_id": "r", "instance_id": "i"})
        [trace], report = imported(FIXTURES[name], row, candidates="turns")
        assert trace.messages[1].reasoning == "hm" and "unknown key messages[].reasoning_content" not in report.ignored
    assert imported(FIXTURES["atif"])[0][0].messages[1].reasoning == "hm"


def test_a_call_written_as_text_that_is_no_strict_json_ends_its_trace_at_the_import() -> None:
    call = '{"function": {"name": "f", "arguments": {"x": NaN}}}'
    row = {"prompt": "go", "completion": [{"role": "assistant", "content": "", "tool_calls": [call]}], "reward": 1.0}
    with pytest.raises(InputError, match=r"tool_calls\.arguments"):
        imported(FIXTURES["verifiers"], json.dumps(row))


def test_a_call_inside_a_thought_is_none() -> None:
    made = '<tool_call>{"name": "b", "arguments": {}}</tool_call>'
    said = f"<think>{made.replace('b', 'a')}</think>\n{made}"
    row = {"conversations": [{"from": "human", "value": "go"}, {"from": "gpt", "value": said}]}
    [trace], _ = imported(FIXTURES["sharegpt"], json.dumps(row))
    assert [call.name for call in trace.messages[1].tool_calls] == ["b"]
    assert trace.messages[1].content.endswith("</think>")


def test_what_a_result_has_beside_its_tags_is_counted() -> None:
    shown = "2 results\n<tool_response>7</tool_response>\n<tool_response>8</tool_response>"
    turns = [("human", "go"), ("gpt", "<tool_call>{}</tool_call>" * 2), ("tool", shown), ("gpt", "15")]
    row = {"conversations": [{"from": who, "value": what.replace("{}", '{"name": "b"}')} for who, what in turns]}
    [trace], report = imported(FIXTURES["sharegpt"], json.dumps(row))
    assert [message.content for message in trace.messages[2:4]] == ["7", "8"]
    assert report.ignored == {"text beside <tool_response>": 1}


# branches and forks of Claude Code


def attempts(parent: str | None, content: Any) -> list[dict[str, Any]]:
    """A first attempt, and another one that the user began at `parent`."""
    return [
        claude("user", "1", None, "fix it"),
        claude("assistant", "2", "1", [use("a")], response="m1"),
        claude("user", "3", "2", [used("a")]),
        claude("assistant", "4", "3", [{"type": "text", "text": "That was wrong."}], response="m2"),
        claude("user", "5", parent, content),
        claude("assistant", "6", "5", [use("b")], response="m3"),
        claude("user", "7", "6", [used("b")]),
    ]


@pytest.mark.parametrize("content", ["do it so", [{"type": "text", "text": "do it so"}]])
@pytest.mark.parametrize(("parent", "abandoned"), [("3", 1), (None, 2), ("4", 0)])
def test_a_branch_is_abandoned_wherever_the_user_went_back_to_and_however_he_wrote(
    parent: str | None, abandoned: int, content: Any
) -> None:
    text = "".join(json.dumps(row) + "\n" for row in attempts(parent, content))
    [trace], report = imported(FIXTURES["claude_code"], text)
    assert report.dropped_turns["abandoned_branch"] == abandoned
    assert ("That was wrong." in [message.content for message in trace.messages]) is (abandoned == 0)
    assert ("fix it" in [message.content for message in trace.messages]) is (parent is not None)


@pytest.mark.parametrize("parent", ["3", None, "4"])
@given(places=st.sets(st.integers(1, 7)), kinds=st.lists(st.sampled_from(["system", "attachment"]), min_size=8))
def test_lines_between_messages_and_lines_written_twice_change_no_trace(
    parent: str | None, places: set[int], kinds: list[str]
) -> None:
    """What Claude Code writes between messages has a place in the chain of their parents (2.1)."""
    rows = attempts(parent, "do it so")
    more: list[dict[str, Any]] = []
    after: dict[str, str] = {}
    for number, row in enumerate(rows, start=1):
        above = row["parentUuid"]
        more += [row | {"parentUuid": after.get(above, above)}] * (2 if number in places else 1)
        if number in places:
            after[row["uuid"]] = f"x{number}"
            more.append({**claude(kinds[number], f"x{number}", row["uuid"], None), "subtype": "turn_duration"})
    told = [imported(FIXTURES["claude_code"], lines(*some)) for some in (rows, more)]
    assert told[0][0] == told[1][0] and told[0][1].dropped_turns == told[1][1].dropped_turns


def test_what_a_user_wrote_while_claude_worked_stands_before_the_turn_that_saw_it() -> None:
    queued = {"type": "queued_command", "commandMode": "prompt", "prompt": "STOP, use python3 only"}
    rows = attempts("4", "do it so")
    rows.insert(3, {**claude("attachment", "q", "3", None), "attachment": queued})
    [trace], _ = imported(FIXTURES["claude_code"], lines(*rows))
    texts = [message.content for message in trace.messages]
    assert trace.messages[texts.index(queued["prompt"])].role == "user"
    assert texts.index(queued["prompt"]) + 1 == texts.index("That was wrong.")


IMAGE = {"type": "image", "source": {"type": "base64", "data": "AAAA"}}
SHOWN = {  # a file in which a turn was asked with an image
    "claude_code": [claude("user", "1", None, [{"type": "text", "text": "What is it?"}, IMAGE]),
                    claude("assistant", "2", "1", [{"type": "text", "text": "A cat."}, use("a")])],
    "claude_code alone": [claude("user", "1", None, [IMAGE]), claude("assistant", "2", "1", [use("a")])],
    "claude_code result": [claude("user", "1", None, "Look."), claude("assistant", "2", "1", [use("a")], response="m"),
                           claude("user", "3", "2", [used("a") | {"content": [IMAGE]}]),
                           claude("assistant", "4", "3", [use("b")], response="n")],
    "inspect": [{"id": 1, "epoch": 1, "target": "cat", "input": "q", "scores": {}, "messages": [
        {"role": "user", "content": [{"type": "text", "text": "What is it?"}, {"type": "image", "image": "data:A"}]},
        {"role": "assistant", "content": "A cat."}]}],
    "opencode": [{"info": {"id": "s"}, "messages": [
        {"info": {"role": "user"}, "parts": [{"type": "text", "text": "What?"}, {"type": "file", "mime": "image/png"}]},
        {"info": {"role": "assistant"}, "parts": [{"type": "step-start"}, {"type": "text", "text": "A cat."}]}]}],
    "smolagents": [{"steps": [{"task": "What is it?", "task_images": ["A"]}, {"step_number": 1, "model_input_messages":
        [{"role": "user", "content": [{"type": "text", "text": "New task: What?"}, {"type": "image", "image": "A"}]}],
        "model_output_message": {"role": "assistant", "content": "A cat."}, "is_final_answer": True}]}],
    "sharegpt": [{"conversations": [{"from": "human", "value": "<image> What?"}, {"from": "gpt", "value": "A cat."}],
                  "images": ["a.png"]}],
}  # fmt: skip


@pytest.mark.parametrize("name", SHOWN)
def test_a_turn_behind_an_image_is_no_candidate_for_a_trace_cannot_show_it(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines(*SHOWN[name]))
    _, report = import_chat([tmp_path / "a.jsonl"], candidates="turns")
    assert report.dropped_turns["after_an_image"] == 1 and report.turns_kept == (1 if "result" in name else 0)


OLD_CALL = {"role": "assistant", "content": "I look.", "function_call": {"name": "weather", "arguments": '{"at": 1}'}}
ASKED = [{"role": "system", "content": "S"}, {"role": "user", "content": "Weather?"}]
OLD_FORMS = {
    "chat": {"messages": [*ASKED, OLD_CALL]},
    "verifiers": {"prompt": ASKED, "completion": [OLD_CALL], "reward": 1.0, "example_id": 0},
    "openhands": {"trajectory": [*ASKED, OLD_CALL], "trajectory_id": "x"},
    "swe_gym": {"messages": [*ASKED, OLD_CALL], "traj_id": "x"},
    "terminus": {"conversations": [*ASKED, OLD_CALL]},
    "langfuse": {
        "id": "g",
        "traceId": "t",
        "type": "GENERATION",
        "startTime": "2026",
        "input": ASKED,
        "output": OLD_CALL,
    },
}


@pytest.mark.parametrize("name", OLD_FORMS)
def test_a_call_of_the_old_form_is_the_call_of_its_turn_in_every_format(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines(OLD_FORMS[name]))
    [trace], report = import_chat([tmp_path / "a.jsonl"], candidates="turns", format=Part(name))
    assert [(call.name, call.arguments) for call in trace.messages[-1].tool_calls] == [("weather", {"at": 1})]
    assert report.turns_kept == 1


def test_a_fork_of_a_session_is_in_its_group_and_so_are_the_sub_agents_of_both(tmp_path: Path) -> None:
    def write(name: str, session: str, rows: list[dict[str, Any]]) -> None:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps({**row, "sessionId": session}) + "\n" for row in rows))

    rows = [row for row in CLAUDE[1:] if not row["isSidechain"]]
    helper = [row | {"agentId": "h"} for row in CLAUDE[1:] if row["isSidechain"]]
    more = [claude("user", "15", "14", "and the tests?"), claude("assistant", "16", "15", [use("g")], response="m7")]
    write("s1.jsonl", "s1", rows)
    write("s1/agent-h.jsonl", "s1", helper)
    write("s2.jsonl", "s2", [*rows, *more, claude("user", "17", "16", [used("g")])])
    asked, acted = claude("user", "x1", None, "fix it"), claude("assistant", "x2", "x1", [use("a")], response="m1")
    write("s3.jsonl", "s3", [asked, acted, claude("user", "x3", "x2", [used("a")])])
    traces, _ = import_chat([tmp_path])
    found = {trace.id: trace.group for trace in traces}
    assert found == {"s1": "s1", "s1/h": "s1", "s2": "s1", "s3": "s3"}


def test_a_text_with_tags_becomes_a_turn_a_call_whose_results_are_not_the_assistants() -> None:
    """The cold start of Tool-Star and ARPO is one assistant text a question, results and all."""
    from turntree_interop.sharegpt import read_sharegpt

    text = (
        "<think>Who?</think> <search>winnie the pooh artist</search> <result>\nE. H. Shepard\n</result>\n"
        "<python>print(2)</python><result>2</result> So <answer>E. H. Shepard</answer>"
    )
    alpaca = {"system": "Use tools.", "instruction": "Who illustrated it?", "input": "", "output": text}
    spoken = [{"from": "human", "value": "Who illustrated it?"}, {"from": "gpt", "value": text}]
    for row in (alpaca, {"system": "Use tools.", "conversations": spoken}):
        messages = read_sharegpt(row).messages
        assert [message["role"] for message in messages] == [
            *("system", "user"),
            *("assistant", "tool", "assistant", "tool", "assistant"),
        ]
        calls = [m["tool_calls"][0]["function"] for m in messages if m.get("tool_calls")]
        assert calls == [
            {"name": "search", "arguments": {"query": "winnie the pooh artist"}},
            {"name": "python", "arguments": {"code": "print(2)"}},
        ]
        said = " ".join(m["content"] for m in messages if m["role"] == "assistant")
        assert "Shepard" in said.partition("<answer>")[2] and "Shepard" not in said.partition("<answer>")[0]
        assert [m["content"] for m in messages if m["role"] == "tool"] == ["E. H. Shepard", "2"]


# contexts that were compacted


def event(kind: str, name: str, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "id": name, "source": "agent", **more}


def acted(number: int) -> list[dict[str, Any]]:
    call = {"id": f"c{number}", "name": "terminal", "arguments": "{}"}
    told = {"tool_name": "terminal", "tool_call_id": f"c{number}"}
    seen = {"content": [{"type": "text", "text": f"seen {number}"}]}
    action = event("ActionEvent", f"a{number}", **told, tool_call=call, llm_response_id=f"r{number}", thought=[])
    return [action, event("ObservationEvent", f"o{number}", **told, observation=seen)]


@given(forgotten=st.sets(st.integers(0, 3), min_size=1), more=st.integers(1, 3))
@settings(max_examples=30)
def test_what_a_condensation_forgets_is_in_no_later_history_and_every_turn_counts_once(
    forgotten: set[int], more: int
) -> None:
    asked = event("MessageEvent", "e1", llm_message={"role": "user", "content": [{"type": "text", "text": "Fix it."}]})
    gone = [f"{kind}{number}" for number in forgotten for kind in "ao"]
    condensed = event("Condensation", "x", forgotten_event_ids=gone, summary="So far.", summary_offset=1)
    before, after = [[one for n in numbers for one in acted(n)] for numbers in (range(4), range(4, 4 + more))]
    (first, second), report = imported(FIXTURES["openhands_events sdk"], lines(asked, *before, condensed, *after))
    texts = [message.content for message in second.messages]
    assert not {f"seen {number}" for number in forgotten} & {*texts} and texts[1] == "So far."
    assert {f"seen {number}" for number in {*range(4 + more)} - forgotten} < {*texts}
    assert (len(candidates(first)), len(candidates(second))) == (4, more) and first.group == second.group
    assert adds_up(report)


def test_opencode_begins_anew_where_it_was_compacted() -> None:
    def message(role: str, *parts: dict[str, Any], **info: Any) -> dict[str, Any]:
        return {"info": {"role": role, **info}, "parts": [{"type": "step-start"}, *parts]}

    def said(text: str) -> dict[str, Any]:
        return {"type": "text", "text": text}

    rows = [message("user", said("fix it")), message("assistant", said("Long work.")),
            message("user", {"type": "compaction", "auto": True}), message("assistant", said("SUMMARY"), summary=True),
            message("user", said("go on")), message("assistant", said("Done."))]  # fmt: skip
    traces, report = imported(
        FIXTURES["opencode"], json.dumps({"info": {"id": "s"}, "messages": rows}), candidates="turns"
    )
    assert [[m.content for m in trace.messages] for trace in traces] == [
        ["fix it", "Long work."], ["What did we do so far?", "SUMMARY", "go on", "Done."],
    ]  # fmt: skip
    assert report.dropped_turns == {"a_summary": 1} and {trace.group for trace in traces} == {"s"} and adds_up(report)
