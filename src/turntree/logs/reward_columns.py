"""Which columns of numbers were rewards, where a table does not say: told by their names, or by the advantages.

An advantage is the reward less the mean of its group, over a scale. So a set of columns can be the reward only if,
within every group, the advantages are a rising straight line of its sum. Weights other than 1 are not looked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from turntree.core.outcome import REWARD_TOLERANCE

MOST = 12  # columns of which every set is tried: 4,095 sets
FLAT, FIT = 1e-6, 1e-2  # advantages are written in float32, and some scales have an epsilon
Columns = tuple[str, ...]
Row = Mapping[str, Any]


class RewardColumns:
    """Shown every group of a log, it keeps the sets of columns that explain all advantages seen."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._left: list[Columns] = []
        if len(names) <= MOST:
            self._left = [some for size in range(1, len(names) + 1) for some in combinations(names, size)]
        self._named = tuple(name for name in names if "reward" in name.lower())
        if self._named and self._named not in self._left:
            self._left.append(self._named)
        self._told = False
        self._not_zero: set[str] = set()

    def see(self, group: Sequence[Row]) -> None:
        """Drop the sets that do not explain the advantages of a group's rows."""
        for name in self.names:
            if name not in self._not_zero and any(row.get(name) for row in group):
                self._not_zero.add(name)
        judged = [row for row in group if is_number(row.get("advantage"))]
        if len(judged) < 2:
            return
        self._told = True
        varying = {name for name in self.names if len({row.get(name) for row in judged}) > 1}
        known: dict[tuple[Columns, bool], bool] = {}  # columns that are constant in the group only shift its sums

        def fits(some: Columns) -> bool:
            shift = any(name not in varying and is_number(judged[0].get(name)) for name in some)
            key = tuple(name for name in some if name in varying), shift
            if key not in known:
                known[key] = explains(judged, some)
            return known[key]

        self._left = [some for some in self._left if fits(some)]

    def found(self) -> tuple[Columns, str] | str:
        """The columns and how they are known; else why they are not. Columns that are zero everywhere may stay out."""
        if len(self.names) == 1:
            return self.names, "the only column of numbers"
        if self._named and (self._named in self._left):
            return self._named, "by name"
        left = {tuple(name for name in some if name in self._not_zero) for some in self._left}
        if not self._told:
            return f"the log has no advantages, so nothing tells which of {_listed(self.names)} were rewards"
        if not left:
            return f"the advantages are not those of a sum of {_listed(self.names)}"
        if left == {()}:
            return self._left[0], "zero like every column that fits the advantages"
        if len(left) > 1:
            doubtful = [name for name in self.names if len({name in some for some in left}) > 1] or self.names
            return f"the advantages do not tell whether {_listed(doubtful)} entered the reward"
        return next(iter(left)), "the advantages fit no other columns"


def explains(rows: Sequence[Row], columns: Columns) -> bool:
    """Whether the advantages of a group's rows are a rising straight line of the sum of the columns."""
    pairs = [
        (math.fsum(values), float(row["advantage"]))
        for row in rows
        if (values := [float(row[name]) for name in columns if is_number(row.get(name))])
    ]
    if len(pairs) < 2:
        return True
    reward, advantage = np.array(pairs).T
    if np.ptp(reward) <= REWARD_TOLERANCE or np.abs(advantage).max() <= FLAT:
        return bool(np.ptp(reward) <= REWARD_TOLERANCE) == bool(np.abs(advantage).max() <= FLAT)
    reward, advantage = reward - reward.mean(), advantage - advantage.mean()
    slope = float(reward @ advantage) / float(reward @ reward)
    return slope > 0 and float(np.abs(advantage - slope * reward).max()) <= FIT * float(np.abs(advantage).max())


def numeric(rows: Iterable[Row], but: Sequence[str]) -> list[str]:
    """The columns, in order, whose values are all numbers or null, and not null alone."""
    kinds: dict[str, set[type]] = {}
    for row in rows:
        for name, value in row.items():
            if name not in but:
                kinds.setdefault(name, set()).add(type(value))
    return [name for name, found in kinds.items() if found & {int, float} and found <= {int, float, type(None)}]


def is_number(value: Any) -> bool:
    if type(value) not in (int, float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _listed(names: Sequence[str]) -> str:
    return ", ".join(name[:60] for name in names[:MOST])
