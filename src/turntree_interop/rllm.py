"""rLLM: episodes of its `EpisodeLogger`, one JSON file each (train_step_N_epoch_E/episode_hashH_idTASK:ROLLOUT.json):
training_step, episode_id, task, task_hash, is_correct, termination_reason, trajectories with reward and steps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from turntree.logs.generic import Options
from turntree.logs.grouping import grouped, read_each
from turntree.logs.groups import LoggedGroup, LoggedRollout
from turntree.logs.rows import LoggedRow, ReadReport, count, facts_of, flag, items, needed, parse_row, reward, text
from turntree.run.jsonl import read_bytes

_LIMITS = frozenset({"max_prompt_length_exceeded", "max_response_length_exceeded", "max_turns_exceeded"})
_FAULTS = frozenset({"error", "timeout", "unknown"})


@dataclass(frozen=True, kw_only=True)
class Rllm(Options):
    """Episodes of one task in one step are a group. The reward is that of the only trajectory, or where there are
    several, whether the episode was correct."""

    file_marks: ClassVar = ("episode_hash*.json",)
    filter_setting: ClassVar = "rllm.rejection_sample.enable=True"
    folders: ClassVar = ("episode_*.json", "train_step_*/episode_*.json", "episodes/train_step_*/episode_*.json")

    def groups(self, paths: Sequence[Path], report: ReadReport) -> Iterator[LoggedGroup]:
        yield from grouped(self._rows(paths, report), paths[0].parent, report)

    def _rows(self, paths: Sequence[Path], report: ReadReport) -> Iterator[LoggedRow]:
        for path in paths:
            report.saw_line()
            yield from read_each(partial(_row, rewards=self.rewards), [(None, path)], path, report)


def _row(path: Path, *, rewards: tuple[str, ...]) -> LoggedRow:
    row = parse_row(read_bytes(path))
    trajectories = items(row, "trajectories", dict, needed=True)
    steps = [step for one in trajectories for step in items(one, "steps", dict, needed=True)]
    ended = text(row, "termination_reason") or ""
    actions = tuple(_said(step.get("model_response") or step.get("action")) for step in steps)
    seen = tuple(_said(step.get("observation")) for step in steps)
    if rewards:
        given = reward(row, rewards)
    elif len(trajectories) == 1:
        given = reward(trajectories[0], ("reward",))
    else:
        correct = flag(row, "is_correct")
        given = None if correct is None else float(correct)
    rollout = LoggedRollout(
        actions=actions,
        reward=None if ended.lower() in _FAULTS else given,
        observations=seen,
        characters=sum(map(len, actions)),
        completed=False if ended.lower() in _LIMITS else None,
        stop=ended or None,
    )
    return LoggedRow(
        group=needed(row, "task_hash"),
        rollout=rollout,
        iteration=count(row, "training_step"),
        facts=facts_of(row, task=row.get("task")),
    )


def _said(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, sort_keys=True, default=str)
