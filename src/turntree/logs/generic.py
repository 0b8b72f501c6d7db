"""The documented generic JSONL (docs/audit.md), and the options that log formats share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from turntree.logs.groups import LoggedRollout
from turntree.logs.rows import LoggedRow, RowRefused, count, counts, facts_of, flag, needed, reward, split, text, texts

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Options:
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
    and optionally task, iteration (or step), task_type, actions, turn_tokens, observations, tokens, completed, stop.
    `task` defaults to the group's name; then the same group must have the same name in later iterations.

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
        task=text(row, "task") or group,
        rollout=rollout,
        iteration=count(row, "iteration", "step"),
        task_type=text(row, "task_type"),
        facts=facts_of(row, task=row.get("task"), task_type=row.get("task_type")),
    )
