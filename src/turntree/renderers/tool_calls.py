"""Tool calls in sampled text. What is no valid call stays text: a policy's mistake is data, never an exception."""

from __future__ import annotations

import json
import re
from typing import Any, Literal, NoReturn, cast

from turntree.core.messages import Message, ToolCall

ToolFormat = Literal["hermes", "json", "none"]
"""hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, several for parallel calls (Qwen, Hermes).
json: the whole turn is one object {"name": ..., "arguments" or "parameters": {...}} (Llama 3). none: text only."""

_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def detect_format(template: str) -> ToolFormat:
    """The format that a chat template (its source text) renders."""
    if "<tool_call>" in template:
        return "hermes"
    return "json" if "tool_calls" in template else "none"


def parse_message(text: str, tool_format: ToolFormat) -> Message:
    """The assistant message in the text of one sampled turn (without its stop token).

    A turn in which one call is broken is text as a whole: half of its calls must not be executed.
    """
    if tool_format == "hermes":
        return _parse_hermes(text)
    if tool_format == "json":
        call = _parse_call(text)
        return Message("assistant", text) if call is None else Message("assistant", "", (call,))
    return Message("assistant", text)


def _parse_hermes(text: str) -> Message:
    parts = _BLOCK.split(text)  # text, call, text, call, ..., text
    calls = [_parse_call(part) for part in parts[1::2]]
    around = [part.strip("\n") for part in parts[0::2]]
    if not calls or any(call is None for call in calls) or any("<tool_call>" in part for part in around):
        return Message("assistant", text)
    content = "\n".join(part for part in around if part.strip())
    return Message("assistant", content, tuple(cast("list[ToolCall]", calls)))


def _parse_call(text: str) -> ToolCall | None:
    value = _parse_object(text)
    if value is None or not isinstance(value.get("name"), str):
        return None
    given = [value[key] for key in ("arguments", "parameters") if key in value]
    if len(given) != 1:
        return None
    arguments: Any = _parse_object(given[0]) if isinstance(given[0], str) else given[0]
    if not isinstance(arguments, dict):
        return None
    return ToolCall(value["name"], cast("dict[str, Any]", arguments))


def _parse_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text, parse_constant=_refuse)
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair could never be rendered again
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
