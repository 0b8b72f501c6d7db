"""The scored part of one tree, as estimators read it: which leaves have a reward, what lies above them, and how much
each of them counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from turntree.core.tree import RolloutTree


@dataclass(frozen=True)
class ScoredTree:
    """`leaves`, `rewards` and `weights` align. `below` gives, for every node of a scored rollout, the positions (in
    these sequences) of the leaves at or below it. A rollout of several branches (`RolloutTree.parts`) is one position
    at all of its nodes. Node ids ascend: parents come before children."""

    tree: RolloutTree
    leaves: tuple[int, ...]
    rewards: tuple[float, ...]
    weights: tuple[float, ...]
    below: Mapping[int, tuple[int, ...]]

    @property
    def trained(self) -> tuple[int, ...]:
        """The nodes with tokens that were sampled from the policy."""
        left_out = self.tree.untrained()
        return tuple(n for n in self.below if self.tree[n].sampled and self.tree[n].token_ids and n not in left_out)

    @property
    def initial_starts(self) -> tuple[int, ...]:
        refills = self.tree.refills()
        return tuple(n for n in self.tree.starts() if n in self.below and n not in refills)

    @property
    def refilled_starts(self) -> tuple[int, ...]:
        return tuple(n for n in sorted(self.tree.refills()) if n in self.below)

    @property
    def trained_tokens(self) -> list[int]:
        """Sampled tokens of the rollout that ended at each leaf."""
        lengths = [0] * len(self.leaves)
        for node in self.trained:
            for i in self.below[node]:
                lengths[i] += len(self.tree[node].token_ids)
        return lengths

    def value(self, node: int) -> float:
        """The mean reward of the leaves at or below `node`, by their weights."""
        return self.mean_of(self.below[node], self.rewards)

    def mean_of(self, positions: Sequence[int], values: Sequence[float] | Mapping[int, float]) -> float:
        weights = [self.weights[i] for i in positions]
        return math.fsum(w * values[i] for w, i in zip(weights, positions, strict=True)) / math.fsum(weights)

    def at_trained(self, advantages: Sequence[float]) -> dict[int, list[float]]:
        """The advantage of each leaf, repeated at every trained node above it (aligned with `below`)."""
        return {n: [advantages[i] for i in self.below[n]] for n in self.trained}


def positions_below(tree: RolloutTree, leaves: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """For each node of the rollouts that ended at `leaves`, in node order: the positions of those rollouts."""
    below: dict[int, list[int]] = {}
    for position, leaf in enumerate(leaves):
        for node in tree.nodes_of(leaf):
            below.setdefault(node, []).append(position)
    return {node: tuple(positions) for node, positions in sorted(below.items())}


# the weights of leaves


@dataclass(frozen=True)
class LeafWeighting:
    """`weights` align with the scored leaves (0: the leaf is not counted); `redistributed` is the weight that censored
    branches gave up to their siblings."""

    weights: tuple[float, ...]
    redistributed: float = 0.0


LeafWeights = Callable[[RolloutTree, Sequence[int]], LeafWeighting]


def unit_weights(tree: RolloutTree, leaves: Sequence[int]) -> LeafWeighting:
    """Every scored rollout counts the same (plain GRPO). Where sampling forked, a prefix counts once per leaf."""
    return LeafWeighting((1.0,) * len(leaves))


def path_weighted(tree: RolloutTree, leaves: Sequence[int]) -> LeafWeighting:
    """The product of 1/children over the branch points above a leaf, so that the leaves of one start weigh 1 together;
    0 below a refill.

    Refills would be more unbiased draws of the same gradient, but their number depends on the task: a task whose
    rollouts never fork would take a step that is longer by the factor leaves / starts. Dividing by the number of all
    starts does not help, because that number depends on what the initial rollouts did (recipes/credit_table.py
    enumerates both). So every task's gradient is the sum over its initial starts.

    Sums with these weights are unbiased iff every fork was decided from the history up to it (docs/design/branching.md;
    not so a brancher that is `biased`). A branch without scored leaf gives its weight to its siblings, which is
    unbiased only where censoring does not depend on what the branch was about to earn.
    """
    below = positions_below(tree, leaves)
    forks, refills = set(tree.branch_points()), tree.refills()
    weights: list[float] = []
    planned: list[float] = []
    for leaf in leaves:
        path = tree.path(leaf)
        if any(node.id in refills for node in path):
            weights.append(0.0)
            continue
        branched = [tree.children(node.id) for node in path if node.id in forks]
        weights.append(math.prod(1 / sum(child in below for child in children) for children in branched))
        planned.append(math.prod(1 / len(children) for children in branched))
    return LeafWeighting(tuple(weights), math.fsum(weights) - math.fsum(planned))
