"""OpenAI's chat completions and Responses API as values: requests read strictly, answers and their streams written.

What a request asks for is applied, refused or recorded, never ignored in silence (table: docs/design/gateway.md).
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, cast

from turntree.core.config import UNKNOWN, Between, converted
from turntree.core.errors import InputError
from turntree.core.messages import REASONING_KEYS, Message
from turntree.gateway.calls import Call, Tools
from turntree.gateway.config import Refused
from turntree.gateway.sampling import Ask

_NO_HINT = "leave it out"
_MOST = 4096  # messages, items or tools in one request: each is work that keeps everybody waiting
_MOST_RECORDED = 10_000  # characters of one recorded value
_MESSAGE_KEYS = frozenset({"role", "content", "tool_calls", "tool_call_id", "name", "cut", *REASONING_KEYS})
# of a message: they hold what the model said in another form, or ask to go on from it
_UNREAD_SPEECH = ("function_call", "refusal", "audio", "prefix", "partial")
_CALLED = "instructions"  # of a call's meta: its prompt begins with them, and a later one may have others
_CALL_KEYS = frozenset({"type", "id", "call_id", "status", "name", "arguments"})
_TOOL_KEYS = frozenset({"type", "name", "description", "parameters", "strict"})
# by an item's type; what stands under another key would be read as nothing
_NEEDED = {"message": "content", "function_call": "arguments", "function_call_output": "output"}
Before = Callable[[str], Call | None]

Whole = Annotated[int, Between(1)]


@dataclass(frozen=True, kw_only=True)
class Fields:
    """What is done with the fields of a request: `read`, each by its type; `recorded` with the call, without effect on
    its answer; `nothing`; `neutral`: what changes the distribution, accepted with the values that change nothing."""

    read: Mapping[str, Any]
    recorded: frozenset[str]
    nothing: frozenset[str]
    neutral: Mapping[str, tuple[Any, ...]]

    def of(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The fields that are read, None where the body has none, and under `meta` those that are recorded. Raises
        `InputError` for a field that is unknown, of another type, or that would change the distribution."""
        found = {name: converted(kind | None, body.get(name), field=name) for name, kind in self.read.items()}
        meta: dict[str, Any] = {}
        for name, value in sorted(body.items()):
            if value is None or name in self.nothing:
                continue
            if name in self.recorded:
                if len(json.dumps(value)) > _MOST_RECORDED:
                    raise InputError(f"has more than {_MOST_RECORDED} characters", field=name)
                meta[name] = value
            elif name in self.neutral:
                if not any(value == one and type(value) is type(one) for one in self.neutral[name]):
                    message = f"{name!r} is not supported: the policy is sampled as it is; {_NO_HINT}"
                    raise Refused(400, message, code="unsupported_parameter", param=name)
            elif name not in self.read:
                raise InputError(UNKNOWN, field=name, hint=_NO_HINT)
        return {**found, "meta": meta}


