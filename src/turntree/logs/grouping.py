"""Rollouts that were logged apart, put back into their groups; only one group is in memory at a time.

A group is the rollouts of one task. So rows that one name groups, and that contradict each other about the task
(another gold answer, prompt, data source or agent), are several groups: as one, two tasks whose rewards are all equal
would pass for a task with a gradient.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from turntree.core.errors import InputError, disk_is_full
from turntree.logs.groups import LoggedGroup, LoggedRollout
from turntree.logs.rows import LoggedRow, ReadReport, RowRefused, parse_row, read_rows, step_of

T = TypeVar("T")


def by_rows(
    read: Callable[[dict[str, Any]], LoggedRow], paths: Sequence[Path], report: ReadReport
) -> Iterator[LoggedGroup]:
    """The groups of JSON lines of one rollout each. A group whose rollouts lie in several files is several groups,
    which is said."""
    before: set[int] = set()
    for path in paths:
        here: set[int] = set()
        for group in grouped(read_each(read, parsed(path, report), path, report), path, report):
            here.add(hash(group.id))  # numbers, not names
            yield group
        if not before.isdisjoint(here):
            report.note(
                "groups of one name lie in several files, and each file was read as groups of its own: where they are "
                "one group, put its rollouts into one file, or give every step an `iteration`"
            )
        before |= here


def by_steps(
    read: Callable[[dict[str, Any]], LoggedRow], paths: Sequence[Path], report: ReadReport
) -> Iterator[LoggedGroup]:
    """The groups of files of one step each: the step that a name tells, else the number of the file."""
    for number, path in enumerate(paths):
        step = step_of(path)
        at = number if step is None else step
        yield from by_rows(lambda row, at=at: replace(read(row), iteration=at), [path], report)


def parsed(path: Path, report: ReadReport) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file of JSON lines, each with the number of its line; what is none is dropped and counted."""
    for number, line in read_rows(path):
        report.saw_line()
        try:
            yield number, parse_row(line)
        except RowRefused as refused:
            report.drop(refused.reason, path, number, detail=refused.detail)


def read_each(
    read: Callable[[T], LoggedRow], found: Iterable[tuple[int | None, T]], path: Path, report: ReadReport
) -> Iterator[LoggedRow]:
    """The rollout of everything that was found, with its line; what is none is dropped and counted."""
    for number, one in found:
        try:
            yield read(one)
        except RowRefused as refused:
            report.drop(refused.reason, path, number, detail=refused.detail)
        except RecursionError:
            report.drop("nested too deeply to read", path, number)


def grouped(rows: Iterable[LoggedRow], path: Path, report: ReadReport) -> Iterator[LoggedGroup]:
    """The groups in order of iteration, then of first appearance (stable: a log in order stays in order).

    Asynchronous frameworks log rollouts in order of completion, so the rows of a group may lie anywhere in a file. They
    wait in a temporary file (of SQLite, in TMPDIR) until their group comes.
    """
    for members in _gathered(rows, path):
        for number, (told, alike) in enumerate(_apart(members, path, report).items(), start=1):
            most = max(alike, key=lambda row: len(row.facts))  # a row may lack what others know
            rollouts = _rollouts(alike) if told.name is None else tuple(row.rollout for row in alike)
            report.saw_group(len(rollouts))
            again = f" ({number})" if number > 1 else ""
            yield LoggedGroup(
                id=(most.group if most.iteration is None else f"{most.iteration}/{most.group}") + again,
                task=report.task(most.task or most.group, hash(told.facts)),
                rollouts=rollouts,
                iteration=most.iteration,
                task_type=most.task_type,
            )


def _rollouts(rows: Sequence[LoggedRow]) -> tuple[LoggedRollout, ...]:
    outputs: dict[Any, list[LoggedRow]] = {}
    for number, row in enumerate(rows):
        outputs.setdefault(number if row.whole is None else row.whole, []).append(row)
    return tuple(_joined([row.rollout for row in sorted(one, key=lambda row: row.output)]) for one in outputs.values())


def _joined(outputs: Sequence[LoggedRollout]) -> LoggedRollout:
    """The rollout of these outputs, which begin anew where its context was compacted."""
    if len(outputs) == 1:
        return outputs[0]
    apart = all(output.actions for output in outputs)
    lists = {name: [getattr(output, name) for output in outputs] for name in ("actions", "observations", "turn_tokens")}
    totals = {name: [getattr(output, name) for output in outputs] for name in ("tokens", "characters")}
    joined = {name: None if None in found or not apart else tuple(chain(*found)) for name, found in lists.items()}
    joined["actions"] = joined["actions"] or ()
    summed = {name: None if None in found else sum(found) for name, found in totals.items()}
    return replace(outputs[-1], **joined, **summed, suspect=next((one.suspect for one in outputs if one.suspect), None))


def _gathered(rows: Iterable[LoggedRow], path: Path) -> Iterator[list[LoggedRow]]:
    numbers: dict[tuple[int | None, str], int] = {}
    try:
        with contextlib.closing(sqlite3.connect("")) as waiting:
            waiting.execute("create table waiting (iteration integer, number integer, row text)")
            waiting.executemany(
                "insert into waiting values (?, ?, ?)",
                (
                    (row.iteration or 0, numbers.setdefault((row.iteration, row.group), len(numbers)), _packed(row))
                    for row in rows
                ),
            )
            numbers.clear()
            waiting.execute("create index place on waiting (iteration, number)")
            found = waiting.execute("select number, row from waiting order by iteration, number, rowid")
            for _, members in groupby(found, key=lambda pair: pair[0]):
                yield [_unpacked(row) for _, row in members]
    except sqlite3.Error as error:
        if not disk_is_full(error):
            raise
        problem = "cannot be put into groups: the disk of temporary files is full"
        raise InputError(problem, path=path, hint="set TMPDIR to a folder with more room") from error


def _packed(row: LoggedRow) -> str:
    held = {**vars(row), "facts": dict(row.facts), "rollout": vars(row.rollout)}
    return json.dumps(held, default=lambda value: value.item())  # a number of numpy


def _unpacked(text: str) -> LoggedRow:
    held = json.loads(text)
    rollout: dict[str, Any] = held["rollout"]
    rollout |= {name: tuple(value) for name, value in rollout.items() if isinstance(value, list)}
    return LoggedRow(**{**held, "rollout": LoggedRollout(**rollout)})


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
