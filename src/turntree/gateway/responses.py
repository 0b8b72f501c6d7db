"""OpenAI's Responses API as values: its items are read as chat messages, answers are written as items and events."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from turntree.core.errors import InputError
from turntree.core.messages import Message
from turntree.gateway import chat
from turntree.gateway.chat import Fields, bounded, chosen, number, only_text, read_message, read_tools, recorded, whole
from turntree.gateway.config import Refused, bad_request
from turntree.gateway.lineage import Kept
from turntree.gateway.sessions import Ask

FIELDS = Fields(
    read=frozenset({"input", "instructions", "tools", "tool_choice", "max_output_tokens", "previous_response_id"}),
    recorded=(chat.FIELDS.recorded - {"seed", "reasoning_effort", "verbosity"}) | {"reasoning", "text"},
    nothing=chat.FIELDS.nothing | {"include", "truncation", "stream", "stream_options"},
    neutral={"top_logprobs": (0,), "background": (False,), "max_tool_calls": (), "prompt": (), "conversation": ()},
)
_CALLED = "instructions"  # of a call's meta: its prompt begins with them, and a later one may have others
_CALL_KEYS = frozenset({"type", "id", "call_id", "status", "name", "arguments"})
_TOOL_KEYS = frozenset({"type", "name", "description", "parameters", "strict"})
# by an item's type; what stands under another key would be read as nothing
_NEEDED = {"message": "content", "function_call": "arguments", "function_call_output": "output"}
Before = Callable[[str], Kept | None]


def read_responses(body: Mapping[str, Any], before: Before) -> Ask:
    """The request of a body; `before` finds the call of an earlier response. Raises `Refused` naming the field."""
    text = body.get("text")
    if not isinstance(text, dict | None):
        raise Refused(400, "is not an object", param="text")
    only_text((text or {}).get("format"), "text.format")
    if "message.output_text.logprobs" in str(body.get("include")):
        raise Refused(400, "log-probabilities are given by chat completions only", param="include")
    FIELDS.check(body)
    instructions = body.get("instructions")
    if not isinstance(instructions, str | None):
        raise Refused(400, "is not text", param="instructions")
    try:
        messages = [*_earlier(body.get("previous_response_id"), before), *_messages(body.get("input"))]
        tools = read_tools(_chat_tools(body.get("tools")))
    except InputError as error:
        raise bad_request(error) from error
    if instructions:
        messages.insert(0, Message("system", instructions))
    return Ask(
        messages=tuple(messages),
        tools=chosen(body.get("tool_choice"), tools),
        max_tokens=whole(body, "max_output_tokens", 1),
        temperature=number(body, "temperature", 0, 2),
        top_p=number(body, "top_p", 1e-9, 1),
        meta={**recorded(body, FIELDS.recorded), **({_CALLED: True} if instructions else {})},
    )


def _earlier(name: Any, before: Before) -> list[Message]:
    """The dialogue of an earlier response, without its instructions, which are not carried over."""
    if name is None:
        return []
    kept = before(name.removeprefix("resp_")) if isinstance(name, str) else None
    if kept is None or kept.answer is None:
        raise InputError("is no answer of this session", field="previous_response_id")
    return [*kept.messages[int(_CALLED in kept.meta) :], kept.answer]


def _messages(given: Any) -> list[Message]:
    """Items as messages; what the assistant says and calls in a row is one turn."""
    if isinstance(given, str):
        return [Message("user", given)]
    if not isinstance(given, list) or not given:
        raise InputError("is neither text nor a list of items", field="input")
    read = (read_message(_as_chat(item, i), f"input[{i}]") for i, item in enumerate(bounded(given, "input")))
    found: list[Message] = []
    for spoken, run in itertools.groupby(read, lambda message: message.role == "assistant"):
        said = list(run)
        found += [_one_turn(said)] if spoken else said
    return found


def _one_turn(said: Sequence[Message]) -> Message:
    return replace(
        said[0],
        content="".join(message.content for message in said),
        reasoning="".join(message.reasoning for message in said),
        tool_calls=tuple(call for message in said for call in message.tool_calls),
    )


def _as_chat(item: Any, index: int) -> dict[str, Any]:
    row = cast("dict[str, Any]", item) if isinstance(item, dict) else {}
    kind = row.get("type") or "message"
    lacking = _NEEDED.get(kind) if isinstance(kind, str) else None
    if lacking and lacking not in row:
        raise InputError("is missing", field=f"input[{index}].{lacking}", hint=_other_keys(row))
    if kind == "message":
        return {"role": row.get("role"), "content": row.get("content")}
    if kind == "function_call":
        unknown = {key: value for key, value in row.items() if key not in _CALL_KEYS}
        function = {"name": row.get("name"), "arguments": row.get("arguments"), **unknown}
        return {"role": "assistant", "tool_calls": [{"id": row.get("call_id"), "function": function}]}
    if kind == "function_call_output":
        return {"role": "tool", "content": row.get("output"), "tool_call_id": row.get("call_id")}
    if kind == "reasoning":
        return {"role": "assistant", "reasoning_content": row.get("content") or row.get("summary") or ""}
    hint = "message, function_call, function_call_output and reasoning are read"
    raise InputError(f"is of type {kind!r}", field=f"input[{index}]", hint=hint)


def _other_keys(row: dict[str, Any]) -> str:
    return f"what stands under {', '.join(sorted(row.keys() - _CALL_KEYS - {'role'})) or 'no key'} is not read as it"


def _chat_tools(given: Any) -> Any:
    """Flat declarations in the form of chat completions."""
    if not isinstance(given, list):
        return given
    for i, tool in enumerate(cast("list[Any]", given)):
        if not isinstance(tool, dict) or cast("dict[str, Any]", tool).get("type") != "function":
            raise InputError("is not a function: the gateway runs no tools itself", field=f"tools[{i}]")
        if "parameters" not in tool and (unknown := sorted(tool.keys() - _TOOL_KEYS)):
            raise InputError("unknown key, and no parameters", field=f"tools[{i}].{unknown[0]}")
    names = ("name", "description", "parameters")
    rows = cast("list[dict[str, Any]]", given)
    return [{"type": "function", "function": {n: row[n] for n in names if row.get(n) is not None}} for row in rows]


# answers


def response_body(kept: Kept, model: str) -> dict[str, Any]:
    assert kept.answer is not None
    use = chat.usage([kept])
    cut = kept.answer.cut
    return {
        **_head(kept, model),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _items(kept),
        "usage": {
            "input_tokens": use["prompt_tokens"],
            "input_tokens_details": use["prompt_tokens_details"],
            "output_tokens": use["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": use["total_tokens"],
        },
    }


def _head(kept: Kept, model: str) -> dict[str, Any]:
    head: dict[str, Any] = {"id": f"resp_{kept.call_id}", "object": "response", "created_at": int(time.time())}
    empty = {"error": None, "incomplete_details": None, "instructions": None, "metadata": {}, "output": []}
    asked = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "temperature": None, "top_p": None}
    return {**head, "model": model, "status": "in_progress", **empty, **asked}


def _items(kept: Kept) -> list[dict[str, Any]]:
    answer, name = kept.answer, kept.call_id
    assert answer is not None
    status = "incomplete" if answer.cut else "completed"
    items: list[dict[str, Any]] = []
    if answer.reasoning:
        thought = [{"type": "reasoning_text", "text": answer.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": thought})
    if answer.content or not answer.tool_calls:
        said = [{"type": "output_text", "text": answer.content, "annotations": [], "logprobs": []}]
        message = {"type": "message", "id": f"msg_{name}", "role": "assistant"}
        items.append({**message, "status": status, "content": said})
    for i, call in enumerate(answer.tool_calls):
        made = {"type": "function_call", "id": f"fc_{name}_{i}", "call_id": call.id, "name": call.name}
        items.append({**made, "arguments": json.dumps(call.arguments), "status": status})
    return items


def events(calls: Sequence[Kept], model: str) -> Iterator[dict[str, Any]]:
    """The answer as the events of a stream, each item whole."""
    whole_body = response_body(calls[0], model)
    head = _head(calls[0], model)
    found: list[dict[str, Any]] = [
        {"type": "response.created", "response": head},
        {"type": "response.in_progress", "response": head},
    ]
    for index, item in enumerate(whole_body["output"]):
        found += _item_events(item, {"output_index": index, "item_id": item["id"]})
    ended = "response.incomplete" if whole_body["status"] == "incomplete" else "response.completed"
    found.append({"type": ended, "response": whole_body})
    for sequence, event in enumerate(found):
        yield {**event, "sequence_number": sequence}


def _item_events(item: dict[str, Any], place: dict[str, Any]) -> Iterator[dict[str, Any]]:
    index = place["output_index"]
    bare = {**item, **({"content": []} if "content" in item else {"arguments": ""})}
    yield {"type": "response.output_item.added", "output_index": index, "item": bare}
    if item["type"] == "message":
        part, at = item["content"][0], {**place, "content_index": 0}
        yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
        yield {"type": "response.output_text.delta", **at, "delta": part["text"], "logprobs": []}
        yield {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": []}
        yield {"type": "response.content_part.done", **at, "part": part}
    if item["type"] == "function_call":
        said = item["arguments"]
        yield {"type": "response.function_call_arguments.delta", **place, "delta": said}
        yield {"type": "response.function_call_arguments.done", **place, "arguments": said, "name": item["name"]}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}