_SAMPLED = {"temperature": Annotated[float, Between(0, 2)], "top_p": Annotated[float, Between(1e-9, 1)]}
CHAT = Fields(
    read={
        "messages": list[Any], "tools": list[Any], "tool_choice": str | dict[str, Any], "max_tokens": Whole,
        "max_completion_tokens": Whole, "stream": bool, "stream_options": dict[str, Any], "logprobs": bool,
        "response_format": dict[str, Any], "seed": int, **_SAMPLED,
    },
    recorded=frozenset({"temperature", "top_p", "seed", "model", "user", "metadata", "parallel_tool_calls"})
    | {"reasoning_effort", "verbosity"},
    nothing=frozenset({"store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"}),
    neutral={
        "frequency_penalty": (0, 0.0), "presence_penalty": (0, 0.0), "repetition_penalty": (1, 1.0),
        "logit_bias": ({},), "top_k": (0, -1), "min_p": (0, 0.0), "top_logprobs": (0,), "stop": ([], ""),
        "n": (1,), "functions": ([],), "function_call": ("none", "auto"), "modalities": (["text"],),
    },
)  # fmt: skip
RESPONSES = Fields(
    read={
        "input": str | list[Any], "instructions": str, "tools": list[Any], "tool_choice": str | dict[str, Any],
        "max_output_tokens": Whole, "previous_response_id": str, "text": dict[str, Any], "stream": bool, **_SAMPLED,
    },
    recorded=(CHAT.recorded - {"seed", "reasoning_effort", "verbosity"}) | {"reasoning", "text"},
    nothing=CHAT.nothing | {"include", "truncation", "stream_options"},
    neutral={"top_logprobs": (0,), "background": (False,), "max_tool_calls": (), "prompt": (), "conversation": ()},
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """What an agent asks, and how it wants to be answered."""

    ask: Ask
    stream: bool
    logprobs: bool = False
    with_usage: bool = False


def read_chat(body: Mapping[str, Any], before: Before) -> Request:
    """The request of a body. Raises `InputError` or `Refused` naming the field."""
    given = CHAT.of(body)
    if not given["messages"]:
        raise InputError("is not a list of messages", field="messages", hint="give at least one")
    rows = bounded(given["messages"], "messages")
    messages = tuple(read_message(row, f"messages[{i}]") for i, row in enumerate(rows))
    only_text(given["response_format"], "response_format")
    # keys that nothing reads (`cache_control`, an agent's own) are recorded with the call
    names = sorted({str(name)[:80] for row in rows for name, value in row.items() if value} - _MESSAGE_KEYS)
    ask = Ask(
        messages=messages,
        tools=chosen(given["tool_choice"], read_tools(given["tools"] or [])),
        max_tokens=given["max_completion_tokens"] or given["max_tokens"],
        seed=given["seed"],
        meta=given["meta"] | ({"message_keys": names[:20]} if names else {}),
    )
    usage = converted(bool | None, (given["stream_options"] or {}).get("include_usage"), field="include_usage")
    return Request(ask, given["stream"] is True, given["logprobs"] is True, usage is True)


def bounded(rows: list[Any], field: str) -> list[Any]:
    """The rows of a request. Raises `Refused` where they are too many."""
    if len(rows) > _MOST:
        raise Refused(413, f"has {len(rows)} rows, and may have {_MOST}", code="too_large", param=field)
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


def read_tools(given: list[Any]) -> Tools:
    for i, tool in enumerate(bounded(given, "tools")):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(cast("dict[str, Any]", function).get("name"), str):
            raise InputError("is not {type: function, function: {name, ...}}", field=f"tools[{i}]")
    return tuple(given)


def chosen(choice: str | dict[str, Any] | None, tools: Tools) -> Tools:
    """The tools that the policy is shown: none of them where it must not call any."""
    if isinstance(choice, dict) and choice.keys() == {"type"}:  # some clients write it as an object
        choice = choice["type"]
    if choice in (None, "auto"):
        return tools
    if choice == "none":
        return ()
    message = "a call cannot be forced: the policy is sampled as it is; use 'auto' or 'none'"
    raise Refused(400, message, code="unsupported_parameter", param="tool_choice")


def only_text(form: dict[str, Any] | None, param: str) -> None:
    """Raises `Refused` for any form of an answer that is not text."""
    if form is not None and form.get("type") != "text":
        raise Refused(400, "only text is sampled: no JSON mode and no schema", param=param)


def read_responses(body: Mapping[str, Any], before: Before) -> Request:
    """The request of a body; `before` finds the call of an earlier response. Raises `InputError` or `Refused` naming
    the field."""
    given = RESPONSES.of(body)
    only_text(converted(dict[str, Any] | None, (given["text"] or {}).get("format"), field="text.format"), "text.format")
    if "message.output_text.logprobs" in str(body.get("include")):
        raise Refused(400, "log-probabilities are given by chat completions only", param="include")
    messages = [*_earlier(given["previous_response_id"], before), *_messages(given["input"])]
    instructions = [Message("system", given["instructions"])] if given["instructions"] else []
    ask = Ask(
        messages=(*instructions, *messages),
        tools=chosen(given["tool_choice"], read_tools(_chat_tools(given["tools"] or []))),
        max_tokens=given["max_output_tokens"],
        meta={**given["meta"], **({_CALLED: True} if instructions else {})},
    )
    return Request(ask, given["stream"] is True)


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
    read = (read_message(_as_chat(item, i), f"input[{i}]") for i, item in enumerate(bounded(given, "input")))
    turns: list[Message] = []
    for spoken, run in itertools.groupby(read, lambda message: message.role == "assistant"):
        said = list(run)
        turns += [_one_turn(said)] if spoken else said
    return turns


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


def _chat_tools(given: list[Any]) -> list[Any]:
    """Flat declarations in the form of chat completions."""
    for i, tool in enumerate(given):
        if not isinstance(tool, dict) or cast("dict[str, Any]", tool).get("type") != "function":
            raise InputError("is not a function: the gateway runs no tools itself", field=f"tools[{i}]")
        if "parameters" not in tool and (unknown := sorted(tool.keys() - _TOOL_KEYS)):
            raise InputError("unknown key, and no parameters", field=f"tools[{i}].{unknown[0]}")
    names = ("name", "description", "parameters")
    return [{"type": "function", "function": {n: row[n] for n in names if row.get(n) is not None}} for row in given]


# answers


def completion_body(call: Call, model: str, request: Request) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{call.call_id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": answer_body(call),
                "finish_reason": finish_reason(call),
                "logprobs": _logprobs(call) if request.logprobs else None,
            }
        ],
        "usage": usage(call),
    }


