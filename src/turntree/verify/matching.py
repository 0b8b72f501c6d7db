"""Pairs between the demonstrated calls and those of an action."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def most_pairs(shown: Sequence[T], tried: Sequence[T], same: Callable[[T, T], bool]) -> int:
    """The most demonstrated calls that can be paired with a call of their own. Needed where `same` is not an
    equivalence, so that a call could be spent on the wrong one."""
    from scipy.sparse import csr_array  # slow to import, and rarely needed
    from scipy.sparse.csgraph import maximum_bipartite_matching

    if not shown or not tried:
        return 0
    near = csr_array([[int(same(call, other)) for other in tried] for call in shown])
    return int((maximum_bipartite_matching(near) >= 0).sum())


def perfect_matching(shown: Sequence[T], tried: Sequence[T], same: Callable[[T, T], bool]) -> bool:
    """Whether every call of either side has a partner of its own."""
    if len(shown) != len(tried):
        return False
    if len(shown) == 1:
        return same(shown[0], tried[0])
    return most_pairs(shown, tried, same) == len(shown)
