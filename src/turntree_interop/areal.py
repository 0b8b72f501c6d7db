"""AReaL: its dumped trajectories (`rollout.dump_to_file`; `WorkflowExecutor._dump_trajectory`), one file a task in a
folder a version of the weights: task_id, sample_idx, seqlen, prompt_len, head_version, tail_version, reward, prompt,
completion. A trajectory without generated tokens is not dumped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from turntree.logs.generic import TextOptions
from turntree.logs.rows import LoggedRow, count, named_prompt, needed, text
from turntree_interop.rows import rollout_of_text


@dataclass(frozen=True, kw_only=True)
class Areal(TextOptions):
    """A group is a task_id of one version. Its rollouts were begun with the weights of `head_version`; the iteration is
    that of `tail_version`, under which they are filed."""

    marks: ClassVar = (frozenset({"task_id", "sample_idx", "tail_version", "reward"}),)
    folders: ClassVar = ("rollout/*/*.jsonl",)
    rewards: tuple[str, ...] = ("reward",)

    def row(self, row: dict[str, Any]) -> LoggedRow:
        prompt, length, before = needed(row, "prompt"), count(row, "seqlen"), count(row, "prompt_len")
        tokens = None if length is None or before is None else max(0, length - before)
        return LoggedRow(
            group=f"task {needed(row, 'task_id')}",
            task=named_prompt(prompt),  # of multi-turn rollouts with answers: no fact by which groups are told apart
            rollout=rollout_of_text(row, text(row, "completion") or "", self, tokens=tokens),
            iteration=count(row, "tail_version"),
            sample=count(row, "sample_idx"),
        )
