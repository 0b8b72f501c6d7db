"""Chat messages and tool calls, in the field's standard shape (`role`, `content`, `tool_calls`, ...)."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from turntree.core.errors import InputError

THOUGHT = "</think>"  # what ends the thinking, where it stands in the content
Role = Literal["system", "user", "assistant", "tool"]
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # what chat templates and servers call it
ROLES: tuple[str, ...] = ("system", "user", "assistant", "tool")
_OTHER_ROLES = {
    "human": "user", "ai": "assistant", "bot": "assistant", "gpt": "assistant", "model": "assistant",
    "function": "tool", "tool-response": "tool", "tool_response": "tool", "observation": "tool",
}  # fmt: skip
_TEXT_PARTS = (None, "text", "input_text", "output_text")
_THOUGHT_PARTS = ("reasoning", "thinking", "reasoning_text", "summary_text")
_CALL_KEYS, _FUNCTION_KEYS = ("id", "type", "index", "function"), ("name", "arguments")
# what servers write beside the words: marks of their caches, sources, signatures
_BESIDE = ("cache_control", "cache_prompt", "prompt_cache_breakpoint", "annotations", "logprobs", "citations",
           "signature", "extra_content", "parsed_arguments", "provider_specific_fields")  # fmt: skip
_CALL_HINT = "each call is {id?, type?, function: {name, arguments}}"
_SHAPES = (("text", "each part is {type: 'text', text}"), ("arguments", _CALL_HINT))


def as_object(value: Any) -> dict[str, Any]:
    """A value of JSON that may be anything, where it is an object; else an empty one."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


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
    def from_chat(cls, chat: Any, ignored: Counter[str] | None = None, *, strict: bool = True) -> Message:
        """Parse one chat message; arguments may be an object or its JSON text. Raises `InputError` naming the field.

        What is unknown inside a call or a part of the content is refused, or (not `strict`) counted in `ignored`, but
        for one that may hold what its place lacks: a call without arguments, a part without text.
        """
        if not isinstance(chat, dict):
            raise InputError("is not an object", field="messages", hint="each message is {role, content, ...}")
        row = cast("dict[str, Any]", chat)
        role = "system" if row.get("role") == "developer" else row.get("role")
        if role not in ROLES:
            other = _OTHER_ROLES.get(str(role))
            hint = f"write {other!r} for it" if other else f"use one of {', '.join(ROLES)}"
            raise InputError("is missing" if role is None else f"unknown role {role!r}", field="role", hint=hint)
        calls: Any = row.get("tool_calls") or []
        if not isinstance(calls, list):
            raise InputError("is not a list", field="tool_calls")
        reading = _Reading(Counter() if ignored is None else ignored, strict)
        content, thought = reading.words(row.get("content"), "content", thinks=role == "assistant")
        made = tuple(reading.call(call) for call in cast("list[Any]", calls))
        names = {key: row.get(key) for key in ("tool_call_id", "name")}
        for key, value in (names | {f"tool_calls[{i}].id": call.id for i, call in enumerate(made)}).items():
            if not isinstance(value, str | None):
                raise InputError(f"is {type(value).__name__}, not text", field=key, hint="quote it")
        return cls(
            role=cast(Role, role),
            content=content,
            tool_calls=made,
            **names,
            cut=row.get("cut") is True,
            reasoning="\n".join(dict.fromkeys(filter(None, (reading.reasoning(row), thought)))),
        )


def answer_text(message: Message) -> str:
    """The text after the thinking, which only an assistant does, and once: the mark of its end is text where the
    thought was taken out (`reasoning`), and behind the first mark."""
    thinks = THOUGHT in message.content and message.role == "assistant" and not message.reasoning
    return (message.content.partition(THOUGHT)[2] if thinks else message.content).strip()


def action_kind(action: Message) -> str:
    """What an action does, for quotas and drift tracking: the tools it calls, or "message"."""
    if len(action.tool_calls) == 1:
        return action.tool_calls[0].name
    return "+".join(sorted({call.name for call in action.tool_calls})) or "message"


