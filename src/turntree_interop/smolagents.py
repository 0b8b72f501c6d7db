"""smolagents: the result of a run (`agent.run(..., return_full_result=True).dict()`), whose `steps` are those of the
agent's memory: the task, plans, and actions with what the model was asked and said, its calls and what came back.

An agent of code writes its action into its text (`code_action`).
"""

from __future__ import annotations

from typing import Any, cast

from turntree.traces.formats.row import (
    ACT,
    FAILED,
    UNSEEN,
    ChatRow,
    answers,
    call_of,
    count_unknown,
    each_object,
    first_object,
    list_of,
    object_of,
    part_of,
    told_by,
    words,
)

_KEYS = words("output state steps token_usage timing")
_STEP_KEYS = words(
    "task task_images step_number timing model_input_messages tool_calls error model_output_message model_output "
    "code_action observations observations_images action_output token_usage is_final_answer plan system_prompt"
)
_SAID_KEYS = words("role content tool_calls raw token_usage")
_PROCEED = "Now proceed and carry out this plan."  # what the library says after a plan


def _is_run(row: dict[str, Any]) -> str:
    steps: Any = row.get("steps")
    known = isinstance(steps, list) and any(
        "step_number" in one for one in cast("list[Any]", steps) if isinstance(one, dict)
    )
    return "" if known and "task" in first_object(steps) else "no 'steps' that begin with a 'task'"


@told_by(_is_run)
def read_smolagents(row: dict[str, Any]) -> ChatRow:
    """A run. That it came to an answer (`state`) does not say that the answer is right."""
    chat = ChatRow.of(row, _KEYS, meta="output state")
    chat.rule = "tool_calls"
    steps = list_of(row, "steps", "a list of steps")
    first = next((one for one in steps if isinstance(one, dict) and one.get("model_input_messages")), {})
    asked = first_object(first.get("model_input_messages"))
    if asked.get("role") == "system":
        chat.messages.append({"role": "system", "content": asked.get("content")})
    chat.messages += each_object(steps, lambda step: _messages(step, chat))
    return chat


def _messages(step: dict[str, Any], chat: ChatRow) -> list[Any]:
    count_unknown(step, _STEP_KEYS, "steps[].", chat.ignored)
    if step.get("task") is not None:
        return [{"role": "user", "content": step["task"], UNSEEN: bool(step.get("task_images"))}]
    said, error = object_of(step, "model_output_message"), part_of(step, "error")
    count_unknown(said, _SAID_KEYS, "steps[].model_output_message.", chat.ignored)
    turn: dict[str, Any] = {"role": "assistant", "content": said.get("content")}
    if step.get("plan") is not None:
        return [turn, {"role": "user", "content": _PROCEED}]
    if not said and not step.get("tool_calls"):
        return []  # the model gave no answer
    code = step.get("code_action")
    turn |= {ACT: "tool"} if code else {}
    calls = [] if code else list_of(said if said.get("tool_calls") else step, "tool_calls", "a list of calls")
    if calls:
        turn["tool_calls"] = each_object(calls, lambda one: [_call(one, chat)])
    seen = [step.get("observations"), error.get("message")]
    told = "\n".join(str(one) for one in seen if one is not None)
    if step.get("is_final_answer") and not calls:
        return [turn]
    ids = [one.get("id") for one in turn.get("tool_calls", ()) if isinstance(one, dict)]
    failed = {FAILED: bool(error), UNSEEN: bool(step.get("observations_images"))}
    return [turn, *(answers(ids, told, **failed) if ids else [{"role": "user", "content": told, **failed}])]


def _call(call: dict[str, Any], chat: ChatRow) -> dict[str, Any]:
    function = part_of(call, "function")
    unread = count_unknown(call, ("id", "type", "function"), "steps[].tool_calls[].", chat.ignored)
    unread |= count_unknown(function, ("name", "arguments", "description"), "steps[].tool_calls[].", chat.ignored)
    return call_of(function.get("name"), function.get("arguments"), call.get("id"), unread)
