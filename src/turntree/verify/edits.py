"""Edits by the file that they leave behind.

What a file holds is known where the history wrote it; of files that it only showed, parts are known. Two edits of a
known file are equal when both apply and leave the same text. Of a file that is known in part, an edit equals the
demonstrated one when it only shows more of the text around it, and that text was seen.
"""

from __future__ import annotations

import itertools
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turntree.core.messages import Message, ToolCall
from turntree.verify.kinds import COMMAND, IDLE, NEW, OLD, PATH, WHOLE, Kind, command_text, kind_of, of_any
from turntree.verify.shell.script import Script

_NUMBERED = re.compile(r"^ *\d+(?:\t|→|\| ?|: )(.*)$", re.MULTILINE)
# how editors say that they did it; any other answer may refuse it (`File has not been read yet`, `Permission denied`)
_DONE = re.compile(
    r"(?<!not )\bsuccessfully\b|\"success\": ?true\b|\"bytes_written\": ?\d"
    r"|\b(?:has|have|was|were) (?:been )?(?:created|written|edited|updated|changed|overwritten|saved)\b(?! since| by)"
    r"|\A\W*(?:success|done|ok|wrote|overwrote|(?:file|edit|changes) (?:created|written|updated|saved|applied))\b",
    re.IGNORECASE,
)
_FAILED = re.compile(r"\W*(?:tool_use_)?(?:error|traceback|exception|invalid|failed)", re.IGNORECASE)
_UNDERSTOOD = frozenset({*PATH, *OLD, *NEW, *WHOLE, "command", "replace_all", "replaceAll"})


@dataclass
class Files:
    """What a history says about files: `whole` texts by path, and `seen` parts of others."""

    whole: dict[str, str] = field(default_factory=dict[str, str])
    seen: dict[str, list[str]] = field(default_factory=dict[str, "list[str]"])

    @classmethod
    def of(cls, history: Sequence[Message], kinds: Mapping[str, Kind]) -> Files:
        files = cls()
        for place, message in enumerate(history):
            answers = _answers(history, place) if message.tool_calls else {}
            for call in message.tool_calls:
                files._take(call, answers.get(call.id), kinds)
        return files

    def _take(self, call: ToolCall, answer: str | None, kinds: Mapping[str, Kind]) -> None:
        kind = kind_of(call, kinds)
        if kind == "shell":
            command = of_any(call.arguments, COMMAND)
            text = None if command is None else command_text(command[1])
            if text is None or not Script.of(text).only_reads:
                self._forget()
            return
        if kind == "other":
            self._forget()
        place = of_any(call.arguments, PATH)
        if place is None or not isinstance(place[1], str) or kind not in ("edit", "read"):
            return
        name = place[1]
        if kind == "read":
            lines = _NUMBERED.findall(answer or "")
            self.seen.setdefault(name, []).append("\n".join(lines) if lines else answer or "")
            return
        told = "" if answer is None else answer.strip().partition("\n")[0]  # below it may stand the file's own text
        result = self.after(call) if _DONE.search(told) and not _FAILED.match(told) else None
        self._forget(posixpath.basename(name))
        if result is not None:
            self.whole[name] = result

    def _forget(self, basename: str | None = None) -> None:
        """Files of this name in any folder (one may be called by two paths), or all: any may have changed."""
        for known in (self.whole, self.seen):
            for name in [name for name in known if basename is None or posixpath.basename(name) == basename]:
                del known[name]

    def after(self, call: ToolCall) -> str | None:
        """The file after an edit; None where that is not known, or the edit does not apply."""
        arguments = call.arguments
        place, whole, change = of_any(arguments, PATH), of_any(arguments, WHOLE), replacement(arguments)
        if place is None or not understood(arguments):
            return None
        if change is None:
            creates = arguments.get("command", "create") in ("create", "write")
            return whole[1] if creates and whole is not None and isinstance(whole[1], str) else None
        before = self.whole.get(place[1])
        if before is None or not change[0]:
            return None
        found = before.count(change[0])
        if found != 1 and not (found > 1 and _everywhere(arguments)):
            return None
        return before.replace(*change)


def _answers(history: Sequence[Message], place: int) -> dict[str | None, str]:
    """The results of one message's calls, by id: those before the next answer of the agent. Ids may come again."""
    following = itertools.takewhile(lambda message: message.role != "assistant", history[place + 1 :])
    return {message.tool_call_id: message.content for message in following if message.role == "tool"}


def understood(arguments: Mapping[str, Any]) -> bool:
    """Whether every acting argument has a meaning here: one path, one text to take away, one to put there, or the
    whole. A line, a range, a mode to append or a second path says something else."""
    given = {name for name, value in arguments.items() if value is not None and name not in IDLE["edit"]}
    if any(len(given.intersection(names)) > 1 for names in (PATH, OLD, NEW, WHOLE)):
        return False
    return given <= _UNDERSTOOD and not (given.intersection(OLD) and given.intersection(WHOLE))


def replacement(arguments: Mapping[str, Any]) -> tuple[str, str] | None:
    """The text that an edit takes away and the one that it puts there."""
    old = of_any(arguments, OLD)
    if old is None or not isinstance(old[1], str):
        return None
    new = of_any(arguments, NEW)
    return (old[1], new[1] if new is not None and isinstance(new[1], str) else "")


def same_result(shown: ToolCall, tried: ToolCall, files: Files) -> bool:
    """Whether both edits (of the same file) leave the same text, as far as that is known."""
    commands = [call.arguments.get("command") for call in (shown, tried)]
    if commands[0] != commands[1]:
        return False  # an editor that is not told what to do, or refuses to create a file that exists
    left, right = files.after(shown), files.after(tried)
    if left is not None or right is not None:
        return left == right
    one, other = replacement(shown.arguments), replacement(tried.arguments)
    place = of_any(shown.arguments, PATH)
    if not (understood(shown.arguments) and understood(tried.arguments)):
        return False
    if one is None or other is None or place is None or _everywhere(shown.arguments) or _everywhere(tried.arguments):
        return False
    if one == other:  # nothing to put there, said or left out
        return True
    at = other[0].find(one[0])
    if not one[0] or at < 0:
        return False
    before, after = other[0][:at], other[0][at + len(one[0]) :]
    return other[1] == before + one[1] + after and any(other[0] in text for text in files.seen.get(place[1], ()))


def _everywhere(arguments: Mapping[str, Any]) -> bool:
    return arguments.get("replace_all") is True or arguments.get("replaceAll") is True