def answer_body(call: Call) -> dict[str, Any]:
    """The assistant's message as OpenAI writes it: arguments as text, no content beside calls."""
    assert call.answer is not None
    body: dict[str, Any] = {"role": "assistant", "content": call.answer.content}
    if call.answer.tool_calls:
        body["content"] = call.answer.content or None
        body["tool_calls"] = [
            {
                "id": made.id,
                "type": "function",
                "function": {"name": made.name, "arguments": json.dumps(made.arguments)},
            }
            for made in call.answer.tool_calls
        ]
    if call.answer.reasoning:
        body["reasoning_content"] = call.answer.reasoning
    return body


def finish_reason(call: Call) -> str:
    assert call.answer is not None
    return "length" if call.answer.cut else "tool_calls" if call.answer.tool_calls else "stop"


def usage(call: Call) -> dict[str, Any]:
    assert call.completion is not None
    sampled, prompt = len(call.sampled_ids), call.prompt_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": min(prompt, call.completion.cost.reused_tokens)},
    }


def _logprobs(call: Call) -> dict[str, Any]:
    assert call.completion is not None
    pairs = zip(call.completion.token_ids, call.completion.logprobs, strict=True)
    return {"content": [{"token": f"token_id:{t}", "logprob": p, "bytes": None, "top_logprobs": []} for t, p in pairs]}


def completion_stream(call: Call, model: str, request: Request) -> Iterator[str]:
    """The same answer as the chunks of a stream."""
    for chunk in _chunks(call, model, request):
        yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"


def _chunks(call: Call, model: str, request: Request) -> Iterator[dict[str, Any]]:
    head = {"id": f"chatcmpl-{call.call_id}", "object": "chat.completion.chunk", "created": int(time.time())}
    body = answer_body(call)
    delta = {**body, "content": body["content"] or ""}
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": k, **made} for k, made in enumerate(body["tool_calls"])]
    sampled = _logprobs(call) if request.logprobs else None
    for part, reason, scores in ((delta, None, sampled), ({}, finish_reason(call), None)):
        choice = {"index": 0, "delta": part, "finish_reason": reason, "logprobs": scores}
        yield {**head, "model": model, "choices": [choice], **({"usage": None} if request.with_usage else {})}
    if request.with_usage:
        yield {**head, "model": model, "choices": [], "usage": usage(call)}


def response_body(call: Call, model: str, request: Request) -> dict[str, Any]:
    assert call.answer is not None
    use = usage(call)
    cut = call.answer.cut
    return {
        **_head(call, model),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _items(call),
        "usage": {
            "input_tokens": use["prompt_tokens"],
            "input_tokens_details": use["prompt_tokens_details"],
            "output_tokens": use["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": use["total_tokens"],
        },
    }


def _head(call: Call, model: str) -> dict[str, Any]:
    head: dict[str, Any] = {"id": f"resp_{call.call_id}", "object": "response", "created_at": int(time.time())}
    empty = {"error": None, "incomplete_details": None, "instructions": None, "metadata": {}, "output": []}
    asked = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "temperature": None, "top_p": None}
    return {**head, "model": model, "status": "in_progress", **empty, **asked}


def _items(call: Call) -> list[dict[str, Any]]:
    answer, name = call.answer, call.call_id
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
    for i, made in enumerate(answer.tool_calls):
        item = {"type": "function_call", "id": f"fc_{name}_{i}", "call_id": made.id, "name": made.name}
        items.append({**item, "arguments": json.dumps(made.arguments), "status": status})
    return items


def response_stream(call: Call, model: str, request: Request) -> Iterator[str]:
    """The answer as the events of a stream, each item whole."""
    whole_body = response_body(call, model, request)
    head = _head(call, model)
    made = [{"type": f"response.{name}", "response": head} for name in ("created", "in_progress")]
    for index, item in enumerate(whole_body["output"]):
        made += _item_events(item, {"output_index": index, "item_id": item["id"]})
    made.append({"type": f"response.{whole_body['status']}", "response": whole_body})
    for sequence, event in enumerate(made):
        yield f"event: {event['type']}\ndata: {json.dumps({**event, 'sequence_number': sequence})}\n\n"


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


@dataclass(frozen=True)
class Dialect:
    """An API that agents speak: how a request is read, and how its answer is written, as a whole or as a stream. (An
    answer is streamed once it is sampled as a whole: the log must hold it before the agent sees any of it.)"""

    read: Callable[[Mapping[str, Any], Before], Request]
    body: Callable[[Call, str, Request], dict[str, Any]]
    stream: Callable[[Call, str, Request], Iterator[str]]


DIALECTS = {
    "/v1/chat/completions": Dialect(read_chat, completion_body, completion_stream),
    "/v1/responses": Dialect(read_responses, response_body, response_stream),
}
