"""Chat messages and tool calls, in the field's standard shape (`role`, `content`, `tool_calls`, ...)."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from turntree.core.errors import InputError

Role = Literal["system", "user", "assistant", "tool"]
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # what chat templates and servers call it
ROLES: tuple[str, ...] = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class ToolCall:
    """One call of a declared tool. `arguments` is the parsed JSON object."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


@dataclass(frozen=True)
class Message:
    """One chat message. `reasoning` is the assistant's reasoning, where its model keeps it apart from the content.
    `cut`: the token limit ended this sampled turn, not the policy."""

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    cut: bool = False
    reasoning: str = ""

    def to_chat(self) -> dict[str, Any]:
        """The mapping that chat templates and JSONL files use; absent fields are left out."""
        chat: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning:
            chat["reasoning_content"] = self.reasoning
        if self.tool_calls:
            chat["tool_calls"] = [
                {
                    "type": "function",
                    **({"id": call.id} if call.id is not None else {}),
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            chat["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            chat["name"] = self.name
        if self.cut:
            chat["cut"] = True
        return chat

    def in_whole_characters(self) -> Message:
        """The message as a policy is shown it, and as a file can hold it (`whole_characters`)."""
        return self if self.content.isascii() else replace(self, content=whole_characters(self.content))

    @classmethod
    def from_chat(cls, chat: Any) -> Message:
        """Parse one chat message; arguments may be an object or its JSON text. Raises `InputError` naming the field."""
        if not isinstance(chat, dict):
            raise InputError("is not an object", field="messages", hint="each message is {role, content, ...}")
        row = cast("dict[str, Any]", chat)
        role = row.get("role")
        if role not in ROLES:
            raise InputError(f"unknown role {role!r}", field="role", hint=f"use one of {', '.join(ROLES)}")
        calls: Any = row.get("tool_calls") or []
        if not isinstance(calls, list):
            raise InputError("is not a list", field="tool_calls")
        return cls(
            role=cast(Role, role),
            content=_text(row.get("content")),
            tool_calls=tuple(_tool_call(call) for call in cast("list[Any]", calls)),
            tool_call_id=row.get("tool_call_id"),
            name=row.get("name"),
            cut=row.get("cut") is True,
            reasoning=_reasoning(row),
        )


def whole_characters(text: str) -> str:
    """The text in valid UTF-8: a lone surrogate, which a model can write as an escape and a tool can repeat, becomes
    the replacement character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _text(content: Any) -> str:
    """`None` is empty; a list of text parts is joined; anything else (images, ...) is refused, not dropped."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts: list[str] = []
        for part in cast("list[Any]", content):
            if not isinstance(part, dict) or not isinstance(cast("dict[str, Any]", part).get("text"), str):
                raise InputError("holds a part that is not text", field="content", hint="only text is supported")
            parts.append(cast("dict[str, str]", part)["text"])
        return "".join(parts)
    raise InputError("is neither text nor null", field="content")


def _reasoning(row: dict[str, Any]) -> str:
    key = next((key for key in REASONING_KEYS if row.get(key)), None)
    if key is None:
        return ""
    try:
        return _text(row[key])
    except InputError as error:
        raise InputError(error.problem, field=key, hint=error.hint) from error


def _tool_call(call: Any) -> ToolCall:
    row = cast("dict[str, Any]", call) if isinstance(call, dict) else {}
    function: Any = row.get("function", row)
    if not isinstance(function, dict) or not isinstance(cast("dict[str, Any]", function).get("name"), str):
        raise InputError("has no function name", field="tool_calls", hint="each call is {function: {name, arguments}}")
    body = cast("dict[str, Any]", function)
    arguments: Any = body.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}", parse_constant=_number, parse_float=_number)
        except (ValueError, RecursionError) as error:  # not JSON, a number of thousands of digits, endless nesting
            at = f"{error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else str(error)
            problem = f"the arguments of {body['name']!r} are not JSON ({at})"
            raise InputError(problem, field="tool_calls.arguments") from error
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise InputError(f"the arguments of {body['name']!r} are not an object", field="tool_calls.arguments")
    return ToolCall(name=body["name"], arguments=cast("dict[str, Any]", arguments), id=row.get("id"))


def _number(text: str) -> float:
    """NaN, infinity and 1e999 are not JSON: what holds them could not be written again."""
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is not a JSON number")
    return value
