"""The scored part of one tree, as estimators read it: which leaves have a reward, what lies above them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from turntree.core.tree import RolloutTree


@dataclass(frozen=True)
class ScoredTree:
    """`leaves`, `rewards` and `weights` align; `below` gives, for every node on the path of a scored leaf, the
    positions in them of the leaves at or below it, in order. Ascending node ids: parents come before children."""

    tree: RolloutTree
    leaves: tuple[int, ...]
    rewards: tuple[float, ...]
    weights: tuple[float, ...]
    below: Mapping[int, tuple[int, ...]]

    @property
    def trained(self) -> tuple[int, ...]:
        """The sampled nodes with tokens."""
        return tuple(n for n in self.below if self.tree[n].sampled and self.tree[n].token_ids)

    @property
    def initial_starts(self) -> tuple[int, ...]:
        refills = self.tree.refills()
        return tuple(n for n in self.tree.starts() if n in self.below and n not in refills)

    @property
    def refilled_starts(self) -> tuple[int, ...]:
        return tuple(n for n in sorted(self.tree.refills()) if n in self.below)

    @property
    def trained_tokens(self) -> list[int]:
        """Sampled tokens on the path of each leaf."""
        return [sum(len(n.token_ids) for n in self.tree.path(leaf) if n.sampled) for leaf in self.leaves]

    def value(self, node: int) -> float:
        """The mean reward of the leaves at or below `node`, by their weights."""
        return self.mean_below(node, self.rewards)

    def mean_below(self, node: int, values: Sequence[float]) -> float:
        weights = [self.weights[i] for i in self.below[node]]
        return math.fsum(w * values[i] for w, i in zip(weights, self.below[node], strict=True)) / math.fsum(weights)

    def at_trained(self, advantages: Sequence[float]) -> dict[int, list[float]]:
        """The advantage of each leaf, repeated at every trained node above it (aligned with `below`)."""
        return {n: [advantages[i] for i in self.below[n]] for n in self.trained}


def positions_below(tree: RolloutTree, leaves: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """For each node on the path of one of `leaves`, in node order: the positions of those at or below it."""
    below: dict[int, list[int]] = {}
    for position, leaf in enumerate(leaves):
        for node in tree.path(leaf):
            below.setdefault(node.id, []).append(position)
    return {node: tuple(positions) for node, positions in sorted(below.items())}
