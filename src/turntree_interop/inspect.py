"""Inspect (UK AISI): a sample of an evaluation log, as the members `samples/*.json` of an `.eval` archive hold it.

The archive is read as such (`traces.sources`). Newer versions compress it with Zstandard, which `inspect log convert
--to json` undoes; of its JSON, the list `samples` holds the same rows.
"""

from __future__ import annotations

from typing import Any, cast

from turntree.core.messages import as_object
from turntree.traces.formats.row import (
    FAILED,
    UNSEEN,
    ChatRow,
    count_unknown,
    each_object,
    list_of,
    misfit,
    object_of,
    told_by,
    was_cut,
    words,
)
from turntree_interop.observed import calls_in

_SAMPLE_KEYS = words(
    "id epoch input choices target description sandbox files setup messages output scores metadata store events "
    "timelines model_usage role_usage model_fallbacks started_at completed_at total_time working_time uuid "
    "invalidation error error_retries attachments events_data limit"
)
_MESSAGE_KEYS = words("id content source metadata role tool_calls model tool_call_id function error internal")
_PART_KEYS = words("type text reasoning summary signature redacted refusal internal citations")
_CALL_KEYS = words("id function arguments type parse_error view internal")


@told_by(lambda row: misfit(row, epoch=object, target=object, scores=object, messages=object, input=object))
def read_inspect(row: dict[str, Any]) -> ChatRow:
    """A sample. One that ended with an error is no demonstration. It holds no declared tools."""
    chat = ChatRow.of(row, _SAMPLE_KEYS, id="uuid", group="id")
    chat.rule = "tool_calls"
    scores = object_of(row, "scores")
    values = [one.get("value") for one in scores.values() if isinstance(one, dict)]
    if len(values) == 1 and isinstance(values[0], str | int | float):
        chat.success = {"C": True, "I": False, 1: True, 0: False}.get(values[0])
    chat.meta = {name: one.get("value") for name, one in scores.items() if isinstance(one, dict)}
    cut = _cut(row)
    chat.messages = each_object(list_of(row, "messages", "a list of messages"), lambda raw: [_message(raw, chat, cut)])
    if row.get("error") or row.get("invalidation"):
        chat.drop_turns()
    return chat


def _cut(row: dict[str, Any]) -> set[str]:
    """The ids of the answers that a token limit ended: of the last call, and of every call that is among the events."""
    events = [one for one in list_of(row, "events", "a list of events") if isinstance(one, dict)]
    outputs = [object_of(call, "output") for call in (row, *events) if call is row or call.get("event") == "model"]
    answers = [choice for output in outputs for choice in list_of(output, "choices", "a list of choices")]
    return {str(object_of(answer, "message").get("id")) for answer in answers if was_cut(answer)} - {"None"}


def _message(raw: dict[str, Any], chat: ChatRow, cut: set[str]) -> dict[str, Any]:
    count_unknown(raw, _MESSAGE_KEYS, "messages[].", chat.ignored)
    content, reasoning, unseen = _content(raw.get("content"), chat)
    message: dict[str, Any] = {"role": raw.get("role"), "content": content, UNSEEN: unseen}
    if reasoning:
        message["reasoning"] = reasoning
    if raw.get("role") == "assistant" and str(raw.get("id")) in cut:
        message["weight"] = 0  # no demonstration
    if raw.get("role") == "tool":
        error = raw.get("error")
        said = content or (str(error.get("message", "")) if isinstance(error, dict) else error) or ""
        return message | {"content": said, "tool_call_id": raw.get("tool_call_id"), FAILED: bool(error)}
    if calls := raw.get("tool_calls"):
        message["tool_calls"] = calls_in(calls, _CALL_KEYS, "tool_calls[].", chat.ignored, "function id")
    if isinstance(calls, list) and any(as_object(one).get("parse_error") for one in cast("list[Any]", calls)):
        message["weight"] = 0  # the arguments that could not be read are not recorded
    return message


def _content(value: Any, chat: ChatRow) -> tuple[Any, str, bool]:
    """The words and the thoughts of a content, text or parts, and whether there were other parts (images): they are
    counted and left out. What is neither text nor a list stays, and is refused with its place."""
    if not isinstance(value, list):
        return value, "", False
    unseen = False
    said: dict[str, list[str]] = {"text": [], "reasoning": []}
    for part in cast("list[Any]", value):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in said and isinstance(part.get(kind), str):
            count_unknown(part, _PART_KEYS, "content[].", chat.ignored)
            said[kind].append(part[kind])
        else:
            chat.ignored[f"parts of type {kind}"] += 1
            unseen = unseen or kind not in ("text", "reasoning")
    return "\n".join(said["text"]), "\n".join(said["reasoning"]), unseen
