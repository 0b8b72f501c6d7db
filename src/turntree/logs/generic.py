"""What every log format is, and the documented generic JSONL (docs/audit.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from turntree.core.errors import InputError
from turntree.core.foreign import reason_of
from turntree.logs.grouping import by_rows, by_steps
from turntree.logs.groups import LoggedGroup, LoggedRollout
from turntree.logs.rows import (
    LoggedRow,
    ReadReport,
    RowRefused,
    count,
    counts,
    facts_of,
    flag,
    needed,
    reward,
    split,
    text,
    texts,
)

Row = dict[str, Any]


class LogFormat:
    """How a framework writes its rollouts. Of one JSON line a rollout `row` is enough; any other log has `groups`. The
    fields of the class (a dataclass) are the format's options."""

    marks: ClassVar[tuple[frozenset[str], ...]] = ()
    """The fields by which a line is recognised, for each shape that lines have."""
    file_marks: ClassVar[tuple[str, ...]] = ()
    """... or the ends of the names of its files, `*` for anything."""
    folders: ClassVar[tuple[str, ...]] = ()
    """Where its files lie below a folder that is named."""
    beside: ClassVar[tuple[str, ...]] = ()
    """The names of what else lies there."""
    filter_setting: ClassVar[str | None] = None
    """What makes its framework drop groups without variance."""
    file_is_step: ClassVar[bool] = False
    """Whether a file is a step: the one that its name tells, else its number."""

    def row(self, row: Row) -> LoggedRow | Mapping[str, Any] | None:
        """The rollout of a line, or the fields of the generic format; None for a line that is none. A line on which it
        fails is dropped, counted by the name of the error, as one of which it raises `RowRefused`."""
        raise NotImplementedError

    def groups(self, paths: Sequence[Path], report: ReadReport) -> Iterator[LoggedGroup]:
        return (by_steps if self.file_is_step else by_rows)(self.logged, paths, report)

    def logged(self, row: Row) -> LoggedRow:
        """What `row` gives of a line, of whatever kind."""
        try:
            found = self.row(row)
        except (RowRefused, InputError, RecursionError):
            raise
        except BaseException as error:  # the boundary to foreign code, which meets every line of a log
            problem = f"the format raised {type(error).__name__}"
            raise RowRefused(problem, reason_of(error).partition(": ")[2]) from error
        if found is None:
            raise RowRefused("left out by the format")
        if isinstance(found, LoggedRow):
            return found
        if not isinstance(found, Mapping):
            raise RowRefused("the format gave no object", type(found).__name__)
        return generic(dict(found))


@dataclass(frozen=True, kw_only=True)
class Options(LogFormat):
    """Of a log whose turns are apart."""

    rewards: tuple[str, ...] = ()
    """Columns whose sum is the reward (none: the format's own)."""


@dataclass(frozen=True, kw_only=True)
class TextOptions(Options):
    """Of a log that has a rollout as one text."""

    turn_separator: str | None = None
    """Regular expression of what stands between two assistant turns of a text."""

    def __post_init__(self) -> None:
        split("", self.turn_separator)  # checks it


def generic(row: Row, *, rewards: tuple[str, ...] = ("reward",)) -> LoggedRow:
    """The documented JSONL (docs/audit.md), also what a custom format function returns for a row: `group` and `reward`,
    and optionally task, iteration (or step, global_step, train_step, epoch), task_type, actions, turn_tokens,
    observations, tokens, completed, stop. `task` defaults to the group's name; then the same group must have the same
    name in later iterations.

    Args:
        rewards: Columns whose sum is the reward.
    """
    group = needed(row, "group")
    try:
        rollout = LoggedRollout(
            actions=texts(row, "actions") or (),
            reward=reward(row, rewards),
            completed=flag(row, "completed"),
            turn_tokens=counts(row, "turn_tokens"),
            observations=texts(row, "observations"),
            tokens=count(row, "tokens"),
            characters=count(row, "characters"),
            stop=text(row, "stop"),
        )
    except ValueError as error:
        raise RowRefused("lists of different lengths", str(error)) from error
    return LoggedRow(
        group=group,
        task=text(row, "task"),
        rollout=rollout,
        iteration=count(row, "iteration", "step", "global_step", "train_step", "epoch"),
        task_type=text(row, "task_type"),
        facts=facts_of(row, task=row.get("task"), task_type=row.get("task_type")),
    )


@dataclass(frozen=True, kw_only=True)
class Generic(Options):
    """The documented JSONL."""

    marks: ClassVar = (frozenset({"group", "reward"}),)
    rewards: tuple[str, ...] = ("reward",)

    def row(self, row: Row) -> LoggedRow:
        return generic(row, rewards=self.rewards)
