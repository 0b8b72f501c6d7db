"""What a gate would have done to finished groups: the columns of the paper's Table 1, and the real savings of cuts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turntree.core.errors import InputError
from turntree.decide.gates.table import GroupTable
from turntree.run.statistics import clopper_pearson_low

PAPER_SIGNAL = "prefix_edit_distance_mean"
TERMINATION = "termination_fraction"
Row = dict[str, Any]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Point:
    """A rule: cut at `turn` if `signal < threshold`, or if the termination fraction is at least `termination`.

    `threshold` 0 leaves the second clause alone, `termination` None the first.
    """

    turn: int
    threshold: float
    signal: str = PAPER_SIGNAL
    termination: float | None = None

    def __str__(self) -> str:
        clauses = [f"{self.signal} < {self.threshold:g}"] if self.threshold > 0 or self.termination is None else []
        clauses += [] if self.termination is None else [f"{TERMINATION} >= {self.termination:g}"]
        return f"{' or '.join(clauses)} at turn {self.turn}"


def single_point(signal: str, threshold: float, turn: int) -> Point:
    """The rule that cuts on one signal: below the threshold, or from it on where a larger value means converged."""
    if signal == TERMINATION:
        return Point(turn=turn, threshold=0.0, termination=threshold)
    return Point(turn=turn, threshold=threshold, signal=signal)


def cut_mask(table: GroupTable, point: Point) -> Mask:
    """(N,) groups that fulfil the rule, actionable or not."""
    column = table.column(point.turn)
    cut = _signal(table, point.signal)[:, column] < point.threshold
    if point.termination is None:
        return cut
    return cut | (_signal(table, TERMINATION)[:, column] >= point.termination)


def measure(table: GroupTable, cut_N: Mask, turn: int, *, confidence: float = 0.95) -> Row:
    """Table 1 of the paper for the groups `cut_N` at `turn`, over all of them and over the actionable ones.

    All shares are fractions. With N groups, horizon T and K = turn:

    - `precision` = tp / cut, `recall` = tp / zero-variance groups (None where there is nothing to divide by), and
      `precision_low` the exact one-sided lower bound of the former (Clopper-Pearson, for a point chosen beforehand);
    - `safe` = tp (T - K) / (N T), `raw` = cut (T - K) / (N T): turns saved if every rollout were T long;
    - `l2_preserved` = |A kept| / |A all| over the advantages of Eq. 1. A mixed group of G rollouts has |A|^2 = G
      whatever its rewards, so this is the root of the kept share of the rollouts in mixed groups.

    `actionable` holds the same for the groups that the gate would really have cut; `nothing_left` are the others.
    `saved` holds, per unit that the data have (turns, tokens), the shares of all that was spent.
    """
    actionable = cut_N & table.actionable_NK[:, table.column(turn)]
    zero = table.zero_variance_N
    counted = counts(table, cut_N, turn, confidence)
    live = counts(table, actionable, turn, confidence)
    live["nothing_left"] = int(cut_N.sum() - actionable.sum())
    mixed = float(table.sizes_N[~zero].sum())
    lost = float(table.sizes_N[~zero & actionable].sum())
    live["l2_preserved"] = math.sqrt(1 - lost / mixed) if mixed else None
    lost = float(table.sizes_N[~zero & cut_N].sum())
    counted["l2_preserved"] = math.sqrt(1 - lost / mixed) if mixed else None
    return {**counted, "actionable": live, "saved": _saved(table, cut_N, turn)}


def counts(table: GroupTable, cut_N: Mask, turn: int, confidence: float) -> Row:
    zero = table.zero_variance_N
    cut, tp = int(cut_N.sum()), int((cut_N & zero).sum())
    positives, turns = int(zero.sum()), nominal(table, turn)
    return {
        "cut": cut,
        "tp": tp,
        "fp": cut - tp,
        "precision": tp / cut if cut else None,
        "precision_low": clopper_pearson_low(tp, cut, confidence),
        "recall": tp / positives if positives else None,
        "safe": tp * turns,
        "raw": cut * turns,
    }


def nominal(table: GroupTable, turn: int) -> float:
    """The share of all turns that one group cut at `turn` saves if every rollout is as long as the horizon."""
    return max(0, table.max_turns - turn) / (len(table.tasks) * table.max_turns)


def sweep(
    table: GroupTable,
    thresholds: Sequence[float],
    *,
    turn: int,
    signal: str = PAPER_SIGNAL,
    termination: float | None = None,
) -> list[Row]:
    """One row a threshold, in the given order. Raises `InputError` where the table lacks the turn or the signal."""
    if termination is not None and signal == TERMINATION:
        raise InputError(f"{TERMINATION} is already the second clause of the OR rule", hint="choose another signal")
    rows: list[Row] = []
    for threshold in thresholds:
        point = single_point(signal, threshold, turn)
        if termination is not None:
            point = replace(point, termination=termination)
        rows.append({"threshold": threshold, **measure(table, cut_mask(table, point), turn)})
    return rows


def _signal(table: GroupTable, name: str) -> NDArray[np.float64]:
    if name not in table.signals_NK:
        hint = table.absent.get(name, f"it has {', '.join(table.signals_NK)}")
        raise InputError(f"does not have the signal {name!r}", path=table.source, hint=hint)
    return table.signals_NK[name]


def _saved(table: GroupTable, cut_N: Mask, turn: int) -> dict[str, Row | None]:
    column, found = table.column(turn), dict[str, Row | None]()
    for unit in ("turns", "tokens"):
        kind = next((savings for savings in table.savings if savings.unit == unit), None)
        if kind is None:
            found[unit] = None
            continue
        after = kind.after_NK[:, column]
        safe, raw = float(after[cut_N & table.zero_variance_N].sum()), float(after[cut_N].sum())
        share = 1 / kind.total if kind.total else 0.0
        found[unit] = {"safe": safe * share, "raw": raw * share, "amount": raw, "of": kind.total}
    return found
