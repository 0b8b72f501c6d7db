"""`open_log`: rollouts of any framework, found, recognised and read as one stream of groups."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from turntree.core.errors import InputError
from turntree.logs import generic, nemo_gym, rollouts, trees, trl, verl
from turntree.logs.grouping import Key, LineIndex, grouped
from turntree.logs.groups import LoggedGroup
from turntree.logs.report import ReadReport
from turntree.logs.rows import LoggedRow, ReadConfig, RowRefused, parse_row
from turntree.observe.jsonl import read_lines

RowReader = Callable[[dict[str, Any], ReadConfig, int], LoggedRow]
GroupReader = Callable[[Sequence[Path], ReadConfig, ReadReport], Iterator[LoggedGroup]]


class LogFormat(StrEnum):
    TURNTREE = "turntree"
    TREES = "trees"
    VERL = "verl"
    TRL = "trl"
    NEMO_GYM = "nemo-gym"
    GENERIC = "generic"


_MARKS: dict[LogFormat, frozenset[str]] = {
    LogFormat.TURNTREE: frozenset({"schema", "task", "rollouts"}),
    LogFormat.TREES: frozenset({"schema", "tree", "verdicts"}),
    LogFormat.VERL: frozenset({"input", "output", "score"}),
    LogFormat.NEMO_GYM: frozenset({"response", "reward"}),
    LogFormat.GENERIC: frozenset({"group", "reward"}),
}
"""The fields by which a line tells its format. TRL's tables are told by the names of their files."""


class RolloutLog:
    """A log that is read once, by iterating. `report` is complete when the iteration is."""

    def __init__(self, paths: Sequence[Path], form: LogFormat, config: ReadConfig) -> None:
        self.paths, self.config = tuple(paths), config
        self.report = ReadReport(form.value)
        self._form = form

    def __iter__(self) -> Iterator[LoggedGroup]:
        yield from _READERS[self._form](self.paths, self.config, self.report)
        if not self.report.groups:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.report.dropped.most_common(3))
            where = next(iter(self.report.first.values()), None)
            raise InputError(
                f"holds no rollout that can be read ({reasons or 'it is empty'})",
                path=where or self.paths[0],
                hint=f"it was read as {self._form.value}; --format says otherwise",
            )


def open_log(paths: Sequence[Path], form: LogFormat | None = None, config: ReadConfig | None = None) -> RolloutLog:
    """Find the files of a log (folders are searched) and recognise their format unless it is given.

    Raises `InputError` where there is no file, or the format is not clear.
    """
    files = [file for path in paths for file in _files(path)]
    if not files:
        raise InputError("holds no log", path=paths[0], hint="name JSONL, Parquet or *.table.json files, or a folder")
    return RolloutLog(files, form or _recognise(files[0]), config or ReadConfig())


def _files(path: Path) -> list[Path]:
    """Of a folder: its rollout log (which is complete), else the trees that it kept, else TRL's tables, else its JSON
    lines; in natural order of their names."""
    if not path.is_dir():
        if not path.exists():
            raise InputError("does not exist", path=path, hint="check the path")
        return [path]
    for patterns in (
        (rollouts.FILE_NAME,),
        (trees.FILE_NAME,),
        ("completions_*.parquet", "completions/completions_*.parquet", "*.table.json"),
        ("*.jsonl", "*.jsonl.gz", "*.jsonl.xz"),
    ):
        found = {file for pattern in patterns for file in path.glob(pattern)}
        if found:
            return sorted(found, key=_natural)
    return []


def _natural(path: Path) -> list[tuple[int, str]]:
    """step_9 before step_10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(path))]


def _recognise(path: Path) -> LogFormat:
    if path.suffix == ".parquet" or path.name.endswith(".table.json"):
        return LogFormat.TRL
    for number, line in read_lines(path):
        try:
            fields = set(parse_row(line))
        except RowRefused as refused:
            raise InputError(f"is no JSON object ({refused})", path=path, line=number, hint="give --format") from None
        matching = [form for form, marks in _MARKS.items() if marks <= fields]
        if len(matching) == 1:
            return matching[0]
        known = f"could be {' or '.join(matching)}" if matching else "is no rollout log that is known"
        raise InputError(
            f"{known} (its fields: {', '.join(sorted(fields)[:8])})",
            path=path,
            line=number,
            hint="give --format, or write the fields group and reward (docs/audit.md)",
        )
    raise InputError("is empty", path=path, hint="name the files that hold rollouts")


def _json_lines(read_row: RowReader) -> GroupReader:
    """Twice through the file: first for the group of every line, then for the lines of one group after the other."""

    def read_groups(paths: Sequence[Path], config: ReadConfig, report: ReadReport) -> Iterator[LoggedGroup]:
        for number, path in enumerate(paths):
            report.files += 1

            def row(line: bytes, number: int = number) -> LoggedRow:
                try:
                    return read_row(parse_row(line), config, number)
                except RecursionError as error:
                    raise RowRefused("nested too deeply to read") from error

            with LineIndex(path) as index:
                keys = _keys(path, row, index, report)
                yield from grouped(keys, partial(index.row, read=row), report)

    return read_groups


def _keys(path: Path, row: Callable[[bytes], LoggedRow], index: LineIndex, report: ReadReport) -> Iterator[Key]:
    for number, line in read_lines(path):
        report.saw_line()
        try:
            found = row(line)
        except RowRefused as refused:
            report.drop(refused.reason, path, number)
            continue
        index.add(number, line)
        yield found.iteration, found.group


_READERS: dict[LogFormat, GroupReader] = {
    LogFormat.TURNTREE: rollouts.read_groups,
    LogFormat.TREES: trees.read_groups,
    LogFormat.TRL: trl.read_groups,
    LogFormat.VERL: _json_lines(verl.read_row),
    LogFormat.NEMO_GYM: _json_lines(nemo_gym.read_row),
    LogFormat.GENERIC: _json_lines(generic.read_row),
}
