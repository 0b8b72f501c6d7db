"""`turntree gate calibrate`: which operating point, if any, a buffer of finished groups supports."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turntree.decide.gates.selection import THRESHOLDS, Criterion, Grid, Rule, Scope, grid_points, nested
from turntree.decide.gates.sweep import PAPER_SIGNAL, TERMINATION, Mask, Point, Row, cut_mask, measure, nominal, sweep
from turntree.decide.gates.table import GroupTable
from turntree.run.statistics import (
    auroc,
    clopper_pearson_high,
    clopper_pearson_low,
    percentile_interval,
    resampled,
    spearman,
)

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
    looks = plan_checkpoints(table, turns, budget=config.budget, confidence=config.confidence)
    return {
        "signal": PAPER_SIGNAL,
        "budget": config.budget,
        "confidence": config.confidence,
        "looks": looks,
        "guarantee": (
            f"with probability {config.confidence:g} over this sample, at most {config.budget:g} of the groups with "
            "mixed rewards are cut by any of the looks"
        ),
        **measure_plan(table, looks),
    }


# how well each signal at each turn tells groups with mixed rewards from those without variance


def associations(table: GroupTable, *, resamples: int, seed: int) -> list[Row]:
    """AUROC and Spearman's rho of every signal at every turn, overall and by task type (paper, tables 7 and 8).

    AUROC: chance that a mixed group has the higher raw signal than one without variance, ties a half; below 0.5 for
    signals that fall with variance. Spearman: against the population variance of the rewards. None where a class is
    empty or a side is constant. The interval is a percentile bootstrap over tasks, of the overall AUROC.
    """
    mixed_N = ~table.zero_variance_N
    samples = list(resampled(table.tasks, resamples=resamples, seed=seed))
    types = _types(table)
    rows: list[Row] = []
    for name, values_NK in table.signals_NK.items():
        for column, turn in enumerate(table.turns):
            values = values_NK[:, column]
            drawn = [auroc(values[sample], mixed_N[sample]) for sample in samples]
            rows.append(
                {
                    "signal": name,
                    "turn": turn,
                    **_pair(values, mixed_N, table.reward_var_N),
                    "auroc_interval": percentile_interval([value for value in drawn if value is not None]),
                    "task_types": {
                        kind: _pair(values[mask], mixed_N[mask], table.reward_var_N[mask])
                        for kind, mask in types.items()
                    },
                }
            )
    return rows


def task_type_sizes(table: GroupTable) -> dict[str, dict[str, int]]:
    """Groups of each type, and how many of them have no variance."""
    zero = table.zero_variance_N
    return {
        kind: {"groups": int(mask.sum()), "zero_variance": int((mask & zero).sum())}
        for kind, mask in _types(table).items()
    }


def by_task_type(table: GroupTable, cut_N: NDArray[np.bool_]) -> dict[str, dict[str, int]]:
    """Of each type: groups cut, and how many of them had no variance (tp) or mixed rewards (fp)."""
    zero, found = table.zero_variance_N, dict[str, dict[str, int]]()
    for kind, mask in _types(table).items():
        cut = cut_N & mask
        found[kind] = {"cut": int(cut.sum()), "tp": int((cut & zero).sum()), "fp": int((cut & ~zero).sum())}
    return found


def _types(table: GroupTable) -> dict[str, NDArray[np.bool_]]:
    """Where each task type stands, the most frequent first."""
    known = [kind for kind in table.task_types if kind is not None]
    order: Sequence[str] = sorted(set(known), key=lambda kind: (-known.count(kind), kind))
    return {kind: np.array([each == kind for each in table.task_types]) for kind in order}


def _pair(values: NDArray[np.float64], mixed: NDArray[np.bool_], variance: NDArray[np.float64]) -> Row:
    return {"auroc": auroc(values, mixed), "spearman": spearman(values, variance)}


# several looks at a group, with a budget for the groups that they may wrongly cut together


def plan_checkpoints(
    table: GroupTable, turns: Sequence[int], *, budget: float = 0.1, confidence: float = 0.95
) -> list[Row]:
    """The largest thresholds at `turns` that together cut at most `budget` of the groups with something to teach.

    Guarantee: if groups are independent and come as they did here, then with probability `confidence` over this
    sample, a group with mixed rewards is cut by any of the checkpoints with probability at most `budget`. Both the
    budget and the error 1 - confidence are split evenly over the checkpoints. At each, the share of mixed groups that
    are cut can only grow with the threshold. So for the largest threshold of a fixed grid whose exact upper bound
    (Clopper-Pearson, one-sided) is within its part of the budget, the error is at most its part, however many
    thresholds were tried. The union bound adds these parts up.

    Each look has its `turn`, `threshold` (None where the data support none) and `lost_high`, which bounds the share of
    groups with something to teach that it cuts, at its part of the confidence.
    """
    mixed = ~table.zero_variance_N
    part, sure = budget / len(turns), 1 - (1 - confidence) / len(turns)
    looks: list[Row] = []
    for turn in turns:
        live = mixed & table.actionable_NK[:, table.column(turn)]
        chosen, bound = None, clopper_pearson_high(0, int(mixed.sum()), sure)
        for threshold in THRESHOLDS:
            lost = int((cut_mask(table, Point(turn=turn, threshold=threshold)) & live).sum())
            high = clopper_pearson_high(lost, int(mixed.sum()), sure)
            if high > part:
                break
            chosen, bound = threshold, high
        looks.append({"turn": turn, "threshold": chosen, "lost_high": bound})
    return looks


def measure_plan(table: GroupTable, looks: Sequence[Row]) -> Row:
    """Which of these groups the looks cut, each at the first turn that cuts it; `safe` and `raw` as in `measure`, over
    actionable groups."""
    open_N = np.ones(len(table.tasks), dtype=bool)
    cut = tp = 0
    safe = raw = 0.0
    for look in looks:
        if look["threshold"] is None:
            continue
        turn, part = look["turn"], nominal(table, look["turn"])
        now = open_N & cut_mask(table, Point(turn=turn, threshold=look["threshold"]))
        now &= table.actionable_NK[:, table.column(turn)]
        true = int((now & table.zero_variance_N).sum())
        cut, tp, open_N = cut + int(now.sum()), tp + true, open_N & ~now
        safe += true * part
        raw += int(now.sum()) * part
    precision = tp / cut if cut else None
    return {"cut": cut, "tp": tp, "fp": cut - tp, "precision": precision, "safe": safe, "raw": raw}
