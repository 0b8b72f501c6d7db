"""Tool calls in sampled text. An invalid call stays text: a policy's mistake is data, never an exception."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
from typing import Any, Literal, cast

from turntree.core.errors import InputError
from turntree.core.messages import Message, ToolCall, each_key_once, finite_number
from turntree.run.jsonl import depth

ToolFormat = Literal["hermes", "json", "pythonic", "tags", "react", "none"]
"""hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, several for parallel calls (Qwen, Hermes).
json: the whole turn is one object {"name": ..., "arguments" or "parameters": {...}} (Llama 3).
pythonic: `<|tool_call_start|>[name(key='value'), ...]<|tool_call_end|>` (LFM2). none: text only.
tags: a turn that ends with `<search>query</search>` or `<python>code</python>`; results are the user's, between
`<result>` and `</result>` (Tool-Star, ARPO). react: the first line `Action: COMMAND`, a call of `act`, after a thought.
Declarations of tools are not written in these two; the task's instructions say what there is."""

IN_TEXT: tuple[ToolFormat, ...] = ("tags", "react")  # no chat template writes these: `in_text` does
TAGS = {"search": "query", "python": "code"}  # the one argument of each
ACT = "act"

_DEEPEST = 50  # levels of nesting: what is logged of a deeper call could not be read again (`jsonl.DEEPEST`)
_JSON_NAMES = {"null": None, "true": True, "false": False}
_TAGGED = re.compile(r"(.*?)<(search|python)>((?:(?!</?(?:search|python)>).)*)</\2>\s*", re.DOTALL)
_ACTION = re.compile(r"(.*?)^Action:[ \t]*([^\n]*\S)[^\n]*", re.DOTALL | re.MULTILINE)
_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def detect_format(template: str) -> ToolFormat:
    """The format that a chat template (its source text) renders."""
    if "<|tool_call_start|>" in template:
        return "pythonic"
    if "<tool_call>" in template:
        return "hermes"
    return "json" if "tool_calls" in template else "none"


def parse_message(text: str, tool_format: ToolFormat) -> Message:
    """The assistant message in the text of one sampled turn (without its stop token).

    A turn in which one call is broken is text as a whole: half of its calls must not be executed.
    """
    if tool_format == "hermes":
        return _parse_hermes(text)
    if tool_format == "tags":
        tagged = _TAGGED.fullmatch(text)
        return Message("assistant", text) if tagged is None else _calls_one(tagged[1], tagged[2], tagged[3])
    if tool_format == "react":
        acted = _ACTION.match(text)
        return Message("assistant", text) if acted is None else _calls_one(acted[1], ACT, acted[2].strip())
    if tool_format == "pythonic":
        return _parse_pythonic(text)
    if tool_format == "json":
        call = _parse_call(text)
        return Message("assistant", text) if call is None else Message("assistant", "", (call,))
    return Message("assistant", text)


def _calls_one(content: str, name: str, value: str) -> Message:
    return Message("assistant", content, (ToolCall(name, {TAGS.get(name, "command"): value}),))


def in_text(message: Message, tool_format: ToolFormat) -> Message:
    """The message in the format's own words, as the messages of a chat template without tools. Raises `InputError` for
    calls that the format has no words for."""
    tags = tool_format == "tags"
    if message.role == "tool":
        return Message("user", f"<result>\n{message.content}\n</result>" if tags else message.content)
    if not message.tool_calls:
        return message
    call, *more = message.tool_calls
    argument = TAGS.get(call.name) if tags else "command" if call.name == ACT else None
    if more or argument is None or [*call.arguments] != [argument]:
        hint = f"one call a turn, of {' or '.join(TAGS) if tags else ACT} with one argument"
        raise InputError(
            f"a turn that calls {call.name!r} cannot be written as {tool_format}", field="tool_calls", hint=hint
        )
    value = call.arguments[argument]
    said = f"<{call.name}>{value}</{call.name}>" if tags else f"Action: {value}"
    line = "" if tags or not message.content or message.content.endswith("\n") else "\n"
    return replace(message, content=message.content + line + said, tool_calls=())


_OPENED = {"hermes": "<tool_call>", "pythonic": "<|tool_call_start|>"}


def settled(text: str, tool_format: ToolFormat) -> str:
    """The beginning of an unfinished turn that stays the beginning of its content, whatever follows: what comes before
    anything that may become a call."""
    if tool_format in IN_TEXT:
        return ""
    if tool_format == "json":
        return "" if not text.strip() or text.lstrip().startswith("{") else text
    if (opened := _OPENED.get(tool_format)) is None:
        return text
    text, begun, _ = text.partition(opened)  # where one has begun, nothing before it is the beginning of another
    longest = 0 if begun else min(len(opened), len(text))
    held = next((k for k in range(longest, 0, -1) if opened.startswith(text[-k:])), 0)
    before = text[: len(text) - held].rstrip("\n")  # line breaks before a call are left out
    return "" if before.startswith("\n") or not before.strip() else before


def _parse_hermes(text: str) -> Message:
    parts = _BLOCK.split(text)  # text, call, text, call, ..., text
    calls = [_parse_call(part) for part in parts[1::2]]
    around = [part.strip("\n") for part in parts[0::2]]
    if not calls or None in calls or any("<tool_call>" in part or "</tool_call>" in part for part in around):
        return Message("assistant", text)
    content = "\n".join(part for part in around if part.strip())
    return Message("assistant", content, tuple(cast("list[ToolCall]", calls)))


def _parse_pythonic(text: str) -> Message:
    before, opened, rest = text.partition("<|tool_call_start|>")
    inside, closed, after = rest.rpartition("<|tool_call_end|>")
    calls = _python_calls(inside) if opened and closed else None
    if not calls or "<|tool_call_start|>" in inside:
        return Message("assistant", text)
    content = "\n".join(part for part in (before, after) if part.strip())
    return Message("assistant", content, tuple(calls))


def _python_calls(text: str) -> list[ToolCall] | None:
    """The calls in a list of calls with literal keyword arguments; None for anything else. Nothing is evaluated."""
    try:
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except SyntaxError:  # texts may hold raw line breaks; one behind a backslash is no text to Python
            tree = ast.parse(re.sub(r"(?<!\\)\n", r"\\n", text.strip()), mode="eval").body
        if not isinstance(tree, ast.List):
            return None
        calls = [_python_call(node) for node in tree.elts]
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    return calls if all(can_be_logged(call.arguments) for call in calls) else None


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("a call has a name and keyword arguments")
    arguments = {keyword.arg: _literal(keyword.value) for keyword in node.keywords if keyword.arg is not None}
    if len(arguments) != len(node.keywords):
        raise ValueError("** is not an argument")
    return ToolCall(ast.unparse(node.func), arguments)


def _literal(node: ast.expr) -> Any:
    """A literal of Python, or of JSON: null, true and false are names to Python."""
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    if isinstance(node, ast.List):
        return [_literal(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {_key(key): _literal(value) for key, value in pairs}
    return ast.literal_eval(node)


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("a key of an object must be text")


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
        value = json.loads(text, parse_constant=finite_number, object_pairs_hook=each_key_once)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) and can_be_logged(value) else None


def can_be_logged(arguments: Any) -> bool:
    """Whether a call's arguments can be rendered, and read from a log, again: they are JSON without half a surrogate
    pair or a number too large (infinity), and not nested too deeply."""
    try:
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError):
        return False
    return depth(arguments) <= _DEEPEST
