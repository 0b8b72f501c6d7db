"""Pairs between the demonstrated calls and those of an action."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def most_pairs(shown: Sequence[T], tried: Sequence[T], same: Callable[[T, T], bool]) -> int:
    """The most demonstrated calls that can be paired with a call of their own. Needed where `same` is not an
    equivalence, so that a call could be spent on the wrong one."""
    near = [[place for place, other in enumerate(tried) if same(call, other)] for call in shown]
    partner: dict[int, int] = {}  # by the place of a tried call
    return sum(_paired(start, near, partner) for start in range(len(shown)))


def _paired(start: int, near: list[list[int]], partner: dict[int, int]) -> bool:
    """Give the demonstrated call a partner, and others another one where that needs it: an augmenting path, searched
    breadth first (Kuhn 1955)."""
    came: dict[int, tuple[int, int | None]] = {}  # by tried call: the demonstrated one it was reached from, and what
    waiting: list[tuple[int, int | None]] = [(start, None)]  # that one held
    for call, held in waiting:
        for place in near[call]:
            if place in came:
                continue
            came[place] = call, held
            if place in partner:
                waiting.append((partner[place], place))
                continue
            freed: int | None = place
            while freed is not None:
                partner[freed], freed = came[freed]
            return True
    return False


def perfect_matching(shown: Sequence[T], tried: Sequence[T], same: Callable[[T, T], bool]) -> bool:
    """Whether every call of either side has a partner of its own."""
    if len(shown) != len(tried):
        return False
    if len(shown) == 1:
        return same(shown[0], tried[0])
    return most_pairs(shown, tried, same) == len(shown)
