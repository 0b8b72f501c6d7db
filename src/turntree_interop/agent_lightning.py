"""Agent Lightning 1.0: the compact trajectories that its verl adapter uploads to wandb, one `train_trajectories.jsonl`
(zipped) a step: rollout_id, reward, prompt and response, of the last call of a rollout. A rollout without a reward has
the adapter's fill value there, which the file does not tell from a reward.

The prompt of a last call holds what came before it: so only rollouts of one call are put back into groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from turntree.logs.generic import TextOptions
from turntree.logs.rows import LoggedRow, facts_of, named_prompt, text
from turntree_interop.rows import rollout_of_text


@dataclass(frozen=True, kw_only=True)
class AgentLightning(TextOptions):
    """Rollouts of one prompt in one file are a group."""

    marks: ClassVar = (frozenset({"rollout_id", "reward", "prompt", "response"}),)
    rewards: tuple[str, ...] = ("reward",)
    file_is_step: ClassVar = True

    def row(self, row: dict[str, Any]) -> LoggedRow:
        return LoggedRow(
            group=named_prompt(text(row, "prompt") or ""),
            rollout=rollout_of_text(row, text(row, "response") or "", self),
            facts=facts_of(row),
        )
