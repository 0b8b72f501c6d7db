"""Per-group feature tables: a CSV with one row for every group and turn, such as the authors of the paper publish."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from turntree.core.errors import InputError
from turntree.core.outcome import REWARD_TOLERANCE, GroupOutcome
from turntree.decide.gates.signals import SIGNALS
from turntree.decide.gates.table import GroupTable
from turntree.run.jsonl import read_text

PAPER_HORIZON = 30
_LAST_TURN = 1_000_000  # no episode is longer
OUTCOMES = (GroupOutcome.MIXED, GroupOutcome.ALL_FAIL, GroupOutcome.ALL_SUCCEED)
NO_LENGTHS = "the table has no turn or token counts of the rollouts"


@dataclass(frozen=True)
class _Row:
    line: int
    turn: int
    task: str
    iteration: str
    outcome: GroupOutcome
    reward_var: float
    task_type: str | None
    signals: dict[str, float]


def read_features(path: Path, *, max_turns: int = PAPER_HORIZON) -> GroupTable:
    """Read a feature table. Columns:

    - `K` (the turn), `task_id`, `label` (mixed, all_fail or all_succeed), and any of the seven signals by name;
    - optionally `iteration` (distinguishes groups of one task), `task_type` and `reward_var` (else from the label: 1 or
      0, which leaves Spearman's correlation without its order among mixed groups).

    Other columns are not read. Every group needs a row at every K. The table has no lengths: savings are nominal
    (`max_turns` - K turns). A group counts as actionable unless every rollout ended before turn K
    (`termination_fraction` 1); a group that ends exactly at turn K counts too. Raises `InputError` naming line and
    field.
    """
    rows = list(_rows(path))
    turns = tuple(sorted({row.turn for row in rows}))
    groups: dict[tuple[str, str], dict[int, _Row]] = {}
    for row in rows:
        group = groups.setdefault((row.task, row.iteration), {})
        if row.turn in group:
            raise InputError(
                f"{row.task!r} has a row at K = {row.turn} already", path=path, line=row.line, field="task_id",
                hint="give the groups of one task a column 'iteration'",
            )  # fmt: skip
        group[row.turn] = row
    for (task, _), group in groups.items():
        _check(path, task, group, turns)
    last = [group[turns[-1]] for group in groups.values()]
    names = sorted(set.intersection(*(set(row.signals) for row in rows)), key=list(SIGNALS).index) if rows else []
    signals = {
        name: np.array([[group[turn].signals[name] for turn in turns] for group in groups.values()]) for name in names
    }
    ended = signals.get("termination_fraction")
    absent = {name: "no such column" for name in SIGNALS if name not in signals}
    return GroupTable(
        source=str(path),
        max_turns=max_turns,
        turns=turns,
        tasks=tuple(row.task for row in last),
        task_types=tuple(row.task_type for row in last),
        outcomes=tuple(row.outcome for row in last),
        reward_var_N=np.array([row.reward_var for row in last]),
        sizes_N=np.ones(len(last)),
        signals_NK=signals,
        actionable_NK=np.ones((len(last), len(turns)), dtype=bool) if ended is None else ended < 1,
        absent={**absent, "turns": NO_LENGTHS, "tokens": NO_LENGTHS},
    )


def _rows(path: Path) -> Iterator[_Row]:
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        known = _signals(path, list(reader.fieldnames or ()))
        for row in reader:
            yield _parsed(path, reader.line_num, row, known)
    except csv.Error as error:
        raise InputError(f"is not CSV ({error})", path=path, line=reader.line_num) from error


def _signals(path: Path, columns: list[str]) -> list[str]:
    """The columns of signals. Raises `InputError` for a header that misses a column or names one twice."""
    for needed in ("K", "task_id", "label"):
        if needed not in columns:
            raise InputError("the column is missing", path=path, line=1, field=needed, hint="see `read_features`")
    twice = next((name for place, name in enumerate(columns) if name in columns[:place]), None)
    if twice is not None:
        raise InputError("the column is there twice", path=path, line=1, field=twice, hint="remove one")
    known = [name for name in SIGNALS if name in columns]
    if not known:
        hint = f"a feature table has at least one of {', '.join(SIGNALS)}"
        raise InputError("has no column with a signal", path=path, line=1, hint=hint)
    return known


def _parsed(path: Path, line: int, row: dict[str, str], known: list[str]) -> _Row:
    if None in row or None in row.values():
        raise InputError("has another number of fields than the header", path=path, line=line, hint="fix the row")
    turn = _number(path, line, row, "K", least=1)
    if turn != int(turn) or turn > _LAST_TURN:
        raise InputError(f"{row['K']!r} is not a whole number of turns", path=path, line=line, field="K")
    label = row["label"]
    if label not in OUTCOMES:
        raise InputError(
            f"{label!r} is not an outcome", path=path, line=line, field="label", hint=f"{', '.join(OUTCOMES)}"
        )
    outcome = GroupOutcome(label)
    variance = 0.0 if outcome.zero_variance else 1.0
    if "reward_var" in row:
        variance = _number(path, line, row, "reward_var")
        if (variance <= REWARD_TOLERANCE) != outcome.zero_variance:
            problem = f"{row['reward_var']} contradicts the label {label!r}"
            raise InputError(problem, path=path, line=line, field="reward_var", hint="correct one of them")
    signals = {name: _number(path, line, row, name) for name in known}
    task_type = row.get("task_type") or None
    return _Row(line, int(turn), row["task_id"], row.get("iteration", ""), outcome, variance, task_type, signals)


def _number(path: Path, line: int, row: dict[str, str], field: str, least: float = 0.0) -> float:
    try:
        value = float(row[field])
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < least:
        problem = f"{row[field]!r} is not a number of at least {least:g}"
        raise InputError(problem, path=path, line=line, field=field, hint="correct the value")
    return value


def _check(path: Path, task: str, group: dict[int, _Row], turns: tuple[int, ...]) -> None:
    first = next(iter(group.values()))
    for turn in turns:
        if turn not in group:
            hint = "every group needs a row at every K of the table"
            raise InputError(f"{task!r} has no row at K = {turn}", path=path, line=first.line, field="K", hint=hint)
    for row in group.values():
        for name in ("outcome", "reward_var", "task_type"):
            if getattr(row, name) != getattr(first, name):
                field = "label" if name == "outcome" else name
                problem = f"{task!r} has another value in line {first.line}"
                raise InputError(problem, path=path, line=row.line, field=field, hint="it is one per group")
