"""Choose an operating point from a grid, and measure such a choice on groups that it has not seen."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from turntree.decide.gates.sweep import TERMINATION, Mask, Point, Row, cut_mask, nominal, single_point
from turntree.decide.gates.table import GroupTable
from turntree.run.statistics import clopper_pearson_low, successes_needed

Scope = Literal["all", "actionable"]
Criterion = Literal["point", "lower_bound"]
THRESHOLDS = tuple(step / 100 for step in range(1, 101))


def grid_points(signals: Sequence[str], turns: Sequence[int]) -> list[Point]:
    """Every signal at every turn and threshold 0.01, 0.02 ... 1; the termination fraction cuts from above."""
    return [single_point(signal, value, turn) for turn in turns for signal in signals for value in THRESHOLDS]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """P points on N groups: which groups each cuts, and what each true cut saves (a share of the total spent)."""

    table: GroupTable
    points: tuple[Point, ...]
    cut_PN: Mask
    worth_PN: NDArray[np.float64]

    @classmethod
    def build(cls, table: GroupTable, points: Sequence[Point], scope: Scope) -> Grid:
        """In the scope "all" cuts are counted as in the paper, and a cut saves T - K turns of every rollout. In the
        scope "actionable" only real cuts count, and a cut saves the tokens generated after it (else the turns, else
        T - K). Points that cut the same groups as an earlier point at the same turn are left out."""
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
    def family_P(self) -> NDArray[np.int64]:
        """The number of each point's family: the thresholds of one signal at one turn, which cut more and more."""
        names = [(p.turn, TERMINATION if p.termination is not None else p.signal) for p in self.points]
        order = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return np.array([order[name] for name in names], dtype=np.int64)

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
    """How a choice is made: among the points that qualify, the largest safe saving. Ties go to the first.

    A point qualifies with at least `needed[cut]` true cuts. With a `family_P` it must also be reached by a
    fixed-sequence test: the points of a family are tested from few cuts to many, from the first that forgives
    `forgiven` false cuts, and the first failure ends the family. `confidence` is that of each test.
    """

    needed: NDArray[np.int64]
    confidence: float
    forgiven: int = 0
    family_P: NDArray[np.int64] | None = None
    order_P: NDArray[np.int64] | None = None  # in which points are tested: family by family, from few cuts to many

    @classmethod
    def by_point(cls, groups: int, floor: float, confidence: float) -> Rule:
        """Precision at the floor, as the paper chooses; its bounds hold for a point chosen beforehand."""
        return cls(np.maximum(1, np.ceil(floor * np.arange(groups + 1) - 1e-9)).astype(np.int64), confidence)

    @classmethod
    def by_lower_bound(cls, grid: Grid, floor: float, confidence: float) -> Rule:
        """The exact lower bound of precision at the floor, for all points of the grid together: the error is split
        evenly over the families (Bonferroni), and the fixed-sequence test of a family uses all of its part.

        Whatever the signals are, the chance to choose a point whose precision is below the floor is at most
        1 - `confidence`, for groups that are independent. Where the test of a family begins depends on the signals
        alone: at the first point that forgives a false cut for every 150 groups, so that one early mistake does not end
        the test of a large buffer.
        """
        groups = len(grid.table.tasks)
        each = 1 - (1 - confidence) / max(1, len(np.unique(grid.family_P)))
        order = np.lexsort((grid.totals[0], grid.family_P))
        return cls(successes_needed(groups, floor, each), each, groups // 150, grid.family_P, order)

    def choose(self, cut_P: NDArray[np.int64], true_P: NDArray[np.int64], safe_P: NDArray[np.float64]) -> int | None:
        passed = true_P >= self.needed[cut_P]
        fit = np.flatnonzero((true_P > 0) & (passed if self.family_P is None else self._reached(cut_P, passed)))
        if not len(fit):
            return None
        best = safe_P[fit].max()
        return int(fit[np.argmax(safe_P[fit] >= best * (1 - 1e-9))])  # equal but for rounding is a tie

    @cached_property
    def _sequences(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where each family begins in the order of tests, and how many points it has."""
        assert self.family_P is not None
        starts = np.flatnonzero(np.diff(self.family_P[self.order_P], prepend=-1))
        return starts, np.diff(starts, append=len(self.family_P))

    def _reached(self, cut_P: NDArray[np.int64], passed_P: Mask) -> Mask:
        """(P,) points that are tested and pass, like all that are tested before them."""
        tested = cut_P - self.needed[cut_P] >= self.forgiven
        starts, lengths = self._sequences
        failed = (tested & ~passed_P)[self.order_P]
        failures = np.cumsum(failed)
        reached = np.empty_like(tested)
        reached[self.order_P] = failures == np.repeat(failures[starts] - failed[starts], lengths)
        return tested & reached

    @property
    def fewest_cuts(self) -> int | None:
        """How many cuts the first point of a test has at least; None where these groups are too few."""
        enough = np.flatnonzero(np.arange(1, len(self.needed)) - self.needed[1:] >= self.forgiven)
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
