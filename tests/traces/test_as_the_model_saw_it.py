"""A history is what the model was shown, or the turn behind it is not taught."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from test_importers import imported
from trace_fixtures import FIXTURES, INSPECT, SDK, SMOLAGENTS, adds_up, line, lines, text_item

from turntree.core.errors import InputError
from turntree.traces.chat import ImportReport
from turntree.traces.schema import Trace

AT = {"exit_code": 1, "working_dir": "/w", "py_interpreter_path": "/py", "prefix": "[Below.]\n", "suffix": "\n[Ended.]"}
ERROR = "[An error occurred during execution.]\n"


@pytest.mark.parametrize(
    ("seen", "shown"),
    [
        ({"metadata": AT}, "[Below.]\na\n[Ended.]\n[Current working directory: /w]\n[Python interpreter: /py]\n"
                           "[Command finished with exit code 1]"),
        ({"metadata": {"exit_code": -1, "suffix": "\n[Still runs.]"}}, "a\n[Still runs.]"),
        ({"kind": "FileEditorObservation", "is_error": True}, f"{ERROR}a"),
    ],
)  # fmt: skip
def test_what_openhands_writes_around_a_result_is_in_the_history(seen: dict[str, Any], shown: str) -> None:
    history = copy.deepcopy(SDK["history"])
    history[3]["observation"] |= seen
    [trace], _ = imported(FIXTURES["openhands_events sdk"], json.dumps(SDK | {"history": history}), candidates="turns")
    assert trace.messages[3].content == shown


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        ({"content": [{"type": "text", "text": "a" * 29_990}], "metadata": AT}, "another_prompt"),
        ({"kind": "GrepObservation", "content": [{"type": "text", "text": "a" * 50_001}]}, "another_prompt"),
        ({"kind": "TaskObservation", "task_id": "1", "subagent": "s", "status": "done"}, "another_prompt"),
        ({"kind": "BrowserObservation", "screenshot_data": "AAAA"}, "after_an_image"),
    ],
)
def test_what_openhands_clipped_or_showed_as_an_image_is_not_taught_behind(seen: dict[str, Any], reason: str) -> None:
    history = copy.deepcopy(SDK["history"])
    history[3]["observation"] |= seen
    text = json.dumps(SDK | {"history": history})
    [trace], report = imported(FIXTURES["openhands_events sdk"], text, candidates="turns")
    assert (trace.meta["skip_turns"], report.turns_kept) == ({"1": reason}, 1) and adds_up(report)


def opencode(*messages: tuple[str, list[dict[str, Any]], dict[str, Any]]) -> tuple[list[Trace], ImportReport]:
    rows = [{"info": {"role": role, **info}, "parts": [{"type": "step-start"}, *told]} for role, told, info in messages]
    text = json.dumps({"info": {"id": "s"}, "messages": rows})
    traces, report = imported(FIXTURES["opencode"], text, candidates="turns")
    assert adds_up(report)
    return traces, report


def saying(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}]


def using(**state: Any) -> list[dict[str, Any]]:
    return [{"type": "tool", "tool": "bash", "callID": "c", "state": {"input": {"command": "ls"}, **state}}]


def contents(trace: Trace) -> list[str]:
    return [message.content for message in trace.messages]


ABORTED = {"status": "error", "error": "Tool execution aborted"}


@pytest.mark.parametrize(
    ("state", "shown", "kept"),
    [
        ({"status": "running"}, "[Tool execution was interrupted]", 2),
        ({"status": "pending", "raw": '{"comm'}, "[Tool execution was interrupted]", 1),
        (ABORTED, "Tool execution aborted", 2),
        (ABORTED | {"metadata": {"interrupted": True, "output": "half"}}, "half", 2),
    ],
)
def test_a_call_of_opencode_that_did_not_end_is_answered_as_it_was_to_the_model(
    state: dict[str, Any], shown: str, kept: int
) -> None:
    go, on = ("user", saying("go"), {}), ("user", saying("go on"), {})
    [trace], report = opencode(go, ("assistant", using(**state), {}), on, ("assistant", saying("ok"), {}))
    assert contents(trace) == ["go", "", shown, "go on", "ok"] and report.turns_kept == kept


def test_an_answer_of_opencode_that_failed_is_not_in_the_history_and_one_that_was_stopped_is() -> None:
    def after(error: str) -> list[str]:
        half = ("assistant", saying("half"), {"error": {"name": error}})
        [trace], _ = opencode(
            ("user", saying("go"), {}), half, ("user", saying("?"), {}), ("assistant", saying("ok"), {})
        )
        return contents(trace)

    assert after("APIError") == ["go", "?", "ok"] and after("MessageAbortedError") == ["go", "half", "?", "ok"]


def test_turns_of_opencode_that_were_said_after_a_result_was_cleared_are_not_taught() -> None:
    done = using(status="completed", output="long", time={"start": 1, "end": 2, "compacted": 5})
    rows = [("assistant", done, {"time": {"created": 1}}), ("assistant", saying("ok"), {"time": {"created": 4}})]
    late = [("user", saying("?"), {"time": {"created": 6}}), ("assistant", saying("yes"), {"time": {"created": 7}})]
    [trace], report = opencode(("user", saying("go"), {}), *rows, *late)
    assert trace.meta["skip_turns"] == {"2": "another_prompt"} and report.turns_kept == 2


def test_what_opencode_keeps_behind_a_summary_is_behind_it() -> None:
    before = [("user", saying("go"), {"id": "a"}), ("assistant", saying("one"), {"id": "b"})]
    kept = [("user", saying("on"), {"id": "c"}), ("assistant", saying("two"), {"id": "d"})]
    told = ("assistant", saying("SUMMARY"), {"id": "f", "summary": True, "finish": "stop"})
    last = [("user", saying("go on"), {"id": "g"}), ("assistant", saying("three"), {"id": "h"})]

    def asked(first: str) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
        return "user", [{"type": "compaction", "auto": True, "tail_start_id": first}], {"id": "e"}

    [first, second], report = opencode(*before, *kept, asked("c"), told, *last)
    assert contents(first) == ["go", "one", "on", "two"]
    assert contents(second) == ["What did we do so far?", "SUMMARY", "on", "two", "go on", "three"]
    assert report.dropped_turns == {"a_summary": 1, "said_in_another_conversation": 1}
    _, report = opencode(*before, *kept, asked("unknown"), told, *last)
    assert report.dropped_turns["another_prompt"] == 2 and report.turns_kept == 2
    failed = ("assistant", saying("SUM"), {"summary": True, "error": {"name": "APIError"}})
    [whole], report = opencode(*before, *kept, asked("c"), failed, *last)
    assert contents(whole) == [*contents(first), "What did we do so far?", "go on", "three"]
    assert report.dropped_turns == {"failed_call": 1} and report.turns_kept == 3


def test_a_prompt_of_smolagents_is_the_recorded_one_as_the_library_sends_it() -> None:
    first, last = imported(FIXTURES["smolagents"], candidates="tool_calls")[0]
    call = "Calling tools:\n[{'id': 'cweather', 'type': 'function', 'function': {'name': 'weather', 'arguments': "
    before = [
        ("system", "Solve the task with calls."),
        ("user", "New task:\nHow is the weather in Paris?"),
        ("assistant", f"I look.\n{call}{{'city': 'Nowhere'}}}}}}]"),
    ]
    assert [(message.role, message.content) for message in first.messages[:3]] == before
    assert first.messages[3].content.startswith("Call id: cweather\nError:\nError executing tool 'weather'")
    assert [message.content for message in last.messages[5:7]] == ["Observation:\nsunny in Paris", "I look."]
    assert first.group == last.group and first.id != last.id


def test_a_step_of_smolagents_without_its_prompt_is_not_taught() -> None:
    run = copy.deepcopy(SMOLAGENTS)
    run["steps"][2]["model_input_messages"] = None  # of an answer that the limit of steps forced
    _, report = imported(FIXTURES["smolagents"], json.dumps(run))
    assert report.dropped_turns["no_prompt"] == 1 and report.turns_kept == 1 and adds_up(report)


def traj(*steps: tuple[list[dict[str, Any]], str]) -> tuple[list[Trace], ImportReport]:
    text = json.dumps({"history": HISTORY, "trajectory": [{"query": query, "response": text} for query, text in steps]})
    found = imported(FIXTURES["sweagent"], text, candidates="turns")
    assert adds_up(found[1])
    return found


def wrote(role: str, content: Any, kind: str = "observation") -> dict[str, Any]:
    return {"role": role, "content": content, "agent": "main", "message_type": kind}


HISTORY = [wrote("system", "S", "system_prompt"), wrote("user", "the issue")]
HISTORY += [wrote("assistant", "one", "action"), wrote("user", "a.py"), wrote("assistant", "two", "action")]


def test_a_turn_of_swe_agent_whose_query_differs_from_the_history_is_not_taught() -> None:
    cached = [{"type": "text", "text": "a.py", "cache_control": {"type": "ephemeral"}}]
    first, same = (HISTORY[:2], "one"), ([*HISTORY[:3], wrote("user", cached)], "two")
    assert traj(first, same)[1].turns_kept == 2
    elided = [*HISTORY[:3], wrote("user", "Old environment output: (1 lines omitted)")]
    again = [*HISTORY[:4], wrote("assistant", "tow", "assistant"), wrote("user", "write a command", "user")]
    for steps in ([first, (elided, "two")], [first, (HISTORY[:4], "tow"), (again, "two")], [first, ([{}], "two")]):
        [trace], report = traj(*steps)
        assert trace.meta["skip_turns"] == {"1": "another_prompt"} and report.turns_kept == 1


def test_what_swe_agent_writes_before_a_result_stays_and_hides_no_error() -> None:
    call = {"type": "function", "id": "c", "function": {"name": "bash", "arguments": "{}"}}
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    for said, kept in (("OBSERVATION:\na.py", 1), ("OBSERVATION:\nTraceback (most recent call last):\n", 0)):
        row = {
            "instance_id": "i",
            "patch": "",
            "messages": [*messages, {"role": "tool", "content": said, "tool_call_id": "c"}],
        }
        traces, report = imported(FIXTURES["swe_gym"], json.dumps(row))
        assert report.turns_kept == kept and [trace.messages[2].content for trace in traces] == [said] * kept


def codex(*rows: dict[str, Any], **options: Any) -> tuple[list[Trace], ImportReport]:
    meta = line("session_meta", id="s", base_instructions={"text": "You are Codex."})
    return imported(FIXTURES["codex"], lines(meta, text_item("user", "fix it"), *rows), **options)


DONE = text_item("assistant", "Done.")
HIDDEN = {"type": "compaction", "encrypted_content": "AAAA"}


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"message": "Summary."}, "another_prompt"),  # which messages of the user are sent again is not told
        ({"message": "", "replacement_history": [text_item("user", "fix it")["payload"], HIDDEN]}, "after_an_image"),
        ({"message": "", "replacement_history": [text_item("user", "Summary.")["payload"]]}, None),
    ],
)
def test_behind_a_compaction_of_codex_only_turns_whose_prompt_is_told_are_taught(
    told: dict[str, Any], reason: str | None
) -> None:
    _, report = codex(DONE, line("compacted", **told), text_item("user", "go on"), DONE, candidates="turns")
    assert report.dropped_turns == ({reason: 1} if reason else {}) and adds_up(report)
    assert report.turns_kept == (1 if reason else 2)


def test_a_search_on_the_server_of_codex_ends_what_can_be_taught_and_stops_no_import() -> None:
    search = line("response_item", type="web_search_call", status="completed", action={"type": "search", "query": "x"})
    _, report = codex(
        DONE, text_item("user", "more"), text_item("assistant", "I search."), search, DONE, candidates="turns"
    )
    assert (report.turns_kept, report.dropped_turns) == (1, {"after_an_image": 1}) and adds_up(report)
    assert report.ignored["web_search_call items"] == 1


CUT = {"type": "function_call", "name": "exec_command", "arguments": '{"cmd": ', "call_id": "c"}


@pytest.mark.parametrize(
    ("row", "field"),
    [
        (line("response_item", **CUT), "tool_calls.arguments"),
        (line("response_item", type="image_call"), "messages[3]"),
        ({"type": "response_item"}, "payload"),
        (line("session_meta", id={}), "id"),
        (line("event_msg", type="thread_rolled_back", num_turns="x"), "num_turns"),
        (line("compacted", message="", replacement_history={"a": 1}), "messages[1]"),
    ],
)
def test_an_error_in_a_session_names_its_line(row: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=r"rollout-1\.jsonl:4: ") as raised:
        codex(DONE, row, DONE, candidates="turns")
    assert field in str(raised.value)


def test_a_call_that_inspect_could_not_read_is_no_demonstration() -> None:
    sample = copy.deepcopy(INSPECT)
    sample["messages"][1]["tool_calls"][0] |= {"arguments": {}, "parse_error": "Error parsing: {"}
    _, report = imported(FIXTURES["inspect"], json.dumps(sample))
    assert report.dropped_turns["marked_not_trained"] == 1 and adds_up(report)
