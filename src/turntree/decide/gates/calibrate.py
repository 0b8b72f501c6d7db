"""`turntree gate calibrate`: what thresholds would have cut of finished groups, and the operating point they support.

The paper counts every group that fulfils a rule as cut. A cut is *actionable* where a rollout continued after that
turn; only those save anything, so the operating point is chosen among them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from turntree.core.config import Between, Bounded, Part, Positive, Share
from turntree.core.errors import InputError
from turntree.decide.gates.signals import PRINTED
from turntree.decide.gates.table import GroupTable, table_from_groups
from turntree.logs.read import AUTO, open_log
from turntree.run.statistics import clopper_pearson_low, successes_needed

PAPER_SIGNAL = "prefix_edit_distance_mean"
TERMINATION = "termination_fraction"
TABLE_1 = (0.05, 0.08, 0.10, 0.12, 0.14, 0.18)  # the thresholds of the paper's Table 1
GRID = tuple(step / 100 for step in range(1, 101))
GROUPS_PER_FALSE_CUT = 150  # a test begins where it forgives one false cut for so many groups
BOUND = "Clopper-Pearson, one-sided, for all signals, turns and thresholds together"
Row = dict[str, Any]
Mask = NDArray[np.bool_]
Counts = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Point:
    """A rule: cut at `turn` if `signal < threshold`, or if the termination fraction is at least `termination`, or at
    most `unended`. The authors number the four: R1 has neither clause, R2 `unended`, R3 `termination`, R4 both (E.9).

    `threshold` 0 leaves the other clauses alone. `ended` is the termination fraction that they look at.
    """

    turn: int
    threshold: float
    signal: str = PAPER_SIGNAL
    termination: float | None = None
    unended: float | None = None
    ended: str = TERMINATION

    @classmethod
    def of(cls, signal: str, threshold: float, turn: int) -> Point:
        """The rule that cuts on one signal: below the threshold, or from it on where a larger value means converged."""
        if signal.startswith(TERMINATION):
            return cls(turn=turn, threshold=0.0, termination=threshold, ended=signal)
        return cls(turn=turn, threshold=threshold, signal=signal)

    @property
    def decisive(self) -> str:
        """The signal whose threshold a point of the grid varies."""
        return self.signal if self.termination is None else self.ended

    def __str__(self) -> str:
        others = [] if self.termination is None else [f"{self.ended} >= {self.termination:g}"]
        others += [] if self.unended is None else [f"{self.ended} <= {self.unended:g}"]
        clauses = [*([f"{self.signal} < {self.threshold:g}"] if self.threshold > 0 or not others else []), *others]
        return f"{' or '.join(clauses)} at turn {self.turn}"


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig(Bounded):
    """`turntree gate calibrate`."""

    turns: tuple[Positive, ...] | None = None
    """Turns to evaluate, e.g. 5,10,15; default: 1/6, 1/3, 1/2, 2/3 of the horizon."""
    thresholds: tuple[float, ...] = TABLE_1
    """Of the table: cut below these; from these on for termination_fraction."""
    signal: str = PAPER_SIGNAL
    """Of the table: one of the seven signals, or NAME_printed where the paper's text defines it otherwise."""
    termination: Share | None = None
    """Of the table: cut also from this share of ended rollouts on (the OR rule)."""
    unended: Share | None = None
    """Of the table: cut also up to this share of ended rollouts (paper, E.9; with `termination` both clauses)."""
    floor: Annotated[float, Between(above=0, below=1)] = 0.8
    """Precision that a gate must have (paper, C.5)."""
    confidence: Annotated[float, Between(above=0, below=1)] = 0.95
    """Of the lower bound of precision."""
    max_turns: Positive | None = None
    """The horizon; default: the longest rollout."""
    log_format: Part = AUTO
    """Of a log, where its fields do not tell it: a registered format, or module:object of your own."""


def run_calibration(paths: Sequence[Path], config: CalibrateConfig) -> Row:
    """The result of `calibrate` on a rollout log (anything that `open_log` reads); `read` are the counts of the log."""
    log = open_log(paths, config.log_format)
    table = table_from_groups(list(log), source=str(paths[0]), max_turns=config.max_turns, turns=config.turns)
    return {**calibrate(table, config), "read": log.report.to_json()}


def calibrate(table: GroupTable, config: CalibrateConfig) -> Row:
    """The sweep and the operating point, as plain JSON values.

    `rows` are those of `sweep` at every turn. `recommended` is the supported operating point; None where `refused` says
    why there is none.
    """
    clauses = {"signal": config.signal, "termination": config.termination, "unended": config.unended}
    recommended, reason = operating_point(table, floor=config.floor, confidence=config.confidence)
    zero, tasks = int(table.zero_variance_N.sum()), len(set(table.tasks))
    return {
        "source": table.source,
        "groups": len(table.tasks),
        "tasks": tasks,
        "outcomes": dict(sorted(Counter(outcome.value for outcome in table.outcomes).items())),
        "zero_variance": zero,
        "zero_variance_rate": zero / len(table.tasks),
        "max_turns": table.max_turns,
        "turns": list(table.turns),
        "absent": table.absent,
        "dropped": table.dropped,
        **clauses,
        "rows": [row for turn in table.turns for row in sweep(table, config.thresholds, turn=turn, **clauses)],
        "floor": config.floor,
        "confidence": config.confidence,
        "bound": BOUND if len(table.tasks) == tasks else f"{BOUND}, on further groups of these tasks",
        "recommended": recommended,
        "refused": None if reason is None else {"reason": reason},
    }


