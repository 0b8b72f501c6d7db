"""How much each scored leaf counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from turntree.advantages.scored import positions_below
from turntree.core.tree import RolloutTree


@dataclass(frozen=True)
class LeafWeighting:
    """`weights` align with the scored leaves; `redistributed` is the weight that censored branches gave up to their
    siblings."""

    weights: tuple[float, ...]
    redistributed: float = 0.0


LeafWeights = Callable[[RolloutTree, Sequence[int]], LeafWeighting]


def unit_weights(tree: RolloutTree, leaves: Sequence[int]) -> LeafWeighting:
    """Every scored rollout counts the same (plain GRPO). Where sampling forked, a prefix counts once per leaf."""
    return LeafWeighting((1.0,) * len(leaves))


def path_weighted(tree: RolloutTree, leaves: Sequence[int]) -> LeafWeighting:
    """The product of 1/children over the branch points above a leaf, so that the leaves of one start weigh 1 together.

    Sums with these weights are unbiased iff every fork was decided from the history up to it (docs/design/branching.md;
    `RolloutTree.biased_forks` lists the others). A branch without scored leaf gives its weight to its siblings,
    which is unbiased only where censoring does not depend on what the branch was about to earn.
    """
    below = positions_below(tree, leaves)
    forks = set(tree.branch_points())
    weights: list[float] = []
    planned: list[float] = []
    for leaf in leaves:
        branched = [tree.children(node.id) for node in tree.path(leaf) if node.id in forks]
        weights.append(math.prod(1 / sum(child in below for child in children) for children in branched))
        planned.append(math.prod(1 / len(children) for children in branched))
    return LeafWeighting(tuple(weights), math.fsum(weights) - math.fsum(planned))
