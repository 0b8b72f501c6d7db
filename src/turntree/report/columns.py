"""What a run logs (`metrics.jsonl`, one row a step) as far as pages draw it: each column once, with its meaning.

Names with a dot lie in a mapping of the row. A column that the stage did not log has no figure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Curve:
    """A figure to draw from metrics. `key` may be dotted; a share or a reward gets an axis from 0 to 1."""

    key: str
    title: str
    unit: str
    kind: Literal["share", "reward", "amount"] = "amount"
    size: tuple[float, float] = (3.9, 2.5)  # inches


REWARD = Curve("reward_mean", "Training reward", "mean reward", "reward")
SUCCESS = Curve("held_out_success", "Held-out success", "success (%)", "share")
KL = Curve("kl", "KL to the reference", "nats per token")
NORM = Curve("grad_norm", "Gradient norm before clipping", "L2 norm")
ONLINE = (
    REWARD,
    Curve("success_share", "Training success", "rollouts (%)", "share"),
    Curve("zero_variance_share", "Groups without a gradient", "groups (%)", "share"),
    Curve("held_out_turns_per_episode", "Held-out turns (drift)", "turns per episode"),
    KL,
    NORM,
)
BRANCHING = (Curve("branching.structural_saving", "Structural saving s", "calls shared (%)", "share"),)
SPENT = {  # since the start; before the first iteration nothing
    "trees.calls_fresh": "fresh tool calls",
    "spent.turns": "turns sampled in training",
    "spent.decoded_tokens": "tokens sampled in training",
}
PIVOT = (
    REWARD,
    KL,
    NORM,
    Curve("mixed_groups", "Groups with mixed rewards", "share of groups (%)", "share"),
    SUCCESS,
    Curve("held_out_invalid_share", "Impossible commands (held-out)", "share of commands (%)", "share"),
)
ACCEPTANCE = "held_out_acceptance"  # by kind of demonstrated action
SFT = (Curve("loss", "SFT loss", "nats per token"),)
BY_STAGE = {
    "train pivot": PIVOT,
    "sft": SFT,
    "train online": (*ONLINE, *BRANCHING),
}  # by the name that a stage gives itself
