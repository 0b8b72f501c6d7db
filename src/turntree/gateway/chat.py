"""OpenAI's chat completions as values: requests read strictly, answers and their streams written.

What a request asks for is applied, refused or recorded, never ignored in silence (table: docs/design/gateway.md).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from turntree.core.errors import InputError
from turntree.core.messages import REASONING_KEYS, Message
from turntree.gateway.config import Refused, bad_request
from turntree.gateway.lineage import Kept
from turntree.gateway.sessions import Ask

_NO_HINT = "leave it out"
_MOST = 4096  # messages, parts of them and calls in one request: each is work that keeps everybody waiting
_MOST_RECORDED = 10_000  # characters of one recorded value
_MESSAGE_KEYS = frozenset({"role", "content", "tool_calls", "tool_call_id", "name", "cut", *REASONING_KEYS})
# of a message: they hold what the model said in another form, or ask to go on from it
_UNREAD_SPEECH = ("function_call", "refusal", "audio", "prefix", "partial")


@dataclass(frozen=True, kw_only=True)
class Fields:
    """What is done with the fields of a request: `read`; `recorded` with the call, without effect on its answer;
    `nothing`; `neutral`: what changes the distribution, accepted with the values that change nothing."""

    read: frozenset[str]
    recorded: frozenset[str]
    nothing: frozenset[str]
    neutral: Mapping[str, tuple[Any, ...]]

    def check(self, body: Mapping[str, Any]) -> None:
        """Raises `Refused` for a field that is unknown or that would change the distribution."""
        for name, value in body.items():
            if value is None or name in self.read or name in self.recorded or name in self.nothing:
                continue
            if name not in self.neutral:
                raise Refused(400, f"unknown parameter {name!r}: {_NO_HINT}", code="unknown_parameter", param=name)
            if not any(value == one and type(value) is type(one) for one in self.neutral[name]):
                message = f"{name!r} is not supported: the policy is sampled as it is; {_NO_HINT}"
                raise Refused(400, message, code="unsupported_parameter", param=name)


FIELDS = Fields(
    read=frozenset(
        {"messages", "tools", "tool_choice", "n", "max_tokens", "max_completion_tokens", "stream", "stream_options"}
        | {"logprobs", "response_format"}
    ),
    recorded=frozenset(
        {"temperature", "top_p", "seed", "model", "user", "metadata", "parallel_tool_calls", "reasoning_effort"}
        | {"verbosity"}
    ),
    nothing=frozenset({"store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"}),
    neutral={
        "frequency_penalty": (0, 0.0),
        "presence_penalty": (0, 0.0),
        "repetition_penalty": (1, 1.0),
        "logit_bias": ({},),
        "top_k": (0, -1),
        "min_p": (0, 0.0),
        "top_logprobs": (0,),
        "stop": ([], ""),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
    },
)


def read_chat(body: Mapping[str, Any]) -> Ask:
    """The request of a body. Raises `Refused` naming the field."""
    FIELDS.check(body)
    try:
        messages = _messages(body.get("messages"))
        tools = read_tools(body.get("tools"))
    except InputError as error:
        raise bad_request(error) from error
    only_text(body.get("response_format"), "response_format")
    longest = body.get("max_completion_tokens")
    return Ask(
        messages=messages,
        tools=chosen(body.get("tool_choice"), tools),
        candidates=whole(body, "n", 1) or 1,
        max_tokens=whole(body, "max_tokens", 1) if longest is None else whole(body, "max_completion_tokens", 1),
        temperature=number(body, "temperature", 0, 2),
        top_p=number(body, "top_p", 1e-9, 1),
        seed=whole(body, "seed", -(2**63)),
        meta=recorded(body, FIELDS.recorded) | _without_effect(body["messages"]),
    )


def _without_effect(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Keys of messages that nothing reads (`cache_control`, an agent's own), which are recorded with the call."""
    names = sorted({str(name)[:80] for row in rows for name, value in row.items() if value} - _MESSAGE_KEYS)
    return {"message_keys": names[:20]} if names else {}


