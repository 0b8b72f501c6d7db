"""What d_K can still become: bounds that may settle a gate's decision before its turn."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from turntree.core.protocols import GroupProgress
from turntree.gates.signals import edit_distances, prefixes

Bounds = Callable[[GroupProgress, int, int], tuple[float, float]]


def edit_distance_bounds(group: GroupProgress, turn: int, reached: int) -> tuple[float, float]:
    """The least and the largest `prefix_edit_distance_mean` at `turn` that the first `reached` turns allow.

    With t turns of two sequences known and both K long in the end, lev(t) <= lev(K) <= lev(t) + K - t: an alignment of
    the prefixes extends by K - t substitutions, and one of the whole, cut where it leaves the prefixes, costs no less
    than it saves (triangle inequality). Equal continuations reach the lower bound, all-different ones of two unfinished
    rollouts the upper. A pair of ended rollouts is known exactly.
    """
    size = len(group.actions)
    if size < 2:
        return 0.0, 0.0
    low = edit_distances(prefixes(group, reached))
    high = low + (turn - reached) * (1 - np.eye(size, dtype=np.int64))
    ended = np.flatnonzero(group.finished)
    if len(ended) > 1:
        padded = prefixes(group, turn)
        low[np.ix_(ended, ended)] = high[np.ix_(ended, ended)] = edit_distances([padded[index] for index in ended])
    pairs = size * (size - 1) * turn
    return int(low.sum()) / pairs, int(high.sum()) / pairs
