"""One line of a log becomes one rollout, or is refused for a reason that is counted."""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from typing import Any, cast

from turntree.core.errors import ConfigError
from turntree.logs.groups import LoggedRollout


class RowRefused(Exception):
    """A line that cannot be read. `reason` is one of few fixed texts, for counting."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason
        super().__init__(f"{reason}{': ' if detail else ''}{detail}")


@dataclass(frozen=True, kw_only=True)
class LoggedRow:
    """A rollout and where it belongs. Rows with equal `iteration` and `group` in one file are one group."""

    group: str
    task: str
    rollout: LoggedRollout
    iteration: int | None = None
    task_type: str | None = None


@dataclass(frozen=True, kw_only=True)
class ReadConfig:
    """What a log cannot say about itself.

    `rewards`: the columns whose sum is the reward (default: the format's own). `turn_separator`: a regular expression
    of what stands between two assistant turns in the text of a whole rollout (dot matches newline); without it the
    turns of such a text are unknown.
    """

    rewards: tuple[str, ...] = ()
    turn_separator: str | None = None

    def __post_init__(self) -> None:
        try:
            re.compile(self.turn_separator or "")
        except re.error as error:
            problem = f"is no regular expression ({error})"
            raise ConfigError(problem, field="turn_separator", hint=r"e.g. '\nuser\n.*?\nassistant\n'") from error

    def split(self, text: str) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
        """The turns of a rollout's text and what was seen before each (unknown before the first: the task)."""
        if self.turn_separator is None:
            return (), None
        pattern = re.compile(self.turn_separator, re.DOTALL)
        between = [match.group() for match in pattern.finditer(text)]
        cuts = [span for match in pattern.finditer(text) for span in match.span()]
        edges = [0, *cuts, len(text)]
        turns = [text[edges[i] : edges[i + 1]].strip() for i in range(0, len(edges), 2)]
        return tuple(turns), ("", *between)


def text(row: dict[str, Any], *names: str) -> str | None:
    """The first of the fields that is text or a whole number, as text."""
    for name in names:
        value = row.get(name)
        if isinstance(value, str | int) and not isinstance(value, bool):
            return str(value)
    return None


def needed(row: dict[str, Any], name: str) -> str:
    found = text(row, name)
    if found is None:
        raise RowRefused(f"no text in field {name!r}")
    return found


def number(row: dict[str, Any], name: str) -> float | None:
    """A finite number; null and NaN are None. Raises `RowRefused` where the field is missing or no number."""
    if name not in row:
        raise RowRefused(f"no field {name!r}")
    value = row[name]
    if value is None:
        return None
    if not isinstance(value, int | float):
        raise RowRefused(f"field {name!r} is not a number", repr(value)[:40])
    return float(value) if math.isfinite(value) else None


def reward(row: dict[str, Any], names: tuple[str, ...]) -> float | None:
    """The sum of the columns; one that does not apply (null) is left out, None where none applies."""
    values = [value for name in names if (value := number(row, name)) is not None]
    return math.fsum(values) if values else None


def count(row: dict[str, Any], *names: str) -> int | None:
    """The first of the fields that is a whole number, or None."""
    for name in names:
        value = row.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    return None


def texts(row: dict[str, Any], name: str) -> tuple[str, ...] | None:
    """A list of texts. Raises `RowRefused` for anything else but null."""
    values = row.get(name)
    if values is None:
        return None
    if not isinstance(values, list) or not all(isinstance(value, str) for value in cast("list[Any]", values)):
        raise RowRefused(f"field {name!r} is not a list of texts")
    return tuple(cast("list[str]", values))


def counts(row: dict[str, Any], name: str) -> tuple[int, ...] | None:
    values = row.get(name)
    if values is None:
        return None
    good = isinstance(values, list) and all(isinstance(v, int) and v >= 0 for v in cast("list[Any]", values))
    if not good:
        raise RowRefused(f"field {name!r} is not a list of whole numbers")
    return tuple(cast("list[int]", values))


def named_prompt(prompt: str) -> str:
    """A name for a prompt that is the same wherever the prompt is: a hash, and how it ends, for people."""
    end = " ".join(prompt.split())[-60:]
    return f"{hashlib.blake2b(prompt.encode(), digest_size=6).hexdigest()} …{end}"
