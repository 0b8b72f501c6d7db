"""smolagents: the result of a run (`agent.run(..., return_full_result=True).dict()`), whose `steps` are those of the
agent's memory: the task, plans, and actions with what the model was asked and said, its calls and what came back. An
agent of code writes its action into its text (`code_action`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from turntree.core.messages import as_object
from turntree.run.identity import fingerprint
from turntree.traces.formats.row import (
    ACT,
    FAILED,
    UNSEEN,
    ChatRow,
    answers,
    count_unknown,
    each_object,
    first_object,
    list_of,
    misfit,
    object_of,
    part_of,
    role_of,
    said_before,
    told_by,
    words,
)
from turntree_interop.observed import calls_in, texts_of

_KEYS = words("output state steps token_usage timing")
_STEP_KEYS = words(
    "task task_images step_number timing model_input_messages tool_calls error model_output_message model_output "
    "code_action observations observations_images action_output token_usage is_final_answer plan system_prompt"
)
_SAID_KEYS = words("role content tool_calls raw token_usage")
_CALL_KEYS = words("id type function name arguments description")
_ROLES = {"tool-call": "assistant", "tool-response": "user"}  # as what the library sends its own


@told_by(lambda row: misfit(row, steps=("task",)))
def read_smolagents(row: dict[str, Any]) -> Iterator[ChatRow]:
    """A run, one trace for each call of the model: its prompt tells the calls before, and their results, as texts. That
    it came to an answer (`state`) does not say that the answer is right."""
    chat = ChatRow.of(row, _KEYS, meta="output state")
    steps = list_of(row, "steps", "a list of steps")
    chat.rule, chat.group = "tool_calls", fingerprint(first_object(steps).get("task"))
    calls = each_object(steps, lambda step: _called(step, chat))
    for messages in calls or [[]]:
        chat.messages = messages if isinstance(messages, list) else [messages]
        yield chat
        chat = chat.compacted()


def _called(step: dict[str, Any], chat: ChatRow) -> list[list[Any]]:
    """The call of a step as one conversation; none of a task, and where the model gave no answer."""
    count_unknown(step, _STEP_KEYS, "steps[].", chat.ignored)
    said, error = object_of(step, "model_output_message"), part_of(step, "error")
    count_unknown(said, _SAID_KEYS, "steps[].model_output_message.", chat.ignored)
    if not said and not step.get("tool_calls"):
        return []
    text, code = step.get("model_output"), step.get("code_action")
    turn: dict[str, Any] = {"role": "assistant", "content": text if isinstance(text, str) else said.get("content")}
    calls = [] if code else list_of(said if said.get("tool_calls") else step, "tool_calls", "a list of calls")
    calls = calls_in(calls, _CALL_KEYS, "steps[].tool_calls[].", chat.ignored)
    turn |= {ACT: "tool"} if code else {"tool_calls": calls} if calls else {}
    told = "\n".join(str(one) for one in (step.get("observations"), error.get("message")) if one is not None)
    ids = [one.get("id") for one in calls if isinstance(one, dict)]
    result = answers(ids, told) if ids else [{"role": "user", "content": told}] if told else []
    asked = list_of(step, "model_input_messages", "a list of messages")
    alike = groupby(asked, lambda one: _ROLES.get(str(role_of(one)), role_of(one)))
    prompt = [_asked(role, [as_object(one) for one in messages], chat) for role, messages in alike]
    return [[*map(said_before, prompt), turn, *(one | {FAILED: bool(error)} for one in result)]]


def _asked(role: Any, messages: list[dict[str, Any]], chat: ChatRow) -> dict[str, Any]:
    """Messages of one role, which the library sends as one, without their images."""
    parts, unseen = list[Any](), False
    for one in messages:
        count_unknown(one, _SAID_KEYS, "steps[].model_input_messages[].", chat.ignored)
        texts, more = texts_of(one.get("content"), chat.ignored)
        parts += [{"type": "text", "text": "\n"}] if parts else []
        parts += texts if isinstance(texts, list) else [{"type": "text", "text": texts}]
        unseen = unseen or more
    return {"role": role, "content": parts, UNSEEN: unseen}