def recorded(body: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """What an agent said about its call. Raises `Refused` for what is too long to be kept with every call."""
    found = {name: body[name] for name in sorted(names) if body.get(name) is not None}
    for name, value in found.items():
        if len(json.dumps(value)) > _MOST_RECORDED:
            raise Refused(400, f"{name!r} has more than {_MOST_RECORDED} characters", param=name)
    return found


def _messages(given: Any) -> tuple[Message, ...]:
    if not isinstance(given, list) or not given:
        raise InputError("is not a list of messages", field="messages", hint="give at least one")
    return tuple(read_message(row, f"messages[{i}]") for i, row in enumerate(bounded(given, "messages")))


def bounded(rows: list[Any], field: str) -> list[Any]:
    """The rows of a request. Raises `Refused` where they are too many, or the lists and keys in them."""
    count = len(rows)
    if count <= _MOST:
        objects = [cast("dict[str, Any]", row) for row in rows if isinstance(row, dict)]
        lists = (cast("list[Any]", value) for row in objects for value in row.values() if isinstance(value, list))
        count += sum(map(len, lists)) + sum(len(row) // 8 for row in objects)
    if count > _MOST:
        message = f"has {count} messages, parts and calls, and a request may have {_MOST}"
        raise Refused(413, message, code="too_large", param=field)
    return rows


def read_message(given: Any, where: str) -> Message:
    """One message; `where` names it in errors. Raises `InputError`."""
    row = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    if row.get("role") == "developer":
        row = {**row, "role": "system"}
    for name in _UNREAD_SPEECH:
        if row.get(name):
            hint = "only content, reasoning and tool_calls are read; leave it out"
            raise InputError("is not supported", field=f"{where}.{name}", hint=hint)
    for name in ("tool_call_id", "name"):
        if not isinstance(row.get(name), str | None):
            raise InputError("is not text", field=f"{where}.{name}")
    try:
        message = Message.from_chat(row if isinstance(given, dict) else given)
    except InputError as error:
        raise InputError(error.problem, field=f"{where}.{error.field}", hint=error.hint) from error
    # only the gateway knows which of its answers were cut
    return replace(message, cut=False) if message.cut else message


def read_tools(given: Any) -> tuple[dict[str, Any], ...]:
    if given is None:
        return ()
    if not isinstance(given, list):
        raise InputError("is not a list", field="tools")
    for i, tool in enumerate(bounded(cast("list[Any]", given), "tools")):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(cast("dict[str, Any]", function).get("name"), str):
            raise InputError("is not {type: function, function: {name, ...}}", field=f"tools[{i}]")
    return tuple(cast("list[dict[str, Any]]", given))


def chosen(choice: Any, tools: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    """The tools that the policy is shown: none of them where it must not call any."""
    if isinstance(choice, dict) and choice.keys() == {"type"}:  # some clients write it as an object
        choice = cast("dict[str, Any]", choice)["type"]
    if choice in (None, "auto"):
        return tools
    if choice == "none":
        return ()
    message = "a call cannot be forced: the policy is sampled as it is; use 'auto' or 'none'"
    raise Refused(400, message, code="unsupported_parameter", param="tool_choice")


def only_text(form: Any, param: str) -> None:
    """Raises `Refused` for any form of an answer that is not text."""
    if form is not None and (not isinstance(form, dict) or cast("dict[str, Any]", form).get("type") != "text"):
        raise Refused(400, "only text is sampled: no JSON mode and no schema", param=param)


def whole(body: Mapping[str, Any], name: str, least: int) -> int | None:
    """A whole number of a body. Raises `Refused` naming it."""
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or not least <= value < 2**63:
        raise Refused(400, f"{name!r} is not a whole number of at least {least}", param=name)
    return value


def flag(body: Mapping[str, Any], name: str) -> bool:
    """A truth value of a body, false where it has none. Raises `Refused` naming it."""
    value = body.get(name)
    if not isinstance(value, bool | None):
        raise Refused(400, f"{name!r} is neither true nor false", param=name)
    return value is True


def number(body: Mapping[str, Any], name: str, least: float, most: float) -> float | None:
    """A finite number of a body. Raises `Refused` naming it."""
    value = body.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or not math.isfinite(value) or not least <= value <= most:
        raise Refused(400, f"{name!r} is not a number from {least:g} to {most:g}", param=name)
    return float(value)


# answers


def completion_body(calls: Sequence[Kept], model: str, *, logprobs: bool = False) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{calls[0].request_id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            {
                "index": i,
                "message": answer_body(kept),
                "finish_reason": finish_reason(kept),
                "logprobs": _logprobs(kept) if logprobs else None,
                "call_id": kept.call_id,
            }
            for i, kept in enumerate(calls)
        ],
        "usage": usage(calls),
    }


def answer_body(kept: Kept) -> dict[str, Any]:
    """The assistant's message as OpenAI writes it: arguments as text, no content beside calls."""
    assert kept.answer is not None
    body: dict[str, Any] = {"role": "assistant", "content": kept.answer.content}
    if kept.answer.tool_calls:
        body["content"] = kept.answer.content or None
        body["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for call in kept.answer.tool_calls
        ]
    if kept.answer.reasoning:
        body["reasoning_content"] = kept.answer.reasoning
    return body


def finish_reason(kept: Kept) -> str:
    assert kept.answer is not None
    return "length" if kept.answer.cut else "tool_calls" if kept.answer.tool_calls else "stop"


def usage(calls: Sequence[Kept]) -> dict[str, Any]:
    completions = [kept.completion for kept in calls if kept.completion is not None]
    sampled, prompt = sum(len(one.token_ids) for one in completions), calls[0].prompt_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": min(prompt, sum(one.cost.reused_tokens for one in completions))},
    }


def _logprobs(kept: Kept) -> dict[str, Any]:
    assert kept.completion is not None
    pairs = zip(kept.completion.token_ids, kept.completion.logprobs, strict=True)
    return {"content": [{"token": f"token_id:{t}", "logprob": p, "bytes": None, "top_logprobs": []} for t, p in pairs]}


def chunks(calls: Sequence[Kept], model: str, *, with_usage: bool, logprobs: bool = False) -> Iterator[dict[str, Any]]:
    """The same answer as the chunks of a stream. An answer is streamed once it is sampled as a whole: the log must hold
    it before the agent sees any of it."""
    head = {"id": f"chatcmpl-{calls[0].request_id}", "object": "chat.completion.chunk", "created": int(time.time())}
    for i, kept in enumerate(calls):
        body = answer_body(kept)
        delta = {**body, "content": body["content"] or ""}
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": k, **call} for k, call in enumerate(body["tool_calls"])]
        told = _logprobs(kept) if logprobs else None
        for part, reason, scores in ((delta, None, told), ({}, finish_reason(kept), None)):
            choice = {"index": i, "delta": part, "finish_reason": reason, "logprobs": scores}
            yield {**head, "model": model, "choices": [choice], **({"usage": None} if with_usage else {})}
    if with_usage:
        yield {**head, "model": model, "choices": [], "usage": usage(calls)}
