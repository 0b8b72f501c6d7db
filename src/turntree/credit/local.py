"""Credit of judged turns: a turn that rollouts took has an advantage of its own beside those of the rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from turntree.core.labels import Credit
from turntree.credit.credit import soft


def with_turns(credit: Credit, advantages: Mapping[int, float]) -> Credit:
    """`credit` with one more advantage at some nodes, which every rollout through the node has. It is a second term of
    the objective on the same tokens, clipped by itself: the gradient is that of the sum of both advantages wherever the
    ratio lies inside the clip range. Nodes without credit get none; the normalisers stay."""
    nodes = dict(credit.nodes)
    for node, advantage in advantages.items():
        if (one := nodes.get(node)) is not None:
            more = soft([one.multiplicity], [one.multiplicity], [advantage])
            positive, negative = one.positive + more.positive, one.negative + more.negative
            nodes[node] = replace(one, positive=positive, negative=negative)
    moved = any(advantages.get(node, 0.0) for node in nodes)
    return replace(credit, nodes=nodes, zero_variance=credit.zero_variance and not moved)
