"""Pairs between the demonstrated calls and those of an action."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def most_pairs(shown: Sequence[T], tried: Sequence[T], same: Callable[[T, T], bool]) -> int:
    """The most demonstrated calls that can be paired with a call of their own (maximum bipartite matching by
    augmenting paths). Needed where `same` is not an equivalence, so that a call could be spent on the wrong one."""
    near = [[k for k, other in enumerate(tried) if same(one, other)] for one in shown]
    owner: dict[int, int] = {}

    def place(one: int, seen: set[int]) -> bool:
        for k in near[one]:
            if k not in seen:
                seen.add(k)
                if k not in owner or place(owner[k], seen):
                    owner[k] = one
                    return True
        return False

    return sum(place(one, set()) for one in range(len(shown)))


def perfect_matching(shown: Sequence[T], tried: Sequence[T], same: Callable[[T, T], bool]) -> bool:
    """Whether every call of either side has a partner of its own."""
    if len(shown) != len(tried):
        return False
    if len(shown) == 1:
        return same(shown[0], tried[0])
    return most_pairs(shown, tried, same) == len(shown)
