"""Several looks at a group instead of one, with a budget for the groups that they may wrongly cut together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from turntree.core.errors import InputError
from turntree.gates.selection import THRESHOLDS
from turntree.gates.sweep import PAPER_SIGNAL, Point, cut_mask, nominal
from turntree.gates.table import GroupTable
from turntree.observe.statistics import clopper_pearson_high


@dataclass(frozen=True, kw_only=True)
class CheckpointPlan:
    """Thresholds of one signal, turn by turn; None where the data support none. `lost_high` bounds the share of
    groups with something to teach that the checkpoint cuts, at its part of the confidence."""

    signal: str
    turns: tuple[int, ...]
    thresholds: tuple[float | None, ...]
    lost_high: tuple[float, ...]
    budget: float
    confidence: float

    @property
    def points(self) -> tuple[Point, ...]:
        return tuple(
            Point(turn=turn, threshold=threshold, signal=self.signal)
            for turn, threshold in zip(self.turns, self.thresholds, strict=True)
            if threshold is not None
        )


def plan_checkpoints(
    table: GroupTable,
    turns: Sequence[int],
    *,
    budget: float = 0.1,
    confidence: float = 0.95,
    signal: str = PAPER_SIGNAL,
) -> CheckpointPlan:
    """The largest thresholds at `turns` that together cut at most `budget` of the groups with something to teach.

    Guarantee: if groups are independent and come as they did here, then with probability `confidence` over this
    sample, a group with mixed rewards is cut by any of the checkpoints with probability at most `budget`. Both the
    budget and the error 1 - confidence are split evenly over the checkpoints. At each, the share of mixed groups that
    are cut can only grow with the threshold. So for the largest threshold of a fixed grid whose exact upper bound
    (Clopper-Pearson, one-sided) is within its part of the budget, the error is at most its part, however many
    thresholds were tried. The union bound adds these parts up.
    """
    if not turns:
        raise InputError("no turn to look at", hint="give at least one")
    mixed = ~table.zero_variance_N
    part, sure = budget / len(turns), 1 - (1 - confidence) / len(turns)
    thresholds: list[float | None] = []
    bounds: list[float] = []
    for turn in turns:
        live = mixed & table.actionable_NK[:, table.column(turn)]
        chosen, bound = None, clopper_pearson_high(0, int(mixed.sum()), sure)
        for threshold in THRESHOLDS:
            lost = int((cut_mask(table, Point(turn=turn, threshold=threshold, signal=signal)) & live).sum())
            high = clopper_pearson_high(lost, int(mixed.sum()), sure)
            if high > part:
                break
            chosen, bound = threshold, high
        thresholds.append(chosen)
        bounds.append(bound)
    return CheckpointPlan(
        signal=signal,
        turns=tuple(turns),
        thresholds=tuple(thresholds),
        lost_high=tuple(bounds),
        budget=budget,
        confidence=confidence,
    )


def measure_plan(table: GroupTable, plan: CheckpointPlan) -> dict[str, Any]:
    """Which of these groups the checkpoints cut, each at the first turn that cuts it; `safe` and `raw` as in `measure`,
    over actionable groups."""
    open_N = np.ones(len(table.tasks), dtype=bool)
    cut = tp = 0
    safe = raw = 0.0
    for point in plan.points:
        now = open_N & cut_mask(table, point) & table.actionable_NK[:, table.column(point.turn)]
        true = int((now & table.zero_variance_N).sum())
        cut, tp, open_N = cut + int(now.sum()), tp + true, open_N & ~now
        safe += true * nominal(table, point.turn)
        raw += int(now.sum()) * nominal(table, point.turn)
    precision = tp / cut if cut else None
    return {"cut": cut, "tp": tp, "fp": cut - tp, "precision": precision, "safe": safe, "raw": raw}
