"""Actions that are written as text: the JSON of a Terminus agent, one fenced command, one ReAct action, one call in
tags (OpenHands, SWE-agent), the block that a SWE-agent runs."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Collection
from typing import Any, cast

from turntree.core.messages import Message, ToolCall, answer_text
from turntree.core.protocols import TurnState
from turntree.verify.kinds import COMMAND, PATH, QUERY, TEXTS, URL

_CODE = re.compile(r"```|~~~|<code|[{}]")
_FENCE = re.compile(r"^```(bash|sh|shell|mswea_bash_command)?[ \t]*(?:\n|\Z)", re.MULTILINE)
_OTHER_VALUE = ("<super>", "<sub>", "<fraction>")  # of compatibility: ten squared is not 102
_BLOCK = re.compile(r"^```(\S*)[ \t]*\r?(?:\n|\Z)", re.MULTILINE)
_EDITOR = re.compile(r"\A\s*(?:edit|insert|append)\b|^\s*end_of_\w+", re.MULTILINE)  # of SWE-agent's own commands
_TAGGED = re.compile(r"<function=([\w.-]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([\w.-]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_NUMBER = r"-?(?:0|[1-9]\d{0,8})"
_VALUE = re.compile(rf"true|false|{_NUMBER}|\[\s*{_NUMBER}\s*,\s*{_NUMBER}\s*\]")  # a flag, a number, a range of lines
_TEXTS = frozenset({*COMMAND, *TEXTS, *QUERY, *URL, *PATH})
_REACT = re.compile(r"^Action(?: \d+)?:[ \t]*([A-Za-z_]\w*)\[(.*)\][ \t]*$", re.MULTILINE)
TERMINUS = "(terminus)"  # no tool has such a name
_KEY = re.compile(  # keystrokes that are the name of a key for tmux, and not what is typed
    r"(?:[CMS]-)+\S+|\^\S|F\d\d?|Enter|Escape|B?Tab|B?Space|Up|Down|Left|Right|Home|End|Page(?:Up|Down)|Pg(?:Up|Dn)"
    r"|[PN]Page|Insert|Delete|IC|DC",
    re.IGNORECASE,
)
# of Terminus 1 and 2: the texts that do not act, the claim to be done, what a command needs and what it may have
_FORMS: tuple[tuple[tuple[str, str], str, bool, dict[str, tuple[type, ...]]], ...] = (
    (("state_analysis", "explanation"), "is_task_complete", True,
     {"keystrokes": (str,), "is_blocking": (bool,), "timeout_sec": (int, float)}),
    (("analysis", "plan"), "task_complete", False, {"duration": (int, float), "keystrokes": (str,)}),
)  # fmt: skip


def plain(text: str) -> str:
    """Text without case, spacing and typographic variants."""
    kept = text if text.isascii() else "".join(map(_compatible, text))
    text = unicodedata.normalize("NFC", kept).translate({0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"'})
    return " ".join(text.casefold().split())


def same_text(one: str, other: str) -> bool:
    """By `plain`; what may hold code (a fence, a tag, braces) as it is written, but for spaces at the ends of lines."""
    if not _CODE.search(one + other):
        return plain(one) == plain(other)
    return [line.rstrip() for line in one.strip().splitlines()] == [
        line.rstrip() for line in other.strip().splitlines()
    ]


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


Form = Callable[[str], ToolCall | None]
"""How an agent writes its actions: reads one, None for a text in another form, which is no action of this agent."""


def form_of(state: TurnState, domain: str) -> Form | None:
    """The form of a demonstration that is text, by its marks. None for words, for declared calls, and where tools are
    declared: there a fenced command is something that a message shows. A text that has the marks and cannot be read
    (its end was cut, it calls twice) is no words either. With the `domain` "swe" the last block is a command, or what
    stands in `<command>`, as for a SWE-agent, and not only a block that says it is one; with "terminal" a text in no
    other form is one, all of it."""
    shown = state.demonstration
    return None if shown.tool_calls or state.tools else _marked(answer_text(shown), domain)


def _marked(text: str, domain: str) -> Form | None:
    if text.endswith("</function>"):
        return _tagged
    if domain == "swe" and not text.endswith("```") and "<command>" in text:
        return _in_command
    if domain == "swe" and last_block(text) is not None:
        return _in_last_block
    if len(shell_fences(text)) == 1:
        return _in_fence
    if len(_REACT.findall(text)) == 1:
        return _reacts
    if "<function=" in text:
        return _tagged
    return _all_of_it if domain == "terminal" and text else None


def calls_in(message: Message, form: Form | None) -> tuple[ToolCall, ...] | None:
    """The calls of a message: declared ones, or what its text writes in the form of the demonstration. None where it
    acts in no such form. A Terminus answer is one call `TERMINUS`, without the texts that do not act."""
    if message.tool_calls:
        return message.tool_calls
    text = answer_text(message)
    terminus = terminus_in(text)
    if terminus is not None:
        return (ToolCall(TERMINUS, terminus),)
    call = None if form is None else form(text)
    return None if call is None else (call,)


def _tagged(text: str) -> ToolCall | None:
    """`<function=NAME><parameter=KEY>VALUE</parameter></function>` at the end, where it is the only one. Values stay
    text, but for flags, numbers and ranges of lines."""
    found = _TAGGED.findall(text) if text.endswith("</function>") else []  # every opening one has its end
    if len(found) != 1:
        return None
    name, body = found[0]
    head, end, tail = body.rpartition("</parameter>")
    told = _PARAMETER.findall(head + end)
    if _PARAMETER.sub("", head + end).strip() or tail.strip() or len(dict(told)) < len(told):
        return None
    return ToolCall(
        name,
        {key: (json.loads(value) if key not in _TEXTS and _VALUE.fullmatch(value) else value) for key, value in told},
    )


def _in_command(text: str) -> ToolCall | None:
    """What stands between the last `<command>` and the last `</command>`."""
    start, end = text.rfind("<command>"), text.rfind("</command>")
    return _run(text[start + len("<command>") : end]) if 0 <= start < end else None


def _in_last_block(text: str) -> ToolCall | None:
    command = last_block(text)
    return None if command is None else _run(command)


def _run(command: str) -> ToolCall:
    """What a SWE-agent runs. The text that its editor takes is no shell's: in it every letter counts."""
    if _EDITOR.search(command):
        return ToolCall("edit", {"lines": command.strip("\n")})
    return ToolCall("bash", {"command": command})


