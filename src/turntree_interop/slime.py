"""slime and miles: samples as their `Sample.to_dict` writes them, one JSON line each.

`--save-debug-rollout-data` saves a step with torch (`ROLLOUT_ID.pt`: a dict with `samples`). Such a file is a pickle,
which is not opened here; docs/audit.md has lines that make JSON of it without running anything that it holds.

Statuses: completed, truncated (the token limit), aborted and failed (no reward to train on), pending.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast

from turntree.core.errors import InputError
from turntree.logs.generic import TextOptions
from turntree.logs.groups import LoggedGroup
from turntree.logs.rows import LoggedRow, ReadReport, RowRefused, count, facts_of, named_prompt, text
from turntree_interop.rows import rollout_of_text

_FILTER = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
_FAILED = frozenset({"aborted", "failed", "pending"})


@dataclass(frozen=True, kw_only=True)
class Slime(TextOptions):
    """Samples of one `group_index` in one file are a group, those of one `rollout_id` a rollout. Where rewards are
    objects, `rewards` names their keys."""

    marks: ClassVar = (frozenset({"group_index", "response", "response_length", "status", "reward"}),)
    file_marks: ClassVar = (".pt",)
    file_is_step: ClassVar = True
    filter_setting: ClassVar = f"--dynamic-sampling-filter-path {_FILTER}"
    rewards: tuple[str, ...] = ("reward",)
    """Columns whose sum is the reward, or keys of the object `reward`."""

    def groups(self, paths: Sequence[Path], report: ReadReport) -> Iterator[LoggedGroup]:
        for path in paths:
            if path.suffix == ".pt":
                hint = "make JSON lines of it: docs/audit.md has the four lines"
                raise InputError("is a pickle, which is not opened", path=path, hint=hint)
        return super().groups(paths, report)

    def row(self, row: dict[str, Any]) -> LoggedRow:
        group, prompt, status = text(row, "group_index"), row.get("prompt"), text(row, "status") or ""
        if group is None:
            raise RowRefused("no group_index: its group is not known")
        said = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)
        given = cast("dict[str, Any]", row["reward"]) if isinstance(row.get("reward"), dict) else row
        rollout = rollout_of_text(
            row | {name: given[name] for name in self.rewards if name in given},
            text(row, "response") or "",
            self,
            tokens=count(row, "response_length"),
            stop=status or None,
            completed={"completed": True, "truncated": False}.get(status),
        )
        return LoggedRow(
            group=f"group {group}",
            task=named_prompt(said),
            rollout=replace(rollout, reward=None) if status in _FAILED or row.get("remove_sample") else rollout,
            facts=facts_of(row, label=row.get("label")),
            whole=text(row, "rollout_id"),
            output=count(row, "index") or 0,
        )
