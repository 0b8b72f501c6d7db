"""Actions that are written as text: the JSON of a Terminus agent, one fenced command, one ReAct action, one call in
tags (OpenHands, SWE-agent), the block that a SWE-agent runs."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Collection
from typing import Any, cast

from turntree.core.messages import Message, ToolCall

THOUGHT = "</think>"
_FENCE = re.compile(r"^```(bash|sh|shell|mswea_bash_command)?[ \t]*(?:\n|\Z)", re.MULTILINE)
_OTHER_VALUE = ("<super>", "<sub>", "<fraction>")  # of compatibility: ten squared is not 102
_BLOCK = re.compile(r"^```(\S*)[ \t]*(?:\n|\Z)", re.MULTILINE)
_LINES = re.compile(
    r"(\w+)\b(.*)\n *end_of_\w+\s*", re.DOTALL
)  # of SWE-agent's editors: text up to a word that ends it
_TAGGED = re.compile(r"<function=([\w.-]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([\w.-]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_REACT = re.compile(r"^Action(?: \d+)?:[ \t]*([A-Za-z_]\w*)\[(.*)\][ \t]*$", re.MULTILINE)
TERMINUS = "terminus"
# of Terminus 1 and 2: the texts that do not act, the claim to be done, what a command needs and what it may have
_FORMS: tuple[tuple[tuple[str, str], str, bool, dict[str, tuple[type, ...]]], ...] = (
    (("state_analysis", "explanation"), "is_task_complete", True,
     {"keystrokes": (str,), "is_blocking": (bool,), "timeout_sec": (int, float)}),
    (("analysis", "plan"), "task_complete", False, {"duration": (int, float), "keystrokes": (str,)}),
)  # fmt: skip


def said(message: Message) -> str:
    """The text after the thinking."""
    return message.content.rpartition(THOUGHT)[2].strip()


def plain(text: str) -> str:
    """Text without case, spacing and typographic variants."""
    kept = text if text.isascii() else "".join(map(_compatible, text))
    text = unicodedata.normalize("NFC", kept).translate({0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"'})
    return " ".join(text.casefold().split())


def _compatible(character: str) -> str:
    other = unicodedata.decomposition(character).startswith(_OTHER_VALUE)
    return character if other else unicodedata.normalize("NFKC", character)


def shell_fences(text: str) -> list[str]:
    """The texts of fenced shell commands. A fence that is not closed counts as none."""
    found: list[str] = []
    start = None
    for fence in _FENCE.finditer(text):
        if start is None:
            start = fence.end() if fence[1] else None
        elif not fence[1]:
            found.append(text[start : fence.start()])
            start = None
    return found


def last_block(text: str) -> str | None:
    """The last closed block that is in no other, whatever language it names; None without one."""
    opened, found = list[int](), None
    for fence in _BLOCK.finditer(text):
        if opened and not fence[1]:
            start = opened.pop()
            found = found if opened else text[start : fence.start()]
        else:
            opened.append(fence.end())
    return found


def _run_by_swe_agent(text: str) -> ToolCall | None:
    """What a SWE-agent runs: what stands in `<command>` at the end, else the last block; None without either. Agents
    that are told of one form do not read the other, so these are two tools. The text of an editor is no shell's: in it
    every space counts."""
    at_end = text.endswith("</command>") and "<command>" in text
    name = "run_command" if at_end else "bash"
    command = text.rpartition("<command>")[2].removesuffix("</command>") if at_end else last_block(text)
    if command is None:
        return None
    lines = _LINES.fullmatch(command.strip())
    return ToolCall(name, {"command": command} if lines is None else {"editor": lines[1], "lines": lines[2]})


def calls_in(message: Message, *, written: bool = True, blocks: bool = False) -> tuple[ToolCall, ...] | None:
    """The calls of a message: declared ones, or those that its text writes in one of the known forms. None where it
    acts in none of them. A Terminus answer is one call `terminus`, without the texts that do not act. `written`:
    text may act; where tools are declared, a fenced command is something that a message shows. `blocks`: the last
    block is a command, or what stands in `<command>`, as for a SWE-agent, and not only a block that says it is one."""
    if message.tool_calls:
        return message.tool_calls
    text = said(message)
    terminus = terminus_in(text)
    if terminus is not None:
        return (ToolCall(TERMINUS, terminus),)
    if not written:
        return None
    tagged = _tagged(text)
    if tagged is not None:
        return (tagged,)
    if blocks:
        command = _run_by_swe_agent(text)
        return None if command is None else (command,)
    fenced, react = shell_fences(text), _REACT.findall(text)
    if len(fenced) == 1:
        return (ToolCall("bash", {"command": fenced[0]}),)
    if len(react) == 1:
        return (ToolCall(react[0][0].lower(), {"query": react[0][1]}),)
    return None


def _tagged(text: str) -> ToolCall | None:
    """`<function=NAME><parameter=KEY>VALUE</parameter></function>`, where it is the only one. Values stay text."""
    found = _TAGGED.findall(text[: text.rfind("</function>") + len("</function>")])  # every opening one has its end
    if len(found) != 1:
        return None
    name, body = found[0]
    head, end, tail = body.rpartition("</parameter>")
    told = _PARAMETER.findall(head + end)
    if _PARAMETER.sub("", head + end).strip() or tail.strip() or len(dict(told)) < len(told):
        return None
    return ToolCall(name, dict(told))


def terminus_in(text: str) -> dict[str, Any] | None:
    """`{"keys": all keystrokes, "done": whether it claims to be done, "form": of Terminus 1 or 2}` of a valid answer;
    None for anything else. A fence around the JSON is taken off, as the agent does."""
    fence = re.fullmatch(r"```(?:json)?\s*\n(.*)\n```", text, re.DOTALL)
    try:
        row = json.loads(fence[1] if fence else text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    answer = cast("dict[str, Any]", row)
    for texts, flag, strict, keys in _FORMS:
        if all(isinstance(answer.get(name), str) for name in texts):
            fits = answer.keys() <= {*texts, flag, "commands"} and isinstance(answer.get(flag, strict and None), bool)
            if not fits or not isinstance(answer.get("commands"), list):
                return None
            needed = keys.keys() if strict else {"keystrokes"}
            if not all(_is_command(command, keys, needed) for command in answer["commands"]):
                return None
            keystrokes = "".join(command["keystrokes"] for command in answer["commands"])
            return {"keys": keystrokes, "done": answer.get(flag, False), "form": flag}
    return None


def _is_command(value: Any, keys: dict[str, tuple[type, ...]], needed: Collection[str]) -> bool:
    if not isinstance(value, dict) or not set(needed) <= value.keys() <= keys.keys():
        return False
    return all(
        isinstance(item, keys[key]) and isinstance(item, bool) == (keys[key] == (bool,))
        for key, item in cast("dict[str, Any]", value).items()
    )
