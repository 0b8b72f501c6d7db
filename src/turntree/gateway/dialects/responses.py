"""OpenAI's Responses API."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from turntree.core.config import Positive, converted
from turntree.core.errors import InputError
from turntree.core.messages import Message, as_object
from turntree.gateway.calls import Call
from turntree.gateway.config import Refused
from turntree.gateway.dialects import chat, common
from turntree.gateway.dialects.common import Before, Body, Dialect, Fields, Stream, event
from turntree.gateway.sampling import Ask

_CALLED = "instructions"  # of a call's meta: its prompt begins with them, and a later one may have others
_CALL_KEYS = frozenset({"type", "id", "call_id", "status", "name", "arguments", "namespace"})
_TOOL_KEYS = frozenset({"type", "name", "description", "parameters", "strict"})
# by an item's type; what stands under another key would be read as nothing
_NEEDED = {
    "message": "content", "function_call": "arguments", "function_call_output": "output", "reasoning": "summary",
}  # fmt: skip
FIELDS = Fields(
    read={
        "input": str | list[Any], "instructions": str, "tools": list[Any], "tool_choice": str | dict[str, Any],
        "max_output_tokens": Positive, "previous_response_id": str, "text": dict[str, Any], "stream": bool,
        **common.SAMPLED,
    },
    recorded=common.RECORDED | {"reasoning", "text", "client_metadata"},
    nothing=common.NOTHING | {"include", "truncation", "stream_options"},
    neutral={"top_logprobs": (0,), "background": (False,), "max_tool_calls": (), "prompt": (), "conversation": ()},
)  # fmt: skip


def read(body: Body, before: Before) -> Ask:
    """`before` finds the call of an earlier response. Raises `InputError` or `Refused` naming the field."""
    given = FIELDS.of(body)
    form = converted(dict[str, Any] | None, (given["text"] or {}).get("format"), field="text.format")
    if "message.output_text.logprobs" in str(body.get("include")):
        raise Refused(400, "log-probabilities are given by chat completions only", param="include")
    messages = [*_earlier(given["previous_response_id"], before), *_messages(given["input"])]
    instructions = [Message("system", given["instructions"])] if given["instructions"] else []
    declared, hosted, namespaces = common.flat_tools(given["tools"] or [], "parameters", _TOOL_KEYS)
    schema = common.read_schema(form, "text.format")
    tools, form = common.form_of(chat.choice_of(given["tool_choice"]), declared, schema)
    return Ask(
        messages=(*instructions, *messages),
        tools=tools,
        max_tokens=given["max_output_tokens"],
        form=form,
        stream=given["stream"] is True,
        namespaces=namespaces,
        meta={**given["meta"], **hosted, **({_CALLED: True} if instructions else {})},
    )


def _earlier(name: str | None, before: Before) -> list[Message]:
    """The dialogue of an earlier response, without its instructions, which are not carried over."""
    if name is None:
        return []
    call = before(name.removeprefix("resp_"))
    if call is None or call.answer is None:
        raise InputError("is no answer of this session", field="previous_response_id")
    return [*call.messages[int(_CALLED in call.meta) :], call.answer]


def _messages(given: str | list[Any] | None) -> list[Message]:
    """Items as messages; what the assistant says and calls in a row is one turn."""
    if isinstance(given, str):
        return [Message("user", given)]
    if not given:
        raise InputError("is neither text nor a list of items", field="input")
    items = common.bounded(given, "input")
    return common.joined_turns([common.read_message(_as_chat(item, i), f"input[{i}]") for i, item in enumerate(items)])


def _as_chat(item: Any, index: int) -> dict[str, Any]:
    row = as_object(item)
    kind = row.get("type") or "message"
    if isinstance(kind, str) and kind in _NEEDED and not (kind == "reasoning" and "content" in row):
        common.needed(row, _NEEDED[kind], f"input[{index}]", _CALL_KEYS)
    if kind == "message":
        return {"role": row.get("role"), "content": row.get("content")}
    if kind == "function_call":
        name = f"{space}{common.APART}{row.get('name')}" if (space := row.get("namespace")) else row.get("name")
        unknown = {key: value for key, value in row.items() if key not in _CALL_KEYS}
        function = {"name": name, "arguments": row.get("arguments"), **unknown}
        return {"role": "assistant", "tool_calls": [{"id": row.get("call_id"), "function": function}]}
    if kind == "function_call_output":
        return {"role": "tool", "content": row.get("output"), "tool_call_id": row.get("call_id")}
    if kind == "reasoning":
        return {"role": "assistant", "reasoning_content": row.get("content") or row.get("summary") or ""}
    hint = "message, function_call, function_call_output and reasoning are read"
    raise InputError(f"is of type {kind!r}", field=f"input[{index}]", hint=hint)


def body(call: Call, model: str, ask: Ask) -> dict[str, Any]:
    assert call.answer is not None
    use = common.usage(call)
    cut = call.answer.cut
    return {
        **_head(call.call_id, model),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _items(call.call_id, call.answer, ask.namespaces),
        "usage": {
            "input_tokens": use["prompt_tokens"],
            "input_tokens_details": use["prompt_tokens_details"],
            "output_tokens": use["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": use["total_tokens"],
        },
    }


def _head(name: str, model: str) -> dict[str, Any]:
    head: dict[str, Any] = {"id": f"resp_{name}", "object": "response", "created_at": int(time.time())}
    empty = {"error": None, "incomplete_details": None, "instructions": None, "metadata": {}, "output": []}
    asked = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "temperature": None, "top_p": None}
    return {**head, "model": model, "status": "in_progress", **empty, **asked}


def _items(name: str, answer: Message, namespaces: frozenset[str]) -> list[dict[str, Any]]:
    status = "incomplete" if answer.cut else "completed"
    items: list[dict[str, Any]] = []
    if answer.reasoning:
        thought = [{"type": "reasoning_text", "text": answer.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": thought})
    if answer.content or not answer.tool_calls:
        said = [{"type": "output_text", "text": answer.content, "annotations": [], "logprobs": []}]
        message = {"type": "message", "id": f"msg_{name}", "role": "assistant"}
        items.append({**message, "status": status, "content": said})
    for i, made in enumerate(answer.tool_calls):
        space, apart, own = made.name.partition(common.APART)
        named = {"name": own, "namespace": space} if apart and space in namespaces else {"name": made.name}
        item = {"type": "function_call", "id": f"fc_{name}_{i}", "call_id": made.id, **named}
        items.append({**item, "arguments": json.dumps(made.arguments), "status": status})
    return items


class ResponseStream(Stream):
    """Each item whole, but for the text of a message."""

    _count = 0

    def _event(self, kind: str, **more: Any) -> str:
        self._count += 1
        return event(kind, **more, sequence_number=self._count - 1)

    def _begin(self, message: Message) -> Iterator[str]:
        """What comes before a text: the reasoning, and the beginning of the item."""
        if self.begun:
            return
        self.begun = True
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=_head(self.name, self.model))
        for index, item in enumerate(_items(self.name, message, self.ask.namespaces)):
            if item["type"] == "reasoning":
                yield from self._whole(index, item)
            elif item["type"] == "message":
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                added = {**item, "status": "in_progress", "content": []}
                yield self._event("response.output_item.added", output_index=index, item=added)
                yield self._event("response.content_part.added", **self._at(index, item), part=part)

    def _at(self, index: int, item: dict[str, Any]) -> dict[str, Any]:
        return {"output_index": index, "item_id": item["id"], "content_index": 0}

    def _whole(self, index: int, item: dict[str, Any]) -> Iterator[str]:
        place = {"output_index": index, "item_id": item["id"]}
        bare = {**item, **({"content": []} if "content" in item else {"arguments": ""})}
        yield self._event("response.output_item.added", output_index=index, item=bare)
        if item["type"] == "function_call":
            said = item["arguments"]
            yield self._event("response.function_call_arguments.delta", **place, delta=said)
            done = {**place, "arguments": said, "name": item["name"]}
            yield self._event("response.function_call_arguments.done", **done)
        yield self._event("response.output_item.done", output_index=index, item=item)

    def said(self, message: Message) -> Iterator[str]:
        yield from self._begin(message)
        for index, item in enumerate(_items(self.name, message, self.ask.namespaces)):
            if item["type"] == "message" and (new := self.new(message)):
                at = self._at(index, item)
                yield self._event("response.output_text.delta", **at, delta=new, logprobs=[])

    def ended(self, call: Call) -> Iterator[str]:
        assert call.answer is not None
        yield from self.said(call.answer)
        whole = body(call, self.model, self.ask)
        for index, item in enumerate(whole["output"]):
            if item["type"] == "message":
                [part], at = item["content"], self._at(index, item)
                yield self._event("response.output_text.done", **at, text=part["text"], logprobs=[])
                yield self._event("response.content_part.done", **at, part=part)
                yield self._event("response.output_item.done", output_index=index, item=item)
            elif item["type"] == "function_call":
                yield from self._whole(index, item)
        yield self._event(f"response.{whole['status']}", response=whole)

    def failed(self, error: Refused) -> Iterator[str]:
        failure = {"code": error.code or "server_error", "message": str(error)}
        response = {**_head(self.name, self.model), "status": "failed", "error": failure}
        yield self._event("response.failed", response=response)


DIALECT = Dialect(read, body, ResponseStream)
