"""Labels live beside the tree, keyed by node id: rewards of leaves, credit of nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from turntree.core.cost import NO_COST, Cost
from turntree.core.tree import RolloutTree
from turntree.core.verdict import Verdict


@dataclass(frozen=True)
class Rewards:
    """The verdict on every rollout of one tree, by the leaf at which it ended (`RolloutTree.ends`). A censored leaf has
    no reward (None is not zero).

    `completions` are rewards of single completions, which hold there instead of their rollout's (a sub-agent that
    failed in a session that succeeded).
    """

    verdicts: Mapping[int, Verdict]
    completions: Mapping[int, float] = field(default_factory=dict[int, float])

    def of(self, leaf: int) -> float | None:
        """None where it is censored, and at a leaf where no rollout ended."""
        verdict = self.verdicts.get(leaf)
        return None if verdict is None else verdict.reward

    @property
    def values(self) -> tuple[float | None, ...]:
        """One a rollout, None where it is censored."""
        return tuple(verdict.reward for verdict in self.verdicts.values())

    def scored(self) -> dict[int, float]:
        """The rewards of the leaves that have one, in order of leaf id."""
        return {leaf: v.reward for leaf, v in sorted(self.verdicts.items()) if v.reward is not None}

    @property
    def cost(self) -> Cost:
        """Of judging."""
        return sum((verdict.cost for verdict in self.verdicts.values()), NO_COST)

    def check(self, tree: RolloutTree) -> None:
        """Raise ValueError unless exactly the ends of rollouts are labelled and no censored leaf carries a reward."""
        if set(self.verdicts) != set(tree.ends()):
            raise ValueError(f"the rewards of {tree.task_id!r} do not label exactly its leaves")
        for leaf, verdict in self.verdicts.items():
            reason = tree.stop_reason(leaf)
            if reason is None or (reason.censors and verdict.reward is not None):
                raise ValueError(f"leaf {leaf} of {tree.task_id!r} ({reason}) must not carry a reward")
        for node in self.completions:
            if not tree[node].sampled:
                raise ValueError(f"node {node} of {tree.task_id!r} is no completion and cannot be rewarded")


@dataclass(frozen=True)
class NodeCredit:
    """Three numbers that reproduce the flat objective of all rollouts through a node (docs/design/credit.md).

    With leaf weights w_i and advantages A_i: positive = sum w_i max(A_i, 0), negative = sum w_i min(A_i, 0),
    multiplicity = sum w_i (weights the KL term and the normaliser). The normaliser Z is divided out by the trainer,
    because it spans the whole accumulation window.
    """

    positive: float
    negative: float
    multiplicity: float


@dataclass(frozen=True)
class Credit:
    """Credit of the trained nodes of one tree; a node that is absent is not trained.

    `rollout_tokens` and `rollouts` are the normalisers of the flat objective: the sum of w_i times the trained tokens
    of rollout i (each unique trained token once under `hard_dedup`), and the sum of w_i. `zero_variance`: all leaves
    with a weight had the same reward. `redistributed`: the leaf weight that censored branches gave to their siblings.
    `uncounted`: the scored leaves without weight (refills under path weights).
    """

    nodes: Mapping[int, NodeCredit]
    rollout_tokens: float
    rollouts: float
    zero_variance: bool
    censored: int = 0
    uncounted: int = 0
    redistributed: float = 0.0

    @property
    def teaches(self) -> bool:
        """Whether the gradient is not zero: some node is to become more or less likely."""
        return not self.zero_variance and any(one.positive or one.negative for one in self.nodes.values())
