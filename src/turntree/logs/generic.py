"""The documented JSONL of anyone: one rollout a line (docs/audit.md)."""

from __future__ import annotations

from typing import Any

from turntree.logs.groups import LoggedRollout
from turntree.logs.rows import LoggedRow, ReadConfig, RowRefused, count, counts, flag, needed, reward, text, texts


def read_row(row: dict[str, Any], config: ReadConfig, file_number: int) -> LoggedRow:
    """`group` and `reward`, and as much as there is of task, iteration (or step), task_type, actions, turn_tokens,
    observations, tokens, completed, stop. `task` defaults to the group's name, which then has to come back."""
    group = needed(row, "group")
    try:
        rollout = LoggedRollout(
            actions=texts(row, "actions") or (),
            reward=reward(row, config.rewards or ("reward",)),
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
    )
