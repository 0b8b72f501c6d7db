"""Credit: three numbers a node that reproduce the objective of all rollouts through it.

With r = pi / pi_old of a token (the same for every leaf below its node), leaf advantages A_i and leaf weights w_i,

    sum_i w_i min(r A_i, clip(r, 1-lo, 1+hi) A_i) = P min(r, 1+hi) + N max(r, 1-lo)

with P = sum_i w_i max(A_i, 0) and N = sum_i w_i min(A_i, 0) (architecture, section 3). So a token that k rollouts
share is computed once, and the gradient is that of k flat rows.

An estimator is a `CreditRule`: how rewards become advantages, how much a leaf weighs, and how the leaves below a
node become its three numbers. Another attribution is written as its difference: `CreditRule(attribute=...)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from turntree.advantages.grpo import grpo_advantages
from turntree.core.labels import Credit, NodeCredit, Rewards
from turntree.core.outcome import is_zero_variance
from turntree.core.tree import RolloutTree, StopReason

Advantages = Callable[[Sequence[float]], list[float]]
LeafWeights = Callable[[RolloutTree, Sequence[int]], list[float]]
Attribution = Callable[[Sequence[float], Sequence[float]], NodeCredit]


def unit_weights(tree: RolloutTree, leaves: Sequence[int]) -> list[float]:
    """Every scored rollout counts the same (plain GRPO)."""
    return [1.0] * len(leaves)


def soft(weights: Sequence[float], advantages: Sequence[float]) -> NodeCredit:
    """Each leaf keeps its own advantage at every node above it (ARPO's default, plain GRPO)."""
    pairs = list(zip(weights, advantages, strict=True))
    return NodeCredit(
        positive=math.fsum(w * max(a, 0.0) for w, a in pairs),
        negative=math.fsum(w * min(a, 0.0) for w, a in pairs),
        multiplicity=math.fsum(weights),
    )


@dataclass(frozen=True, kw_only=True)
class CreditRule:
    """An estimator (`core.protocols.Estimator`).

    `per_rollout` divides the weight of each leaf by its number of trained tokens, so that long rollouts do not
    outweigh short ones (GRPO's mean over rollouts of token means; train with `normalizer="rollouts"`). The factor
    differs between the leaves below one node, so it is folded in here; it cannot be divided out later.
    """

    advantages: Advantages = grpo_advantages
    leaf_weights: LeafWeights = unit_weights
    attribute: Attribution = soft
    per_rollout: bool = False

    def __call__(self, tree: RolloutTree, rewards: Rewards) -> Credit:
        """Label the completions on the paths of scored leaves; nodes above censored leaves only stay untrained.

        Raises ValueError when the rewards do not label exactly the leaves, or reward a censored one.
        """
        rewards.check(tree)
        scored = rewards.scored()
        _check_gate(tree, scored)
        leaves = list(scored)
        weights = self.leaf_weights(tree, leaves)
        lengths = [_trained_tokens(tree, leaf) for leaf in leaves]
        shares = [w / max(n, 1) if self.per_rollout else w for w, n in zip(weights, lengths, strict=True)]
        advantages = self.advantages([scored[leaf] for leaf in leaves])
        return Credit(
            nodes={
                node: self.attribute([shares[i] for i in below], [advantages[i] for i in below])
                for node, below in _leaves_below(tree, leaves).items()
            },
            rollout_tokens=math.fsum(w * n for w, n in zip(weights, lengths, strict=True)),
            rollouts=math.fsum(weights),
            zero_variance=is_zero_variance(list(scored.values())),
            censored=len(rewards.verdicts) - len(scored),
        )


def soft_credit(tree: RolloutTree, rewards: Rewards, *, advantages: Advantages = grpo_advantages) -> Credit:
    """Soft attribution with unit weights: w_i = 1 and A_{i,n} = A_i at every completion n above leaf i."""
    return CreditRule(advantages=advantages)(tree, rewards)


def _leaves_below(tree: RolloutTree, leaves: Sequence[int]) -> dict[int, list[int]]:
    """For each completion above a scored leaf, in node order: the positions in `leaves` of those below it."""
    below: dict[int, list[int]] = {}
    for position, leaf in enumerate(leaves):
        for node in tree.path(leaf):
            if node.sampled and node.token_ids:
                below.setdefault(node.id, []).append(position)
    return dict(sorted(below.items()))


def _trained_tokens(tree: RolloutTree, leaf: int) -> int:
    return sum(len(node.token_ids) for node in tree.path(leaf) if node.sampled)


def _check_gate(tree: RolloutTree, scored: dict[int, float]) -> None:
    """A gated tree censors all its leaves, completed ones too: which ones had completed depended on the outcome."""
    if scored and any(tree.stop_reason(leaf) is StopReason.GATED for leaf in tree.leaves()):
        raise ValueError(f"{tree.task_id!r} was gated: its completed leaves must not carry rewards either")
