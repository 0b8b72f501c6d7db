"""Anthropic's Messages API."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

from turntree.core.config import Positive, converted
from turntree.core.errors import InputError
from turntree.core.messages import Message, as_object
from turntree.gateway.calls import Call
from turntree.gateway.config import CONTEXT, Refused
from turntree.gateway.dialects import common
from turntree.gateway.dialects.common import Before, Body, Dialect, Fields, Stream, event
from turntree.gateway.sampling import Ask

_TOOL_KEYS = frozenset({"type", "name", "description", "input_schema", "strict", "cache_control"})
_BLOCK_KEYS = frozenset({"type", "id", "name", "tool_use_id", "is_error", "cache_control", "caller"})
_BILLING = "x-anthropic-billing-header:"
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
_KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
FIELDS = Fields(
    read={
        "messages": list[Any], "system": str | list[Any], "tools": list[Any], "tool_choice": dict[str, Any],
        "max_tokens": Positive, "stream": bool, "stop_sequences": list[Any], "output_config": dict[str, Any],
        "output_format": dict[str, Any], **common.SAMPLED,
    },
    # `context_management` asks the server to leave out earlier parts: here the agent reads that the context is full
    recorded=common.RECORDED
    | {"top_k", "thinking", "context_management", "output_config", "stop_sequences", "tool_choice"},
    nothing=common.NOTHING
    | {"cache_control", "inference_geo", "speed", "betas", "diagnostics", "user_profile_id", "workspace_id"},
    neutral={"mcp_servers": ([],), "container": ()},
)  # fmt: skip


def read(body: Body, before: Before) -> Ask:
    """Raises `InputError` or `Refused` naming the field."""
    given = FIELDS.of(body)
    if not given["messages"]:
        raise InputError("is not a list of messages", field="messages", hint="give at least one")
    system, billing = _system(given["system"])
    rows = common.bounded(given["messages"], "messages")
    messages = [message for i, row in enumerate(rows) for message in _messages(row, f"messages[{i}]")]
    declared, hosted, _ = common.flat_tools(given["tools"] or [], "input_schema", _TOOL_KEYS)
    form = (given["output_config"] or {}).get("format") or given["output_format"]
    schema = common.read_schema(converted(dict[str, Any] | None, form, field="output_config.format"), "output_config")
    tools, form = common.form_of(_choice(given["tool_choice"]), declared, schema)
    failed = sum(part.get("is_error") is True for row in rows for part in _parts(row.get("content")))
    return Ask(
        messages=(*system, *_merged(messages)),
        tools=tools,
        max_tokens=given["max_tokens"],
        stop=common.read_stops(given["stop_sequences"], "stop_sequences"),
        form=form,
        stream=given["stream"] is True,
        meta=given["meta"] | hosted | ({"tool_errors": failed} if failed else {}) | billing,
    )


def _system(given: str | list[Any] | None) -> tuple[list[Message], dict[str, Any]]:
    """Without the block in which Claude Code says whom to bill: it differs in every request, and each would begin
    another conversation."""
    parts = _parts(given)
    bills = [part for part in parts if str(part.get("text")).startswith(_BILLING)]
    kept = [part for part in cast("list[Any]", given) if part not in bills] if bills else given
    return _read(kept, "system", "system") if kept else [], {"billing": bills} if bills else {}


def _choice(choice: dict[str, Any] | None) -> str:
    row = choice or {"type": "auto"}
    kind = row.get("type")
    if kind == "tool":
        return f":{row.get('name')}"
    if kind not in ("auto", "any", "none"):
        raise InputError(
            "is no choice of tools", field="tool_choice", hint="use auto, any, none, or {type: tool, name}"
        )
    return str(kind)


def _parts(content: Any) -> list[dict[str, Any]]:
    return [part for part in cast("list[Any]", content) if isinstance(part, dict)] if isinstance(content, list) else []


def _messages(given: Any, where: str) -> list[Message]:
    """What one of their messages says, in messages of one role each: the results of tools come before the text."""
    row = as_object(given)
    role, content = row.get("role"), row.get("content")
    if role not in ("user", "assistant", "system"):
        raise InputError(f"unknown role {role!r}", field=f"{where}.role", hint="use user, assistant or system")
    common.needed(row, "content", where)
    if role == "system":
        # many chat templates know a system message at the beginning only, so it is said as Claude Code says reminders
        [said] = _read(content, "user", where)
        return [replace(said, content=f"<system-reminder>\n{said.content}\n</system-reminder>")]
    if not isinstance(content, list):
        return _read(content, role, where)
    parts: list[Any] = content
    results = [_result(part, where) for part in _parts(parts) if part.get("type") == "tool_result"]
    calls = [_call(part, where) for part in _parts(parts) if part.get("type") == "tool_use"]
    rest = [part for part in parts if not isinstance(part, dict) or part.get("type") not in ("tool_result", "tool_use")]
    if (results and role != "user") or (calls and role != "assistant"):
        raise InputError(f"holds what no message of {role} holds", field=f"{where}.content")
    said = _read(rest, role, where, calls) if rest or calls or not results else []
    return [*results, *said]


def _read(content: Any, role: str, where: str, calls: list[dict[str, Any]] | None = None) -> list[Message]:
    return [common.read_message({"role": role, "content": content, "tool_calls": calls or []}, where)]


def _call(part: dict[str, Any], where: str) -> dict[str, Any]:
    common.needed(part, "input", f"{where}.content[]", _BLOCK_KEYS)
    return {"id": part.get("id"), "function": {"name": part.get("name"), "arguments": part.get("input")}}


def _result(part: dict[str, Any], where: str) -> Message:
    content = part.get("content")
    if part.keys() - _BLOCK_KEYS:
        common.needed(part, "content", f"{where}.content[]", _BLOCK_KEYS)  # without it a result is empty
    return common.read_message(
        {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": "" if content is None else content}, where
    )


def _merged(messages: list[Message]) -> list[Message]:
    """Messages of one user in a row are one, as that API reads them."""
    turns: list[Message] = []
    for role, run in itertools.groupby(common.joined_turns(messages), lambda message: message.role):
        said = list(run)
        same = role == "user"
        turns += [Message("user", "\n\n".join(message.content for message in said))] if same else said
    return turns


def body(call: Call, model: str, ask: Ask) -> dict[str, Any]:
    return {**_head(call.call_id, model), "content": _blocks(call), **_ending(call), "usage": _usage(call)}


def _head(name: str, model: str) -> dict[str, Any]:
    empty = {
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 0, "output_tokens": 0},
    }
    return {"id": f"msg_{name}", "type": "message", "role": "assistant", "model": model, **empty}


def _ending(call: Call) -> dict[str, Any]:
    if call.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": call.stop}
    return {"stop_reason": _REASONS[common.finish_reason(call)], "stop_sequence": None}


def _usage(call: Call) -> dict[str, Any]:
    use = common.usage(call)
    cached = use["prompt_tokens_details"]["cached_tokens"]
    counts = {"input_tokens": use["prompt_tokens"] - cached, "output_tokens": use["completion_tokens"]}
    return {**counts, "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}


def _blocks(call: Call) -> list[dict[str, Any]]:
    assert call.answer is not None
    blocks: list[dict[str, Any]] = []
    if call.answer.reasoning:
        blocks.append({"type": "thinking", "thinking": call.answer.reasoning, "signature": call.call_id})
    if call.answer.content or not call.answer.tool_calls:
        blocks.append({"type": "text", "text": call.answer.content})
    made = [{"type": "tool_use", "id": c.id, "name": c.name, "input": c.arguments} for c in call.answer.tool_calls]
    return [*blocks, *made]


class MessageStream(Stream):
    _index = 0  # of the block that is open, or of the next one

    def _begin(self, message: Message) -> Iterator[str]:
        if self.begun:
            return
        self.begun = True
        yield event("message_start", message=_head(self.name, self.model))
        if message.reasoning:
            yield self._start({"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": message.reasoning})
            yield self._delta({"type": "signature_delta", "signature": self.name})
            yield self._stop()
        if message.content or not message.tool_calls:
            yield self._start({"type": "text", "text": ""})

    def _start(self, block: dict[str, Any]) -> str:
        return event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> str:
        return event("content_block_delta", index=self._index, delta=delta)

    def _stop(self) -> str:
        self._index += 1
        return event("content_block_stop", index=self._index - 1)

    def said(self, message: Message) -> Iterator[str]:
        yield from self._begin(message)
        if new := self.new(message):
            yield self._delta({"type": "text_delta", "text": new})

    def ended(self, call: Call) -> Iterator[str]:
        assert call.answer is not None
        yield from self.said(call.answer)
        if call.answer.content or not call.answer.tool_calls:
            yield self._stop()
        for made in call.answer.tool_calls:
            yield self._start({"type": "tool_use", "id": made.id, "name": made.name, "input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": json.dumps(made.arguments)})
            yield self._stop()
        yield event("message_delta", delta=_ending(call), usage=_usage(call))
        yield event("message_stop")

    def failed(self, error: Refused) -> Iterator[str]:
        yield event("error", error=error_body(error)["error"])


def error_body(refused: Refused) -> dict[str, Any]:
    kind = _KINDS.get(refused.status, "api_error" if refused.status >= 500 else "invalid_request_error")
    words = f"{refused.param}: {refused}" if refused.param and refused.param not in str(refused) else str(refused)
    if refused.code == CONTEXT:  # the words for which Claude Code looks before it compacts
        words = f"prompt is too long: {refused}"
    return {"type": "error", "error": {"type": kind, "message": words}}


DIALECT = Dialect(read, body, MessageStream, error_body)
