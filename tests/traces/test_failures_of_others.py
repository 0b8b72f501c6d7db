"""What another project marks as failed, cut, undone or not valid is no demonstration, and is worth nothing known."""

from __future__ import annotations

from typing import Any

import pytest

from turntree.traces.formats.responses import read_responses_row
from turntree.traces.formats.row import ChatRow, was_cut
from turntree_interop.agentbench import read_agentbench
from turntree_interop.codex import read_codex
from turntree_interop.inspect import read_inspect
from turntree_interop.nemo_gym import _nemo_row
from turntree_interop.observed import Observed
from turntree_interop.opencode import read_opencode
from turntree_interop.tau2 import read_tau_row
from turntree_interop.verifiers import read_record

USER = {"role": "user", "content": "cancel my order"}


def taught(chat: ChatRow) -> list[str]:
    """The texts of the turns that are demonstrations."""
    said = [one for one in chat.messages if one["role"] == "assistant" and one.get("weight", 1)]
    return [one["content"] for one in said]


def tau2(reason: str, **last: Any) -> ChatRow:
    said = [{"role": "assistant", "content": "Which?"}, USER, {"role": "assistant", "content": "W42 can be", **last}]
    return read_tau_row(
        {"id": "s", "messages": [USER, *said], "reward_info": {"reward": 0.0}, "termination_reason": reason}
    )


@pytest.mark.parametrize("reason", ["infrastructure_error", "user_error", "unexpected_error"])
def test_a_simulation_that_failed_has_no_turns_and_no_reward(reason: str) -> None:
    chat = tau2(reason)
    assert (taught(chat), chat.success, chat.meta.get("reward")) == ([], None, None)
    assert chat.left_out["rollout_failed"] == 2
    assert (tau2("max_steps").success, tau2("max_steps").meta["reward"]) == (False, 0.0)


def test_a_turn_of_a_simulation_that_the_token_limit_ended_is_not_taught() -> None:
    assert taught(tau2("agent_stop", raw_data={"finish_reason": "length"})) == ["Which?"]
    assert taught(tau2("agent_stop", raw_data={"finish_reason": "stop"})) == ["Which?", "W42 can be"]


def nemo(response: dict[str, Any], **more: Any) -> dict[str, Any]:
    said = {"type": "message", "role": "assistant", "content": "It is abou"}
    return {
        "responses_create_params": {"input": [USER]},
        "response": {"output": [said], **response},
        "reward": 1.0,
        "_ng_task_index": 0,
        **more,
    }


FAILED = [nemo({}, mask_sample=True), nemo({}, _ng_failure_class="timeout"), nemo({"status": "failed"})]
CUT = nemo({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}})


@pytest.mark.parametrize("row", FAILED)
def test_a_masked_or_failed_rollout_of_nemo_gym_teaches_nothing_and_is_censored(row: dict[str, Any]) -> None:
    chat = read_responses_row(row)
    assert (taught(chat), chat.success, chat.meta.get("reward"), chat.ignored) == ([], None, None, {})
    assert _nemo_row(row, rewards=("reward",), iteration=0).rollout.reward is None


def test_a_response_of_nemo_gym_that_the_token_limit_ended_is_not_taught() -> None:
    assert taught(read_responses_row(CUT)) == [] and taught(read_responses_row(nemo({}))) == ["It is abou"]
    logged = _nemo_row(CUT, rewards=("reward",), iteration=0).rollout
    assert (logged.completed, logged.reward) == (False, 1.0)


@pytest.mark.parametrize(
    "told",
    [
        {"finish_reason": "length"},
        {"stop_reason": "MAX_TOKENS"},
        {"stop_reason": "model_context_window_exceeded"},
        {"stopReason": "max_tokens"},
        {"done_reason": "length"},
        {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}},
    ],
)
def test_every_providers_word_for_its_token_limit_is_known(told: dict[str, Any]) -> None:
    assert (
        was_cut(told) and not was_cut({"finish_reason": "stop", "incomplete_details": None}) and not was_cut("length")
    )
    observed = Observed()
    observed.add(None, "t", [USER], {"role": "assistant", "content": "It is", "response_metadata": told}, [], 0)
    assert [taught(chat) for chat in observed.rows()] == [[]]