def _in_fence(text: str) -> ToolCall | None:
    fenced = shell_fences(text)
    return ToolCall("bash", {"command": fenced[0]}) if len(fenced) == 1 else None


def _reacts(text: str) -> ToolCall | None:
    found = _REACT.findall(text)
    return ToolCall(found[0][0].lower(), {"query": found[0][1]}) if len(found) == 1 else None


def _all_of_it(text: str) -> ToolCall | None:
    return ToolCall("bash", {"command": text}) if text else None


def terminus_in(text: str) -> dict[str, Any] | None:
    """`{"sent": the keystrokes of each command, "keys": all of them, "marked": the same with the names of keys apart,
    "done": whether it claims to be done, "form": of Terminus 1 or 2}` of a valid answer; None for anything else. A
    fence around the JSON is taken off, as the agent does."""
    fence = re.fullmatch(r"```(?:json)?[ \t]*\r?\n(.*)\n```", text, re.DOTALL)
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
            sent: list[str] = [command["keystrokes"] for command in answer["commands"]]
            marked = "".join(f"\0{keys}\0" if _KEY.fullmatch(keys) else keys for keys in sent)
            done: bool = answer.get(flag, False)
            return {"sent": sent, "keys": "".join(sent), "marked": marked, "done": done, "form": flag}
    return None


def _is_command(value: Any, keys: dict[str, tuple[type, ...]], needed: Collection[str]) -> bool:
    if not isinstance(value, dict) or not set(needed) <= value.keys() <= keys.keys():
        return False
    return all(
        isinstance(item, keys[key]) and isinstance(item, bool) == (keys[key] == (bool,))
        for key, item in cast("dict[str, Any]", value).items()
    )
