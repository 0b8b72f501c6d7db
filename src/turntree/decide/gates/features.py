"""Per-group feature tables: a CSV with one row for every group and turn, such as the authors of the paper publish."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from turntree.core.errors import InputError
from turntree.core.outcome import GroupOutcome
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
    group: tuple[str, str]  # task and iteration
    outcome: GroupOutcome
    signals: dict[str, float]


def read_features(path: Path, *, max_turns: int = PAPER_HORIZON, turns: Sequence[int] | None = None) -> GroupTable:
    """Read a feature table. Columns:

    - `K` (the turn), `task_id`, `label` (mixed, all_fail or all_succeed), and any of the seven signals by name;
    - optionally `iteration`, which distinguishes groups of one task.

    Other columns are not read. Every group needs a row at every K. The table has no lengths: savings are nominal
    (`max_turns` - K turns). A group counts as actionable unless every rollout ended before turn K
    (`termination_fraction` 1); a group that ends exactly at turn K counts too. Raises `InputError` naming line and
    field, and where the table lacks one of `turns`.
    """
    groups: dict[tuple[str, str], dict[int, _Row]] = {}
    for row in _rows(path):
        group = groups.setdefault(row.group, {})
        first = next(iter(group.values()), row)
        if row.turn in group:
            raise InputError(
                f"{row.group[0]!r} has a row at K = {row.turn} already", path=path, line=row.line, field="task_id",
                hint="give the groups of one task a column 'iteration'",
            )  # fmt: skip
        if row.outcome is not first.outcome:
            problem = f"{row.group[0]!r} has another value in line {first.line}"
            raise InputError(problem, path=path, line=row.line, field="label", hint="it is one per group")
        group[row.turn] = row
    held = sorted({turn for group in groups.values() for turn in group})
    for (task, _), group in groups.items():
        lacking = next((turn for turn in held if turn not in group), None)
        if lacking is not None:
            line, hint = next(iter(group.values())).line, "every group needs a row at every K of the table"
            raise InputError(f"{task!r} has no row at K = {lacking}", path=path, line=line, field="K", hint=hint)
    chosen = tuple(sorted(set(turns or held)))
    unknown = next((turn for turn in chosen if turn not in held), None)
    if unknown is not None:
        raise InputError(f"has no signals at turn {unknown}", path=path, hint=f"use one of {', '.join(map(str, held))}")
    last = [group[held[-1]] for group in groups.values()]
    signals = {
        name: np.array([[group[turn].signals[name] for turn in chosen] for group in groups.values()])
        for name in (last[0].signals if last else ())
    }
    ended = signals.get("termination_fraction")
    absent = {name: "no such column" for name in SIGNALS if name not in signals}
    return GroupTable(
        source=str(path),
        max_turns=max_turns,
        turns=chosen,
        tasks=tuple(row.group[0] for row in last),
        outcomes=tuple(row.outcome for row in last),
        sizes_N=np.ones(len(last)),
        signals_NK=signals,
        actionable_NK=np.ones((len(last), len(chosen)), dtype=bool) if ended is None else ended < 1,
        absent={**absent, "turns": NO_LENGTHS, "tokens": NO_LENGTHS},
    )


def _rows(path: Path) -> Iterator[_Row]:
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        present = _signals(path, list(reader.fieldnames or ()))
        for row in reader:
            yield _parsed(path, reader.line_num, row, present)
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
    present = [name for name in SIGNALS if name in columns]
    if not present:
        hint = f"a feature table has at least one of {', '.join(SIGNALS)}"
        raise InputError("has no column with a signal", path=path, line=1, hint=hint)
    return present


def _parsed(path: Path, line: int, row: dict[str, str], present: list[str]) -> _Row:
    if None in row or None in row.values():
        raise InputError("has another number of fields than the header", path=path, line=line, hint="fix the row")
    turn = _number(path, line, row, "K", least=1)
    if turn != int(turn) or turn > _LAST_TURN:
        raise InputError(f"{row['K']!r} is not a whole number of turns", path=path, line=line, field="K")
    label = row["label"]
    if label not in OUTCOMES:
        raise InputError(f"{label!r} is not an outcome", path=path, line=line, field="label", hint=", ".join(OUTCOMES))
    signals = {name: _number(path, line, row, name) for name in present}
    return _Row(line, int(turn), (row["task_id"], row.get("iteration", "")), GroupOutcome(label), signals)


def _number(path: Path, line: int, row: dict[str, str], field: str, least: float = 0.0) -> float:
    try:
        value = float(row[field])
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < least:
        problem = f"{row[field]!r} is not a number of at least {least:g}"
        raise InputError(problem, path=path, line=line, field=field, hint="correct the value")
    return value
