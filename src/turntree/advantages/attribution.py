"""From the advantages of the leaves below a node to its three numbers.

An attribution is given, for the leaves i at or below one node, the weights w_i, the shares w_i / Z_i (equal to w_i
unless each rollout is divided by its length) and the advantages A_{i,n}.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from turntree.core.labels import NodeCredit

Attribution = Callable[[Sequence[float], Sequence[float], Sequence[float]], NodeCredit]


def soft(weights: Sequence[float], shares: Sequence[float], advantages: Sequence[float]) -> NodeCredit:
    """Each leaf keeps its own advantage at every node above it (ARPO's default, plain GRPO)."""
    pairs = list(zip(shares, advantages, strict=True))
    return NodeCredit(
        positive=math.fsum(s * max(a, 0.0) for s, a in pairs),
        negative=math.fsum(s * min(a, 0.0) for s, a in pairs),
        multiplicity=math.fsum(shares),
    )


def hard(weights: Sequence[float], shares: Sequence[float], advantages: Sequence[float]) -> NodeCredit:
    """Every leaf takes the weighted mean advantage of the leaves below the node (ARPO's hard assignment).

    Without clipping this has the gradient of `soft`; they part once the ratio leaves the clip range, because P and N
    are clipped on different sides.
    """
    return soft(weights, shares, [_mean(weights, advantages)] * len(advantages))


def hard_dedup(weights: Sequence[float], shares: Sequence[float], advantages: Sequence[float]) -> NodeCredit:
    """`hard` with the node counted once, however many leaves share it: a shared prefix weighs as much as a tail."""
    return soft([1.0], [1.0], [_mean(weights, advantages)])


def _mean(weights: Sequence[float], advantages: Sequence[float]) -> float:
    return math.fsum(w * a for w, a in zip(weights, advantages, strict=True)) / math.fsum(weights)