def sweep(
    table: GroupTable,
    thresholds: Sequence[float],
    *,
    turn: int,
    signal: str = PAPER_SIGNAL,
    termination: float | None = None,
    unended: float | None = None,
) -> list[Row]:
    """The paper's Table 1: one row a threshold, in the given order (`termination`: of the OR rule, Eq. 3; `unended`: of
    its mirror, E.9). Raises `InputError` where the table lacks the signal."""
    if (termination, unended) != (None, None) and signal.startswith(TERMINATION):
        raise InputError(f"{TERMINATION} is already the second clause of the OR rule", hint="choose another signal")
    given = {"termination": termination, "unended": unended}
    clauses = {name: value for name, value in given.items() if value is not None}
    rows: list[Row] = []
    for threshold in thresholds:
        point = replace(Point.of(signal, threshold, turn), **clauses)
        rows.append({"turn": turn, "threshold": threshold, **measure(table, cut_mask(table, point), turn)})
    return rows


def cut_mask(table: GroupTable, point: Point) -> Mask:
    """(N,) groups that fulfil the rule, actionable or not."""
    column = table.turns.index(point.turn)
    cut = _signal(table, point.signal)[:, column] < point.threshold
    if point.termination is not None:
        cut = cut | (_signal(table, point.ended)[:, column] >= point.termination)
    if point.unended is not None:
        cut = cut | (_signal(table, point.ended)[:, column] <= point.unended)
    return cut


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
    live_N = cut_N & table.actionable_NK[:, table.turns.index(turn)]
    live = {**_counts(table, live_N, turn, confidence), "nothing_left": int(cut_N.sum() - live_N.sum())}
    return {**_counts(table, cut_N, turn, confidence), "actionable": live, "saved": _saved(table, cut_N, turn)}


def _counts(table: GroupTable, cut_N: Mask, turn: int, confidence: float) -> Row:
    zero = table.zero_variance_N
    cut, tp = int(cut_N.sum()), int((cut_N & zero).sum())
    positives, turns = int(zero.sum()), _nominal(table, turn)
    mixed, lost = (float(table.sizes_N[~zero & mask].sum()) for mask in (True, cut_N))
    return {
        "cut": cut,
        "tp": tp,
        "fp": cut - tp,
        "precision": tp / cut if cut else None,
        "precision_low": clopper_pearson_low(tp, cut, confidence),
        "recall": tp / positives if positives else None,
        "safe": tp * turns,
        "raw": cut * turns,
        "l2_preserved": math.sqrt(1 - lost / mixed) if mixed else None,
    }


def _nominal(table: GroupTable, turn: int) -> float:
    """The share of all turns that one group cut at `turn` saves if every rollout is as long as the horizon."""
    return max(0, table.max_turns - turn) / (len(table.tasks) * table.max_turns)


def _saved(table: GroupTable, cut_N: Mask, turn: int) -> dict[str, Row | None]:
    saved: dict[str, Row | None] = {"turns": None, "tokens": None}
    for kind in table.savings:
        after = kind.after_NK[:, table.turns.index(turn)]
        safe, raw = float(after[cut_N & table.zero_variance_N].sum()), float(after[cut_N].sum())
        share = 1 / kind.total if kind.total else 0.0
        saved[kind.unit] = {"safe": safe * share, "raw": raw * share, "amount": raw, "of": kind.total}
    return saved


def _signal(table: GroupTable, name: str) -> NDArray[np.float64]:
    if name not in table.signals_NK:
        hint = table.absent.get(name, f"it has {', '.join(table.signals_NK)}")
        raise InputError(f"does not have the signal {name!r}", path=table.source, hint=hint)
    return table.signals_NK[name]


# the choice of an operating point


