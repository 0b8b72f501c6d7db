"""Choosing an operating point from a grid, and what such a choice is worth on groups that it has not seen."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from turntree.gates.sweep import TERMINATION, Mask, Point, Row, cut_mask, nominal
from turntree.gates.table import GroupTable
from turntree.observe.statistics import clopper_pearson_low, successes_needed

Scope = Literal["all", "actionable"]
Criterion = Literal["point", "lower_bound"]
THRESHOLDS = tuple(step / 100 for step in range(1, 101))


def grid_points(signals: Sequence[str], turns: Sequence[int]) -> list[Point]:
    """Every signal at every turn and threshold 0.01, 0.02 ... 1; the termination fraction cuts from above."""
    points: list[Point] = []
    for turn in turns:
        for signal in signals:
            for value in THRESHOLDS:
                high = signal == TERMINATION
                point = Point(turn=turn, threshold=0.0, termination=value)
                points.append(point if high else Point(turn=turn, threshold=value, signal=signal))
    return points


@dataclass(frozen=True, kw_only=True)
class Grid:
    """P points on N groups: whom each cuts, and what each true cut is worth (a share of all that was spent)."""

    table: GroupTable
    points: tuple[Point, ...]
    cut_PN: Mask
    worth_PN: NDArray[np.float64]

    @classmethod
    def build(cls, table: GroupTable, points: Sequence[Point], scope: Scope) -> Grid:
        """In the scope "all" a cut is what the paper counts and is worth T - K turns of every rollout; among
        "actionable" groups it is what the gate would really have cut, worth the tokens, else the turns, that were
        generated after it, else T - K. Points that cut the same groups as an earlier one at the same turn are left
        out."""
        kept: dict[tuple[int, bytes], tuple[Point, Mask]] = {}
        for point in points:
            mask = cut_mask(table, point)
            if scope == "actionable":
                mask = mask & table.actionable_NK[:, table.column(point.turn)]
            if mask.any():
                kept.setdefault((point.turn, mask.tobytes()), (point, mask))
        worth = {turn: _worth(table, turn, scope) for turn in table.turns}
        shape = (0, len(table.tasks))
        return cls(
            table=table,
            points=tuple(point for point, _ in kept.values()),
            cut_PN=np.array([mask for _, mask in kept.values()], dtype=bool).reshape(len(kept), shape[1]),
            worth_PN=np.array([worth[point.turn] for point, _ in kept.values()]).reshape(len(kept), shape[1]),
        )

    @cached_property
    def true_PN(self) -> Mask:
        return self.cut_PN & self.table.zero_variance_N

    @cached_property
    def safe_PN(self) -> NDArray[np.float64]:
        return self.true_PN * self.worth_PN

    @cached_property
    def totals(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """Per point: groups cut, of them with zero variance, savings of those."""
        return self.cut_PN.sum(1), self.true_PN.sum(1), self.safe_PN.sum(1)


@dataclass(frozen=True)
class Rule:
    """How a choice is made: among the points with at least `needed[cut]` true cuts, the largest safe saving.

    Ties go to the first, that is, to the lower threshold.
    """

    floor: float
    needed: NDArray[np.int64]

    @classmethod
    def build(cls, criterion: Criterion, groups: int, floor: float, confidence: float) -> Rule:
        """`point`: precision at the floor, as the paper chooses. `lower_bound`: its exact lower bound at the floor."""
        if criterion == "point":
            return cls(floor, np.maximum(1, np.ceil(floor * np.arange(groups + 1) - 1e-9)).astype(np.int64))
        return cls(floor, successes_needed(groups, floor, confidence))

    def choose(self, cut_P: NDArray[np.int64], true_P: NDArray[np.int64], safe_P: NDArray[np.float64]) -> int | None:
        fit = np.flatnonzero((true_P > 0) & (true_P >= self.needed[cut_P]))
        if not len(fit):
            return None
        best = safe_P[fit].max()
        return int(fit[np.argmax(safe_P[fit] >= best * (1 - 1e-9))])  # equal but for rounding is a tie

    @property
    def fewest_cuts(self) -> int | None:
        """How many cuts it takes where every one of them is true; None where these groups are too few."""
        enough = np.flatnonzero(self.needed[1:] <= np.arange(1, len(self.needed)))
        return int(enough[0]) + 1 if len(enough) else None


def nested(grid: Grid, rule: Rule, *, folds: int | None, repeats: int, seed: int) -> Row:
    """Choose on all folds but one and apply the choice to that one: the precision of the procedure, not of a point.

    The groups of one task stay together; `folds` None leaves out one task at a time. Counts are means over the
    repeats, `precision` is that of all of them, `abstained` the share of folds in which no point qualified.
    """
    rows = [_one_pass(grid, rule, parts) for parts in _splits(grid.table.tasks, folds, repeats, seed)]
    cut, true, safe, abstained = (sum(row[i] for row in rows) for i in range(4))
    shares = [row[1] / row[0] for row in rows if row[0]]
    return {
        "folds": folds or "leave one task out",
        "repeats": len(rows),
        "cut": cut / len(rows),
        "tp": true / len(rows),
        "precision": true / cut if cut else None,
        "precision_range": [min(shares), max(shares)] if shares else None,
        "precision_low": clopper_pearson_low(int(true), int(cut)) if len(rows) == 1 else None,
        "safe": safe / len(rows),
        "abstained": abstained / len(rows),
    }


def _one_pass(grid: Grid, rule: Rule, parts: Sequence[NDArray[np.int64]]) -> tuple[float, float, float, float]:
    cut = true = safe = abstained = 0.0
    for held_out in parts:
        inside = [each[:, held_out] for each in (grid.cut_PN, grid.true_PN, grid.safe_PN)]
        rest = [total - each.sum(1) for total, each in zip(grid.totals, inside, strict=True)]
        chosen = rule.choose(*rest) if len(grid.points) else None
        if chosen is None:
            abstained += 1 / len(parts)
            continue
        cut, true, safe = (
            value + float(each[chosen].sum()) for value, each in zip((cut, true, safe), inside, strict=True)
        )
    return cut, true, safe, abstained


def _splits(tasks: Sequence[str], folds: int | None, repeats: int, seed: int) -> Iterator[list[NDArray[np.int64]]]:
    members: dict[str, list[int]] = {}
    for row, task in enumerate(tasks):
        members.setdefault(task, []).append(row)
    names = list(members)
    if folds is None:
        yield [np.array(members[name]) for name in names]
        return
    folds = min(folds, len(names))
    for repeat in range(repeats):
        random.Random(seed + repeat).shuffle(names)
        yield [np.array([row for name in names[part::folds] for row in members[name]]) for part in range(folds)]


def _worth(table: GroupTable, turn: int, scope: Scope) -> NDArray[np.float64]:
    for unit in ("tokens", "turns") if scope == "actionable" else ():
        for savings in table.savings:
            if savings.unit == unit and savings.total:
                return savings.after_NK[:, table.column(turn)] / savings.total
    return np.full(len(table.tasks), nominal(table, turn))
