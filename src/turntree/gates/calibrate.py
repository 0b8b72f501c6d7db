"""`turntree gate calibrate`: which operating point, if any, a buffer of finished groups supports."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from turntree.gates.association import associations, by_task_type, task_type_sizes
from turntree.gates.checkpoints import measure_plan, plan_checkpoints
from turntree.gates.selection import THRESHOLDS, Criterion, Grid, Rule, Scope, grid_points, nested
from turntree.gates.sweep import PAPER_SIGNAL, TERMINATION, Mask, Point, Row, cut_mask, measure, sweep
from turntree.gates.table import GroupTable
from turntree.observe.statistics import clopper_pearson_low, percentile_interval, resampled

SHOWN_THRESHOLDS = (0.05, 0.08, 0.10, 0.12, 0.14, 0.18)  # those of the paper's Table 1
BOUND = "Clopper-Pearson, one-sided, for all signals, turns and thresholds together"


@dataclass(frozen=True, kw_only=True)
class CalibrationConfig:
    """When the data support an operating point of a gate."""

    floor: float = 0.8
    """Precision that a gate must have (paper, C.5)."""
    confidence: float = 0.95
    """Of the lower bound of precision."""
    budget: float = 0.1
    """Largest share of the mixed groups that several checkpoints may cut together."""
    folds: int = 5
    """Of the cross-validation over tasks."""
    repeats: int = 20
    """Of the cross-validation."""
    resamples: int = 1000
    """Of the bootstrap over tasks."""
    seed: int = 0
    """Of folds and resamples."""

    def __post_init__(self) -> None:
        for name in ("floor", "confidence", "budget"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} must be between 0 and 1, not {getattr(self, name)}")
        if self.folds < 2 or self.repeats < 1 or self.resamples < 1:
            raise ValueError("folds must be at least 2, repeats and resamples at least 1")


def calibrate(table: GroupTable, config: CalibrationConfig) -> Row:
    """Calibrate gates on the buffer; the results as plain JSON values.

    `choices` holds, for every turn (None: any of them), scope, criterion and set of signals, the chosen point or None
    with the reason. `recommended` is the choice over all turns and signals by the lower bound of precision among
    actionable groups; else None, and `refused` says why. With probability `confidence` no point below the floor is
    recommended: the bound holds for all turns, signals and thresholds together. Where tasks have several groups, it
    holds for further groups of these tasks only, and `bound` says so.
    """
    choices = _choices(table, config)
    recommended, reason = _recommend(choices)
    zero = int(table.zero_variance_N.sum())
    return {
        "source": table.source,
        "groups": len(table.tasks),
        "tasks": len(set(table.tasks)),
        "outcomes": dict(sorted(Counter(outcome.value for outcome in table.outcomes).items())),
        "zero_variance": zero,
        "zero_variance_rate": zero / len(table.tasks),
        "max_turns": table.max_turns,
        "turns": list(table.turns),
        "absent": table.absent,
        "dropped": table.dropped,
        "floor": config.floor,
        "confidence": config.confidence,
        "bound": BOUND if len(set(table.tasks)) == len(table.tasks) else f"{BOUND}, on further groups of these tasks",
        "recommended": recommended,
        "refused": None if reason is None else {"reason": reason},
        "choices": choices,
        "sweeps": {str(turn): sweep(table, SHOWN_THRESHOLDS, turn=turn) for turn in _divergence_turns(table)},
        "oracle": {str(turn): measure(table, table.zero_variance_N, turn) for turn in table.turns},
        "checkpoints": _checkpoints(table, config),
        "task_types": task_type_sizes(table),
        "association": associations(table, resamples=config.resamples, seed=config.seed),
    }


def _divergence_turns(table: GroupTable) -> tuple[int, ...]:
    return table.turns if PAPER_SIGNAL in table.signals_NK else ()


def _choices(table: GroupTable, config: CalibrationConfig) -> list[Row]:
    signal_sets = {"any": list(table.signals_NK)}
    if PAPER_SIGNAL in table.signals_NK:
        signal_sets = {PAPER_SIGNAL: [PAPER_SIGNAL], **signal_sets}
    scopes: tuple[Scope, ...] = ("all", "actionable")
    criteria: tuple[Criterion, ...] = ("point", "lower_bound")
    by_point = Rule.by_point(len(table.tasks), config.floor, config.confidence)
    rows: list[Row] = []
    for turn in (*table.turns, None):
        for named, signals in signal_sets.items():
            points = grid_points(signals, table.turns if turn is None else (turn,))
            for scope in scopes:
                grid = Grid.build(table, points, scope)
                for by in criteria:
                    head = {"turn": turn, "signals": named, "scope": scope, "by": by, "points": len(grid.points)}
                    rule = by_point if by == "point" else Rule.by_lower_bound(grid, config.floor, config.confidence)
                    rows.append({**head, **_choice(grid, rule, by, config)})
    return rows


def _choice(grid: Grid, rule: Rule, by: Criterion, config: CalibrationConfig) -> Row:
    chosen = rule.choose(*grid.totals) if grid.points else None
    validation = {
        "leave_one_out": nested(grid, rule, folds=None, repeats=1, seed=config.seed),
        "cross_validation": nested(grid, rule, folds=config.folds, repeats=config.repeats, seed=config.seed),
    }
    if chosen is None:
        reason, nearest = _none(grid, rule, by, config)
        return {"choice": None, "reason": reason, "nearest": nearest, **validation}
    described = _described(grid.table, grid.points[chosen], grid.cut_PN[chosen], rule, config)
    return {"choice": described, "reason": None, "nearest": None, **validation}


def _described(table: GroupTable, point: Point, cut_N: Mask, rule: Rule, config: CalibrationConfig) -> Row:
    """A point with its measurements; `same_up_to` is the largest threshold that cuts the same groups. For a point
    chosen by its lower bound, the bound is that of the test, which accounts for the choice."""
    everyone = cut_mask(table, point)
    return {
        **_named(point),
        "same_up_to": _same_up_to(table, point),
        **measure(table, everyone, point.turn, confidence=rule.confidence),
        "intervals": _intervals(table, everyone, point.turn, config),
        "random": _random(table, int(cut_N.sum()), point.turn),
        "task_types": by_task_type(table, cut_N),
    }


def _named(point: Point) -> Row:
    return {
        "rule": str(point),
        "signal": TERMINATION if point.termination is not None else point.signal,
        "turn": point.turn,
        "threshold": point.threshold,
        "termination": point.termination,
    }


def _same_up_to(table: GroupTable, point: Point) -> float:
    mask = cut_mask(table, point)
    if point.termination is not None:
        others = {value: replace(point, termination=value) for value in THRESHOLDS}
    else:
        others = {value: replace(point, threshold=value) for value in THRESHOLDS}
    return max(value for value, other in others.items() if np.array_equal(cut_mask(table, other), mask))


def _intervals(table: GroupTable, cut_N: Mask, turn: int, config: CalibrationConfig) -> Row:
    """95% percentile bootstrap over tasks, of the point as it stands (its choice is not repeated), in both scopes."""
    zero, live = table.zero_variance_N, table.actionable_NK[:, table.column(turn)]
    part = max(0, table.max_turns - turn) / table.max_turns
    drawn: dict[str, list[float]] = {}
    for sample in resampled(table.tasks, resamples=config.resamples, seed=config.seed):
        for scope, mask in (("all", cut_N[sample]), ("actionable", (cut_N & live)[sample])):
            cut, tp = int(mask.sum()), int((mask & zero[sample]).sum())
            drawn.setdefault(f"{scope}_safe", []).append(tp * part / len(sample))
            drawn.setdefault(f"{scope}_raw", []).append(cut * part / len(sample))
            if cut:
                drawn.setdefault(f"{scope}_precision", []).append(tp / cut)
    return {name: percentile_interval(values) for name, values in sorted(drawn.items())}


def _random(table: GroupTable, cuts: int, turn: int) -> Row:
    """Cutting as many groups at random, in expectation (exact: the false cuts are hypergeometric)."""
    from scipy.stats import hypergeom

    groups, zero = len(table.tasks), int(table.zero_variance_N.sum())
    false = np.arange(cuts + 1)
    chance = hypergeom.pmf(false, groups, groups - zero, cuts)
    mixed = groups - zero
    kept = np.sqrt(np.maximum(0.0, 1 - false / mixed)) if mixed else np.ones(cuts + 1)
    part = max(0, table.max_turns - turn) / table.max_turns
    return {
        "cut": cuts,
        "precision": zero / groups,
        "safe": cuts * zero / groups * part / groups,
        "l2_preserved": math.fsum(chance * kept),
    }


def _none(grid: Grid, rule: Rule, by: Criterion, config: CalibrationConfig) -> tuple[str, Row | None]:
    """Why no point qualifies, and the one that comes nearest."""
    if not grid.points:
        return "no point of the grid cuts a group", None
    cut, true, _ = grid.totals
    lows = [clopper_pearson_low(int(t), int(c), rule.confidence) for t, c in zip(true, cut, strict=True)]
    best = int(np.argmax(true / cut + cut * 1e-9 if by == "point" else lows))
    point, counted = grid.points[best], f"{true[best]} true of {cut[best]} cuts"
    nearest = {
        **_named(point),
        "cut": int(cut[best]),
        "tp": int(true[best]),
        "fp": int(cut[best] - true[best]),
        "precision": float(true[best] / cut[best]),
        "precision_low": lows[best],
    }
    none = f"none of {len(grid.points)} points has a"
    if by == "point":
        return f"{none} precision of {config.floor:g}: the best is {point}, with {counted}", nearest
    families, needed = len(np.unique(grid.family_P)), rule.fewest_cuts
    fewest = f"{needed} cuts" if needed is not None else f"more than {len(grid.table.tasks)} cuts"
    among = "" if families == 1 else f", for {families} pairs of signal and turn together"
    allowed = "without a single false cut" if not rule.forgiven else f"with at most {rule.forgiven} false cuts"
    reason = (
        f"{none} {config.confidence:.0%} lower bound of precision of {config.floor:g}{among}: the highest is "
        f"{lows[best]:.3f}, of {point} ({counted}); {allowed} it takes {fewest}"
    )
    return reason, nearest


def _recommend(choices: Sequence[Row]) -> tuple[Row | None, str | None]:
    """The choice over everything by the lower bound; else why there is none."""
    wanted = {"turn": None, "signals": "any", "scope": "actionable", "by": "lower_bound"}
    row = next(row for row in choices if all(row[key] == value for key, value in wanted.items()))
    if row["choice"] is None:
        return None, f"the data support no operating point among actionable groups: {row['reason']}"
    return row["choice"], None


def _checkpoints(table: GroupTable, config: CalibrationConfig) -> dict[str, Any] | None:
    turns = _divergence_turns(table)
    if not turns:
        return None
    plan = plan_checkpoints(table, turns, budget=config.budget, confidence=config.confidence)
    return {
        "signal": plan.signal,
        "budget": plan.budget,
        "confidence": plan.confidence,
        "looks": [
            {"turn": turn, "threshold": threshold, "lost_high": high}
            for turn, threshold, high in zip(plan.turns, plan.thresholds, plan.lost_high, strict=True)
        ],
        "guarantee": (
            f"with probability {plan.confidence:g} over this sample, at most {plan.budget:g} of the groups with mixed "
            "rewards are cut by any of the looks"
        ),
        **measure_plan(table, plan),
    }
