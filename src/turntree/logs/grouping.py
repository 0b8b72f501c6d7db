"""Rollouts that were logged apart, put back into their groups; only one group is in memory at a time.

A group is the rollouts of one task. So rows that one name groups, and that contradict each other about the task
(another gold answer, prompt, data source or agent), are several groups: as one, two tasks whose rewards are all equal
would pass for a task with a gradient.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from turntree.core.errors import InputError
from turntree.logs.groups import LoggedGroup
from turntree.logs.rows import LoggedRow, ReadReport, RowRefused, parse_row
from turntree.run.jsonl import read_lines
from turntree.run.opening import PACKED, opened

Key = tuple[int | None, str]


def by_rows(
    read: Callable[[dict[str, Any]], LoggedRow], paths: Sequence[Path], report: ReadReport
) -> Iterator[LoggedGroup]:
    """The groups of JSON lines of one rollout each. Every file is read twice: for the group of every line, then for the
    lines of one group after the other. A group whose rollouts lie in several files is several groups, which is said."""
    before: set[int] = set()
    for path in paths:
        report.files += 1
        here: set[int] = set()
        with LineIndex(path) as index:
            row = partial(_row, read)
            keys = _keys(path, row, index, report)
            yield from grouped(
                _noted(keys, here) if len(paths) > 1 else keys, partial(index.row, read=row), path, report
            )
        if not before.isdisjoint(here):
            report.note(
                "rollouts of one group and iteration lie in several files, each of which was read as a group of its own"
            )
        before |= here


def _noted(keys: Iterable[Key], here: set[int]) -> Iterator[Key]:
    """The keys, of which those that name their iteration are remembered as numbers."""
    for key in keys:
        if key[0] is not None:
            here.add(hash(key))
        yield key


def _row(read: Callable[[dict[str, Any]], LoggedRow], line: bytes) -> LoggedRow:
    try:
        return read(parse_row(line))
    except RecursionError as error:
        raise RowRefused("nested too deeply to read") from error


def _keys(path: Path, row: Callable[[bytes], LoggedRow], index: LineIndex, report: ReadReport) -> Iterator[Key]:
    for number, line in read_lines(path):
        report.saw_line()
        try:
            found = row(line)
        except RowRefused as refused:
            report.drop(refused.reason, path, number, detail=refused.detail)
            continue
        index.add(number, line)
        yield found.iteration, found.group


def grouped(
    keys: Iterable[Key], row_at: Callable[[int], LoggedRow], path: Path, report: ReadReport
) -> Iterator[LoggedGroup]:
    """The groups in order of iteration, then of first appearance (stable: a log in order stays in order).

    `keys`: iteration and group of every row. `row_at(i)` reads the i-th row, which is asked for when its group comes:
    asynchronous frameworks log rollouts in order of completion, so the rows of a group may lie anywhere in a file.
    """
    numbers: dict[Key, int] = {}
    group_of_row = array("q", (numbers.setdefault(key, len(numbers)) for key in keys))
    iterations = np.array([iteration or 0 for iteration, _ in numbers], dtype=np.int64)
    del numbers
    order = np.argsort(iterations, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    rows = np.argsort(place[np.asarray(group_of_row)], kind="stable")
    ends = np.cumsum(np.bincount(group_of_row)[order]) if len(order) else []
    start = 0
    for end in ends:
        members = [row_at(int(i)) for i in rows[start:end]]
        start = end
        for number, (told, alike) in enumerate(_apart(members, path, report).items(), start=1):
            most = max(alike, key=lambda row: len(row.facts))  # a row may lack what others know
            report.saw_group(len(alike))
            again = f" ({number})" if number > 1 else ""
            yield LoggedGroup(
                id=(most.group if most.iteration is None else f"{most.iteration}/{most.group}") + again,
                task=report.task(most.task, hash(told.facts)),
                rollouts=tuple(row.rollout for row in alike),
                iteration=most.iteration,
                task_type=most.task_type,
            )


class _Told(NamedTuple):
    """What the rows of a group have in common, beside its name."""

    facts: tuple[tuple[str, int], ...]
    name: str | None
    collection: int


def _apart(members: Sequence[LoggedRow], path: Path, report: ReadReport) -> dict[_Told, list[LoggedRow]]:
    """The rows that one name groups, told apart where they contradict each other: the rewards of two tasks say nothing
    about whether those of either are equal. A row that lacks a fact in which the others differ is dropped."""
    values: dict[str, set[int]] = {}
    for name, value in (fact for row in members for fact in row.facts.items()):
        values.setdefault(name, set()).add(value)
    differing = [name for name, found in values.items() if len(found) > 1]
    same = {name: value for name, found in values.items() if len(found) == 1 for value in found}
    names = Counter(row.name for row in members)
    seen: Counter[tuple[Any, ...]] = Counter()
    groups: dict[_Told, list[LoggedRow]] = {}
    for row in members:
        if lacking := [name for name in differing if name not in row.facts]:
            report.drop(f"no {lacking[0]!r} where rows of one name differ in it: its group is not known", path)
            continue
        facts = tuple(sorted({**same, **row.facts}.items()))
        name = row.name if len(names) < len(members) else None
        place = facts, name, row.sample
        told = _Told(facts, name, seen[place] if row.sample is not None else 0)
        seen[place] += 1
        groups.setdefault(told, []).append(row)
    if len(groups) > 1:
        what = differing or ["uid" if len({told.name for told in groups}) > 1 else "rollout index"]
        report.apart[f"rows of one group that differ in {', '.join(what)}"] += 1
    return groups


class LineIndex:
    """Where the lines of a file begin, so that they can be read again in any order: 8 bytes a line. What is compressed
    cannot be entered in the middle and is unpacked into a temporary file (in TMPDIR)."""

    def __init__(self, path: Path) -> None:
        self._path, self._starts = path, array("q")
        self._copied = path.suffix in PACKED
        self._held = contextlib.ExitStack()
        unpacked = tempfile.TemporaryFile() if self._copied else opened(path, packed=False)  # noqa: SIM115
        self._file: IO[bytes] = self._held.enter_context(unpacked)
        self._at = self._line = 0

    def __enter__(self) -> LineIndex:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def add(self, number: int, line: bytes) -> None:
        """Remember line `number` (from 1, in ascending order), which a reader has just read."""
        if self._copied:
            self._starts.append(self._at)
            self._at += self._write(line if line.endswith(b"\n") else line + b"\n")
            return
        while self._line < number:
            start, self._line = self._at, self._line + 1
            self._at += len(self._file.readline())
            if self._line == number:
                self._starts.append(start)

    def _write(self, line: bytes) -> int:
        try:
            return self._file.write(line)
        except OSError as error:
            free = shutil.disk_usage(tempfile.gettempdir()).free // 1_000_000
            problem = f"cannot be unpacked into {tempfile.gettempdir()} ({free} MB are free)"
            raise InputError(problem, path=self._path, hint="set TMPDIR to a folder with more room") from error

    def __getitem__(self, i: int) -> bytes:
        """The i-th line that was added."""
        self._file.seek(self._starts[i])
        return self._file.readline()

    def row(self, i: int, read: Callable[[bytes], LoggedRow]) -> LoggedRow:
        try:
            return read(self[i])
        except RowRefused as error:  # it was read before
            raise InputError("changed while it was read", path=self._path, hint="wait until it is written") from error
