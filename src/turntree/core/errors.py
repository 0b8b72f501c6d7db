"""Errors that a user can act on.

A bad configuration or input stops the command with one clear line; a bad rollout is data (a `StopReason`).
"""

from __future__ import annotations

import errno
import re
from pathlib import Path

_LONGEST = 400  # characters of one part of a message: what is quoted from an input may be endless


class TurntreeError(Exception):
    """Base class of every error that turntree raises on purpose; the CLI prints it as one line."""


class InputError(TurntreeError):
    """The user's input is wrong. Says where (file, line, field), what is wrong and what to do.

    >>> str(InputError("is not a number", path="a.jsonl", line=3, field="reward", hint="write 0.0 or 1.0"))
    "a.jsonl:3: field 'reward': is not a number; write 0.0 or 1.0"
    """

    def __init__(
        self,
        problem: str,
        *,
        path: str | Path | None = None,
        line: int | None = None,
        field: str | None = None,
        hint: str | None = None,
    ) -> None:
        problem, field, hint = _short(problem), None if field is None else _short(field), hint and _short(hint)
        self.problem, self.path, self.line, self.field, self.hint = problem, path, line, field, hint
        place = "" if path is None else f"{path}:{line}: " if line is not None else f"{path}: "
        where = "" if field is None else f"field {field!r}: "
        advice = "" if hint is None else f"; {hint}"
        super().__init__(printable(" ".join(f"{place}{where}{problem}{advice}".splitlines())))


class ConfigError(InputError):
    """A configuration names an unknown key or an impossible value."""


def disk_is_full(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, says that a disk or a quota is full, or a file as large as
    `ulimit -f` lets it be. Libraries in other languages (safetensors, SQLite) say so in their text only."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    while error is not None:
        text = str(error)
        if isinstance(error, OSError) and error.errno in full:
            return True
        if any(f"os error {number})" in text for number in full) or "database or disk is full" in text:
            return True
        error = error.__cause__ or error.__context__
    return False


def printable(text: str) -> str:
    """The text for a terminal, which control characters out of data would command."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: ascii(found.group())[1:-1], text)


def _short(text: str) -> str:
    """The text, shortened in its middle where it is too long for a message."""
    if len(text) <= _LONGEST + 100:  # less would be cut by words as long as what they cut
        return text
    kept = _LONGEST // 2
    return f"{text[:kept]} [... {len(text) - 2 * kept:,} characters ...] {text[-kept:]}"


def first_line(error: BaseException) -> str:
    """The kind of a foreign error and the first line of its text, which may be whole paragraphs."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
