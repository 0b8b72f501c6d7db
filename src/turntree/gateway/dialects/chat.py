"""OpenAI's chat completions."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from turntree.core.config import Positive, converted
from turntree.core.errors import InputError
from turntree.core.messages import REASONING_KEYS, Message, as_object
from turntree.gateway.calls import Call
from turntree.gateway.config import Refused
from turntree.gateway.dialects import common
from turntree.gateway.dialects.common import Before, Body, Dialect, Fields, Stream
from turntree.gateway.sampling import Ask

_MESSAGE_KEYS = frozenset({"role", "content", "tool_calls", "tool_call_id", "name", "cut", *REASONING_KEYS})
FIELDS = Fields(
    read={
        "messages": list[Any], "tools": list[Any], "tool_choice": str | dict[str, Any], "max_tokens": Positive,
        "max_completion_tokens": Positive, "stream": bool, "stream_options": dict[str, Any], "logprobs": bool,
        "response_format": dict[str, Any], "seed": int, "stop": str | list[Any], **common.SAMPLED,
    },
    recorded=common.RECORDED | {"seed", "stop", "reasoning_effort", "verbosity"},
    nothing=common.NOTHING,
    neutral={
        "frequency_penalty": (0, 0.0), "presence_penalty": (0, 0.0), "repetition_penalty": (1, 1.0),
        "logit_bias": ({},), "top_k": (0, -1), "min_p": (0, 0.0), "top_logprobs": (0,),
        "n": (1,), "functions": ([],), "function_call": ("none", "auto"), "modalities": (["text"],),
    },
)  # fmt: skip


def read(body: Body, before: Before) -> Ask:
    """Raises `InputError` or `Refused` naming the field."""
    given = FIELDS.of(body)
    if not given["messages"]:
        raise InputError("is not a list of messages", field="messages", hint="give at least one")
    rows = common.bounded(given["messages"], "messages")
    messages = tuple(common.read_message(row, f"messages[{i}]") for i, row in enumerate(rows))
    tools, schema = common.read_tools(given["tools"] or []), given["response_format"]
    read_schema = common.read_schema(schema, "response_format", "json_schema")
    tools, form = common.form_of(choice_of(given["tool_choice"]), tools, read_schema)
    # keys that nothing reads (`cache_control`, an agent's own) are recorded with the call
    names = sorted({str(name)[:80] for row in rows for name, value in row.items() if value} - _MESSAGE_KEYS)
    with_usage = converted(bool | None, (given["stream_options"] or {}).get("include_usage"), field="include_usage")
    return Ask(
        messages=messages,
        tools=tools,
        max_tokens=given["max_completion_tokens"] or given["max_tokens"],
        seed=given["seed"],
        stop=common.read_stops(given["stop"], "stop"),
        form=form,
        logprobs=given["logprobs"] is True,
        stream=given["stream"] is True,
        with_usage=with_usage is True,
        meta=given["meta"] | ({"message_keys": names[:20]} if names else {}),
    )


def choice_of(choice: str | dict[str, Any] | None) -> str:
    """OpenAI's choice of tools as `form_of` takes it; some clients write a word as an object."""
    row = choice if isinstance(choice, dict) else {"type": choice or "auto"}
    name = as_object(row.get("function")).get("name", row.get("name"))
    if row.get("type") == "function" and isinstance(name, str):
        return f":{name}"
    words = {"auto": "auto", "none": "none", "required": "any", "any": "any"}
    word = row.get("type")
    if row.keys() != {"type"} or not isinstance(word, str) or word not in words:
        hint = "use auto, none, required, or {type: function, function: {name}}"
        raise InputError("is no choice of tools", field="tool_choice", hint=hint)
    return words[word]


def body(call: Call, model: str, ask: Ask) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{call.call_id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": answer_body(call),
                "finish_reason": common.finish_reason(call),
                "logprobs": _logprobs(call) if ask.logprobs else None,
            }
        ],
        "usage": common.usage(call),
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


def _logprobs(call: Call) -> dict[str, Any]:
    assert call.completion is not None
    pairs = zip(call.completion.token_ids, call.completion.logprobs, strict=True)
    return {"content": [{"token": f"token_id:{t}", "logprob": p, "bytes": None, "top_logprobs": []} for t, p in pairs]}


class ChatStream(Stream):
    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> str:
        head = {"id": f"chatcmpl-{self.name}", "object": "chat.completion.chunk", "created": int(time.time())}
        none = {"usage": None} if self.ask.with_usage else {}
        return f"data: {json.dumps({**head, 'model': self.model, 'choices': choices, **none, **more})}\n\n"

    def _delta(self, delta: dict[str, Any], reason: str | None = None, scores: Any = None) -> str:
        return self._chunk([{"index": 0, "delta": delta, "finish_reason": reason, "logprobs": scores}])

    def said(self, message: Message) -> Iterator[str]:
        yield self._delta(self._new_of(message))

    def _new_of(self, message: Message) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": self.new(message)}
        if not self.begun:
            self.begun = True
            delta = {"role": "assistant", **delta}
            delta |= {"reasoning_content": message.reasoning} if message.reasoning else {}
        return delta

    def ended(self, call: Call) -> Iterator[str]:
        assert call.answer is not None
        delta = self._new_of(call.answer)
        if call.answer.tool_calls:
            delta["tool_calls"] = [{"index": k, **made} for k, made in enumerate(answer_body(call)["tool_calls"])]
        yield self._delta(delta, None, _logprobs(call) if self.ask.logprobs else None)
        yield self._delta({}, common.finish_reason(call))
        if self.ask.with_usage:
            yield self._chunk([], usage=common.usage(call))
        yield "data: [DONE]\n\n"

    def failed(self, error: Refused) -> Iterator[str]:
        yield f"data: {json.dumps(error.body)}\n\n"


DIALECT = Dialect(read, body, ChatStream)