def whole_characters(text: str) -> str:
    """The text in valid UTF-8: a lone surrogate, which a model can write as an escape and a tool can repeat, becomes
    the replacement character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def joined_text(content: Any, ignored: Counter[str]) -> Any:
    """The text of a list of text parts; other content as it is, to be refused or read by `Message.from_chat`."""
    if not isinstance(content, list):
        return content
    found: Counter[str] = Counter()
    try:
        text, thought = _Reading(found, strict=False).words(cast("list[Any]", content), "content", thinks=True)
    except InputError:
        return cast("list[Any]", content)
    if thought:
        return cast("list[Any]", content)
    ignored += found
    return text


@dataclass(frozen=True)
class _Reading:
    """How one message is read: what is unknown is refused, or counted."""

    ignored: Counter[str]
    strict: bool

    def unknown(self, row: Mapping[str, Any], known: Collection[str], inside: str, lacks: bool) -> None:
        """`lacks`: the place that is read is empty, so that what is unknown may be what belongs there."""
        for key, value in row.items():
            if key in known or value is None:
                continue
            # a client's SDK repeats the arguments as it parsed them, which is beside them only where there are any
            beside = key in _BESIDE and not (lacks and value and key == "parsed_arguments")
            if not beside and (self.strict or lacks):
                lacked, hint = _SHAPES[inside == "tool_calls"]
                problem = f"unknown key, and no {lacked}" if lacks else "unknown key"
                raise InputError(problem, field=f"{inside}.{key}", hint=hint)
            if value not in ([], {}, ""):
                self.ignored[f"{'' if beside else 'unknown key '}{inside}[].{key}"] += 1

    def words(self, content: Any, field: str, *, thinks: bool) -> tuple[str, str]:
        """Text and thoughts of a content. `None` is empty; parts are read by their type, and what is neither text nor
        (where the message `thinks`) a thought is refused, not dropped."""
        if content is None or isinstance(content, str):
            return content or "", ""
        if not isinstance(content, list):
            raise InputError("is neither text nor null", field=field)
        texts: list[str] = []
        thoughts: list[str] = []
        for part in cast("list[Any]", content):
            row = as_object(part)
            kind: Any = row.get("type")
            thought = thinks and kind in _THOUGHT_PARTS
            key = str(kind) if thought and "text" not in row else "text"
            text = row.get(key)
            if not (thought or kind in _TEXT_PARTS) or not isinstance(text, str):
                what = f"of type {kind!r}" if kind else repr(cast("object", part))[:50]
                hint = "only text is supported"
                if kind in ("tool_use", "tool_result"):
                    hint = (
                        "Anthropic's messages are not read: write calls as tool_calls, results as messages of role tool"
                    )
                raise InputError(f"holds a part {what} that is not text", field=field, hint=hint)
            self.unknown(row, ("type", key), field, lacks=not text)
            (thoughts if thought else texts).append(text)
        return "".join(texts), "\n".join(thoughts)

    def reasoning(self, row: dict[str, Any]) -> str:
        key = next((key for key in REASONING_KEYS if row.get(key)), None)
        return "" if key is None else "\n".join(filter(None, self.words(row[key], key, thinks=True)))

    def call(self, call: Any) -> ToolCall:
        row = as_object(call)
        nested = row.get("function") is not None
        function: Any = row["function"] if nested else row
        if row.get("type") not in (None, "", "function", "tool_call", "function_call"):
            raise InputError(f"holds a call of type {row['type']!r}", field="tool_calls", hint=_CALL_HINT)
        if not isinstance(function, dict) or not isinstance(cast("dict[str, Any]", function).get("name"), str):
            raise InputError("has no function name", field="tool_calls", hint=_CALL_HINT)
        body = cast("dict[str, Any]", function)
        arguments = read_arguments(body["name"], body.get("arguments"))
        known = () if nested else _FUNCTION_KEYS
        self.unknown(row, (*_CALL_KEYS, *known), "tool_calls", lacks=not arguments)
        self.unknown(body if nested else {}, _FUNCTION_KEYS, "tool_calls", lacks=not arguments)
        return ToolCall(name=body["name"], arguments=arguments, id=row.get("id"))


def read_arguments(name: str, arguments: Any) -> dict[str, Any]:
    """The arguments of a call to `name`: an object, or its JSON text; absent and null are empty. Raises `InputError`
    for what is not JSON, says a key twice, or is JSON text of JSON text."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(
                arguments or "{}",
                parse_constant=finite_number,
                parse_float=finite_number,
                object_pairs_hook=each_key_once,
            )
        except (ValueError, RecursionError) as error:  # not JSON, a number of thousands of digits, endless nesting
            at = f"{error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else str(error)
            problem = f"the arguments of {name!r} are not JSON ({at})"
            raise InputError(problem, field="tool_calls.arguments") from error
        if isinstance(arguments, str):
            problem = f"the arguments of {name!r} are JSON text inside JSON text"
            raise InputError(problem, field="tool_calls.arguments", hint="encode them once")
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise InputError(f"the arguments of {name!r} are not an object", field="tool_calls.arguments")
    return cast("dict[str, Any]", arguments)


def each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads`, which lets the last of equal keys win. Raises `ValueError`."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice[:100]!r} stands in one object twice")
    return found


def finite_number(text: str) -> float:
    """For `json.loads`: NaN, infinity and 1e999 are not JSON, and what holds them could not be written again. Raises
    `ValueError`."""
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is not a JSON number")
    return value
