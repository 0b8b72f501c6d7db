"""Rows of OpenAI Responses items, as NeMo Gym writes its rollouts and its pivot data sets.

A rollout row holds `responses_create_params.input` and `response.output`; together they are the episode. A pivot row
holds `expected_action` (or, for a Terminus harness, the text `expected_answer`): then that is the demonstration, its
last turn and its only one, whatever a policy sampled into `response`, and `reward` (which judged that sample) says
nothing about it.
"""

from __future__ import annotations

from typing import Any, cast

from turntree.traces.formats.row import ChatRow, RowRefused, chat_tools, list_of, outcome, text_of

_META_KEYS = ("_ng_task_index", "_ng_rollout_index", "instance_id", "category", "pass_rate", "pass_rate_total")


def read_responses_row(row: dict[str, Any]) -> ChatRow:
    """Raises `RowRefused` naming the field for items that are no messages, calls, outputs or reasoning."""
    request = _object(row, "responses_create_params")
    action = _expected_action(row)
    pivot = action is not None
    if action is not None:
        items = _expected_items(action)
    else:
        items = list_of(_object(row, "response"), "output", "a list of Responses items")
    meta = {key: row[key] for key in _META_KEYS if row.get(key) is not None}
    success = None if pivot else outcome(row, meta)
    chat = ChatRow(
        messages=[],
        id=text_of(row, ("uuid",)),
        group=text_of(row, ("trajectory_id", "instance_id", "_ng_task_index")),
        domain=text_of(row, ("domain", "environment_name")) or "",
        success=success,
        meta=meta,
        only_last_turn=pivot,
    )
    chat.tools = chat_tools(list_of(request, "tools", "a list of tool declarations"), chat.ignored)
    chat.messages = [
        message for item in [*_input_items(request), *items] if (message := _message(item, chat)) is not None
    ]
    return chat


def _input_items(request: dict[str, Any]) -> list[Any]:
    """The request's items; `instructions` speak first, and a plain text input is what the user said."""
    instructions = request.get("instructions")
    first = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(request.get("input"), str):
        return [*first, {"role": "user", "content": request["input"]}]
    return [*first, *list_of(request, "input", "text or a list of Responses items")]


def _expected_action(row: dict[str, Any]) -> dict[str, Any] | None:
    if row.get("expected_action") is not None:
        return _object(row, "expected_action")
    if row.get("expected_answer") is not None and "harness" in _object(row, "metadata"):
        return {"type": "message", "content": row["expected_answer"]}
    return None


def _expected_items(action: dict[str, Any]) -> list[Any]:
    if action.get("type") == "function_call_batch":
        return list_of(action, "calls", "a list of function calls")
    if action.get("type") == "message":
        return [{"role": "assistant", "content": action.get("content")}]
    return [action]


def _message(item: Any, chat: ChatRow) -> dict[str, Any] | None:
    """One item as a chat message; consecutive assistant items become one turn later, in the importer."""
    row = cast("dict[str, Any]", item) if isinstance(item, dict) else {}
    kind = row.get("type") or ("message" if "role" in row else None)
    if kind == "message":
        return {"role": row.get("role"), "content": row.get("content")}
    if kind == "function_call":
        call = {"id": row.get("call_id"), "function": {k: row[k] for k in ("name", "arguments") if k in row}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        return {"role": "tool", "content": row.get("output"), "tool_call_id": row.get("call_id")}
    if kind == "reasoning":
        chat.ignored["reasoning items"] += 1
        return None
    what = f"of type {kind!r}" if kind is not None else "without type and role" if row else f"that is {item!r}"
    raise RowRefused(
        "malformed_field",
        f"holds an item {what}",
        field="responses_create_params.input, response.output",
        hint="message, function_call, function_call_output and reasoning are read",
    )


def _object(row: dict[str, Any], key: str) -> dict[str, Any]:
    value = row.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RowRefused("malformed_field", f"is {type(value).__name__}, not an object", field=key)
    return cast("dict[str, Any]", value)
