"""AutoGen: the result of a run of an agent or a team (`TaskResult.model_dump_json()` of autogen-agentchat 0.7): its
`messages`, each with a `source` (who spoke) and a `type`. System prompts and declared tools are not recorded."""

from __future__ import annotations

from typing import Any, cast

from turntree.traces.formats.row import (
    FAILED,
    SKIP,
    BrokenMessage,
    ChatRow,
    call_of,
    count_unknown,
    each_object,
    first_object,
    list_of,
    told_by,
    words,
)

_KEYS = words("messages stop_reason")
_MESSAGE_KEYS = words(
    "id source models_usage metadata created_at content type target context results tool_calls format_string"
)
_CALL_KEYS, _RESULT_KEYS = words("id name arguments"), words("content name call_id is_error")
_SAID = words("TextMessage StopMessage HandoffMessage ToolCallSummaryMessage MultiModalMessage StructuredMessage")


def _is_run(row: dict[str, Any]) -> str:
    known = {"source", "type", "content"} <= first_object(row.get("messages")).keys()
    return "" if known else "no 'source' and 'type' in 'messages'"


@told_by(_is_run)
def read_autogen(row: dict[str, Any]) -> ChatRow:
    """A run. What no model said (a summary of tools, a handoff: it used no tokens) is no candidate."""
    meta = {"stop_reason": row["stop_reason"]} if row.get("stop_reason") else {}
    chat = ChatRow(messages=[], rule="turns", meta=meta)
    count_unknown(row, _KEYS, "", chat.ignored)
    thought: dict[str, str] = {}
    for raw in list_of(row, "messages", "a list of messages"):
        if not isinstance(raw, dict):
            chat.messages.append(BrokenMessage("is not an object"))
            continue
        message = cast("dict[str, Any]", raw)
        count_unknown(message, _MESSAGE_KEYS, "messages[].", chat.ignored)
        if message.get("type") == "ThoughtEvent":  # comes before the calls it led to
            thought = {"reasoning_content": str(message.get("content") or "")}
            continue
        said = _messages(message, chat)
        if thought and said and isinstance(said[0], dict) and said[0].get("role") == "assistant":
            said[0], thought = said[0] | thought, {}
        chat.messages += said
    return chat


def _messages(raw: dict[str, Any], chat: ChatRow) -> list[Any]:
    kind, content = str(raw.get("type")), raw.get("content")
    if kind == "ToolCallRequestEvent":
        calls = each_object(list_of(raw, "content", "a list of calls"), lambda one: [_call(one, chat)])
        return [{"role": "assistant", "content": "", "name": raw.get("source"), "tool_calls": calls}]
    if kind == "ToolCallExecutionEvent":
        return each_object(list_of(raw, "content", "a list of results"), lambda one: [_result(one, chat)])
    if kind not in _SAID:
        chat.ignored[f"messages[] of type {kind}"] += 1
        return []
    if raw.get("source") == "user":
        return [{"role": "user", "content": content}]
    by_model = {} if raw.get("models_usage") is not None else {SKIP: "no_model_call"}
    return [{"role": "assistant", "content": content, "name": raw.get("source"), **by_model}]


def _call(call: dict[str, Any], chat: ChatRow) -> dict[str, Any]:
    unread = count_unknown(call, _CALL_KEYS, "messages[].content[].", chat.ignored)
    return call_of(call.get("name"), call.get("arguments"), call.get("id"), unread)


def _result(result: dict[str, Any], chat: ChatRow) -> dict[str, Any]:
    count_unknown(result, _RESULT_KEYS, "messages[].content[].", chat.ignored)
    told = {"role": "tool", "content": result.get("content"), "tool_call_id": result.get("call_id")}
    return told | {FAILED: bool(result.get("is_error"))}
