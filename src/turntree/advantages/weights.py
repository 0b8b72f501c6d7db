"""How much each scored leaf counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from turntree.advantages.scored import positions_below
from turntree.core.tree import RolloutTree


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

    Refills would be N more unbiased draws of the same gradient, but how many there are is up to the task: one whose
    rollouts never fork would take a longer step than one whose rollouts do, by leaves over starts. Dividing by the
    starts that there are is no way out, because their number depends on what the initial ones did (both enumerated in
    recipes/credit_table.py). So every task's gradient is the sum over its initial starts.

    Sums with these weights are unbiased iff every fork was decided from the history up to it (docs/design/branching.md;
    `RolloutTree.biased_forks` lists the others). A branch without scored leaf gives its weight to its siblings,
    which is unbiased only where censoring does not depend on what the branch was about to earn.
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