@pytest.mark.parametrize(
    "more",
    [
        {"invalid_tool_calls": [{"name": "find", "args": '{"q": "x', "id": "c", "type": "invalid_tool_call"}]},
        {"additional_kwargs": {"tool_calls": [{"id": "c", "function": {"name": "find", "arguments": "{}"}}]}},
    ],
)
def test_a_call_that_langchain_keeps_elsewhere_is_a_call(more: dict[str, Any]) -> None:
    observed = Observed()
    observed.add(None, "t", [USER], {"type": "ai", "content": "Let me look.", "tool_calls": [], **more}, [], 0)
    (chat,) = observed.rows()
    assert [call["function"]["name"] for call in chat.messages[-1]["tool_calls"]] == ["find"]


@pytest.mark.parametrize(
    "output",
    [
        "exec command rejected by user",
        "aborted",
        "Wall time: 5.0 seconds\naborted by user",
        "apply_patch verification failed: no such lines",
        "failed to parse function arguments: missing field `command`",
        "unsupported call: foo",
        "exec_command failed for `ls`: No such file",
        "write_stdin failed: Unknown process id 3",
    ],
)
def test_a_call_that_codex_did_not_make_failed(output: str) -> None:
    call = {"type": "function_call", "name": "shell", "arguments": "{}", "call_id": "c"}

    def failed(text: str) -> Any:
        items = [call, {"type": "function_call_output", "call_id": "c", "output": text}]
        (chat,) = read_codex({"events": [{"type": "response_item", "payload": item} for item in items]})
        return chat.messages[-1].get("_failed")

    assert failed(output) is True and failed(f"said: {output}") is None


@pytest.mark.parametrize("told", [{"status": "unknown"}, {"status": "task error"}, {"error": "TASK_ERROR"}])
def test_a_container_that_failed_is_no_failure_of_the_policy(told: dict[str, Any]) -> None:
    history = [{"role": "user", "content": "do it"}, {"role": "agent", "content": "Act: bash"}]
    output = {"history": history, "result": {"result": False}, "status": told.get("status", "completed")}
    chat = read_agentbench({"index": 1, "output": output, "error": told.get("error")})
    assert (taught(chat), chat.success) == ([], None)


@pytest.mark.parametrize(("trajectory", "kept"), [([True, False], ["second"]), ([False, True], ["first"]), (None, [])])
def test_the_turn_that_a_limit_ended_is_the_one_that_the_steps_name(trajectory: Any, kept: list[str]) -> None:
    said = [{"role": "assistant", "content": text} for text in ("first", "second")]
    row = {"prompt": [USER], "completion": [said[0], USER, said[1], USER], "reward": 1.0, "is_truncated": True}
    steps = {} if trajectory is None else {"trajectory": [{"is_truncated": each} for each in trajectory]}
    assert taught(read_record({**row, **steps})) == kept


def test_what_was_undone_aborted_or_hidden_in_opencode_is_not_taught() -> None:
    def message(number: int, role: str, text: str, **info: Any) -> dict[str, Any]:
        return {"info": {"id": f"m{number}", "role": role, **info}, "parts": [{"type": "text", "text": text}]}

    rows = [message(0, "user", "do"), message(1, "assistant", "half", error={"name": "MessageOutputLengthError"})]
    rows += [message(2, "user", "again"), message(3, "assistant", "done"), message(4, "assistant", "undone")]
    rows[2]["parts"].append({"type": "text", "text": "a note", "ignored": True})
    (chat,) = read_opencode({"info": {"id": "s", "revert": {"messageID": "m4"}}, "messages": rows})
    assert taught(chat) == ["done"] and chat.left_out["abandoned_branch"] == 1
    assert [one["content"] for one in chat.messages if one["role"] == "user"] == ["do", "again"]


def test_a_sample_that_a_person_declared_invalid_is_no_demonstration() -> None:
    messages = [USER, {"role": "assistant", "content": "done"}]
    row = {"id": 1, "epoch": 1, "input": "x", "target": "", "messages": messages, "scores": {"m": {"value": "C"}}}
    chat = read_inspect({**row, "invalidation": {"reason": "leaked"}})
    assert (taught(chat), chat.success) == ([], None) and read_inspect(row).success is True