def operating_point(table: GroupTable, *, floor: float, confidence: float) -> tuple[Row | None, str | None]:
    """The point whose true cuts save most among those whose precision has a lower bound of at least `floor`; else None
    and why.

    The bound holds for all signals, turns and thresholds together: with probability `confidence`, no point below the
    floor is recommended. The error is split evenly over the pairs of signal and turn (Bonferroni), and the thresholds
    of a pair are tested in a fixed sequence (`passing`). Where tasks have several groups, it holds for further groups
    of these tasks only.
    """
    grid = Grid.build(table)
    if not grid.points:
        return None, "the data support no operating point among actionable groups: no point of the grid cuts a group"
    zero = table.zero_variance_N
    sure = 1 - (1 - confidence) / grid.families
    cut_P, true_P = grid.cut_PN.sum(1), (grid.cut_PN & zero).sum(1)
    passed = grid.passing(zero, floor=floor, confidence=confidence)
    if passed:
        safe_P = (grid.worth_PN * (grid.cut_PN & zero)).sum(1)
        most = max(safe_P[index] for index in passed)
        # savings that differ only by rounding are ties, and ties go to the first point
        point = grid.points[next(index for index in passed if safe_P[index] >= most * (1 - 1e-9))]
        named = {"signal": point.decisive, "turn": point.turn, "threshold": point.threshold}
        measured = measure(table, cut_mask(table, point), point.turn, confidence=sure)
        return {"rule": str(point), **named, "termination": point.termination, **measured}, None
    lows = [clopper_pearson_low(int(t), int(c), sure) for t, c in zip(true_P, cut_P, strict=True)]
    best = int(np.argmax(lows))
    forgiven, needed = len(zero) // GROUPS_PER_FALSE_CUT, successes_needed(len(zero), floor, sure)
    enough = np.flatnonzero(np.arange(1, len(needed)) - needed[1:] >= forgiven)
    fewest = f"{enough[0] + 1} cuts" if len(enough) else f"more than {len(zero)} cuts"
    among = "" if grid.families == 1 else f", for {grid.families} pairs of signal and turn together"
    allowed = f"with at most {forgiven} false cuts" if forgiven else "without a single false cut"
    return None, (
        f"the data support no operating point among actionable groups: none of {len(grid.points)} points has a "
        f"{confidence:.0%} lower bound of precision of {floor:g}{among}: the highest is {lows[best]:.3f}, of "
        f"{grid.points[best]} ({true_P[best]} true of {cut_P[best]} cuts); {allowed} it takes {fewest}"
    )


@dataclass(frozen=True, kw_only=True)
class Grid:
    """P points on N groups: which groups each really cuts, and what a cut saves (a share of the total spent). A family
    is the thresholds of one signal at one turn, which cut more and more groups."""

    points: tuple[Point, ...]
    cut_PN: Mask
    worth_PN: NDArray[np.float64]
    family_P: Counts

    @classmethod
    def build(cls, table: GroupTable) -> Grid:
        """Every signal at every turn and threshold 0.01, 0.02 ... 1, without points that cut the same groups as an
        earlier point at the same turn."""
        distinct: dict[tuple[int, bytes], tuple[Point, Mask]] = {}
        names = [name for name in table.signals_NK if name not in PRINTED]
        for turn in table.turns:
            for point in (Point.of(name, value, turn) for name in names for value in GRID):
                mask = cut_mask(table, point) & table.actionable_NK[:, table.turns.index(turn)]
                if mask.any():
                    distinct.setdefault((turn, mask.tobytes()), (point, mask))
        worth = {turn: _worth(table, turn) for turn in table.turns}
        numbers: dict[tuple[int, str], int] = {}
        shape = (len(distinct), len(table.tasks))
        return cls(
            points=tuple(point for point, _ in distinct.values()),
            cut_PN=np.array([mask for _, mask in distinct.values()], dtype=bool).reshape(shape),
            worth_PN=np.array([worth[point.turn] for point, _ in distinct.values()]).reshape(shape),
            family_P=np.array(
                [numbers.setdefault((p.turn, p.decisive), len(numbers)) for p, _ in distinct.values()], dtype=np.int64
            ),
        )

    @property
    def families(self) -> int:
        return len(np.unique(self.family_P))

    def passing(self, zero_variance_N: Mask, *, floor: float, confidence: float) -> list[int]:
        """The points that a fixed-sequence test of every family reaches, in their order.

        A family is tested from few cuts to many; the first failure ends it, so its tests need no correction. Where it
        begins depends on the signals alone: at the first point that forgives a false cut for every 150 groups, so that
        one early mistake does not end the test of a large buffer.
        """
        groups = len(zero_variance_N)
        needed = successes_needed(groups, floor, 1 - (1 - confidence) / max(1, self.families))
        cut_P, true_P = self.cut_PN.sum(1), (self.cut_PN & zero_variance_N).sum(1)
        return passing(cut_P, true_P, self.family_P, needed, groups // GROUPS_PER_FALSE_CUT)


def passing(cut_P: Counts, true_P: Counts, family_P: Counts, needed: Counts, forgiven: int) -> list[int]:
    """`Grid.passing` on counts: a point with `cut` cuts passes with at least `needed[cut]` true ones, and is tested
    where `needed` forgives `forgiven` false ones."""
    passed: list[int] = []
    ended: set[int] = set()
    tested_P = cut_P - needed[cut_P] >= forgiven
    right_P = true_P >= needed[cut_P]
    for index in np.lexsort((cut_P, family_P)):
        if not tested_P[index] or int(family_P[index]) in ended:
            continue
        if right_P[index]:
            passed.append(int(index))
        else:
            ended.add(int(family_P[index]))
    return sorted(passed)


def _worth(table: GroupTable, turn: int) -> NDArray[np.float64]:
    """What a cut saves: the tokens generated after it, else the turns, else T - K turns of every rollout."""
    for unit in ("tokens", "turns"):
        for savings in table.savings:
            if savings.unit == unit and savings.total:
                return savings.after_NK[:, table.turns.index(turn)] / savings.total
    return np.full(len(table.tasks), _nominal(table, turn))
