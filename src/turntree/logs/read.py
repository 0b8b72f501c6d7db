"""`open_log`: rollouts of any framework, found, recognised and read as one stream of groups (traces have their own:
`traces.readers`).

A log format is a part (`turntree.log_formats`): a function of one JSON line, which gives the fields of the generic
format (docs/audit.md), or None for a line that is not a rollout; its keyword-only parameters are its options. Where a
line is not one rollout, or the format is to be recognised by itself, it is a `logs.generic.LogFormat`.

>>> def my_log(line):  # turntree audit LOG --format my_module:my_log
...     return {"group": line["prompt"], "reward": line["score"], "actions": line["turns"]}
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from turntree.core import parts
from turntree.core.config import Part
from turntree.core.errors import InputError
from turntree.core.progress import progress
from turntree.logs import rollouts, trees
from turntree.logs.generic import LogFormat, TextOptions
from turntree.logs.groups import LoggedGroup
from turntree.logs.rows import ReadReport, RowRefused, parse_row, read_rows
from turntree.run.jsonl import parse_json

AUTO = Part("auto")


class RolloutLog:
    """A log that is read once, by iterating. `report` is complete when the iteration is."""

    def __init__(self, paths: Sequence[Path], format: Part) -> None:
        self.paths, self.report = tuple(paths), ReadReport(format.name, files=len(paths))
        self.format = _built(format)
        """Where it is recognised by what it reads, it is what was recognised from then on."""

    def __iter__(self) -> Iterator[LoggedGroup]:
        if isinstance(self.format, Auto):
            self.report.format = _recognise(self.paths[0])
            given = {name: value for name, value in vars(self.format).items() if value}
            self.format = _built(Part(self.report.format, given))
        with progress(iter(()), "lines") as self.report.bar:
            yield from self.format.groups(self.paths, self.report)
        if not self.report.groups:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.report.dropped.most_common(3))
            where = next(iter(self.report.first.values()), None) or self.paths[0]
            problem = f"holds no rollout that can be read ({reasons or 'it is empty'})"
            raise InputError(problem, path=where, hint=f"it was read as {self.report.format}; --format changes that")


def open_log(paths: Sequence[Path], format: Part = AUTO) -> RolloutLog:
    """Find the files of a log (folders are searched); `format` recognises its own files unless it is given.

    Raises `InputError` where there is no file; reading raises it where the format is not clear.
    """
    files = [file for path in paths for file in _files(path)]
    if not files:
        raise InputError("holds no log", path=paths[0], hint="name JSONL, Parquet or *.table.json files, or a folder")
    return RolloutLog(files, format)


@dataclass(frozen=True, kw_only=True)
class Auto(TextOptions):
    """The format that the first line tells, or the name of the first file. Options go on to it."""


@dataclass(frozen=True)
class FunctionOfALine(LogFormat):
    """A format that is a function."""

    function: Callable[[dict[str, Any]], Any]

    def row(self, row: dict[str, Any]) -> Any:
        return self.function(row)


def _built(format: Part) -> LogFormat:
    built = parts.build("log_formats", format)
    if isinstance(built, LogFormat):
        return built
    if callable(built):
        return FunctionOfALine(built)
    problem = f"{format.name!r} gave {type(built).__name__}, which is neither a LogFormat nor a function"
    raise InputError(problem, field="log_format", hint="see turntree.logs.read")


def _files(path: Path) -> list[Path]:
    """Of a folder: the rollout log of a run (which is complete), else the trees that it kept, else what a format says
    lies there, else its JSON lines, else those of its folders (one a step); in natural order of their names."""
    if not path.is_dir():
        if not path.exists():
            raise InputError("does not exist", path=path, hint="check the path")
        return [path]
    formats = _formats().values()
    beside = [name for format in formats for name in format.beside]
    for name, format in ((rollouts.FILE_NAME, "turntree"), (trees.FILE_NAME, "trees")):
        if (path / name).is_file() and not _is_another(path / name, format):
            return [path / name]
    for patterns in (
        *(format.folders for format in formats),
        ("*.jsonl", "*.jsonl.gz", "*.jsonl.xz", "*.parquet"),
        ("*/*.jsonl", "*/*.jsonl.gz", "*/*.jsonl.xz", "*/*.parquet"),
    ):
        found = {file for pattern in patterns for file in path.glob(pattern)}
        found = {file for file in found if not any(fnmatch(file.name, name) for name in beside)}
        if found:
            return sorted(found, key=_natural)
    return []


def _is_another(path: Path, format: str) -> bool:
    """Whether it is of another format than its name says: NeMo Gym writes a rollouts.jsonl too."""
    try:
        return _recognise(path) != format
    except InputError:
        return False


def _formats() -> dict[str, type[LogFormat]]:
    """Those that are registered; a function is recognised by nothing."""
    loaded = {name: parts.load("log_formats", name).target for name in parts.names("log_formats")}
    return {name: one for name, one in loaded.items() if inspect.isclass(one) and issubclass(one, LogFormat)}


def _natural(path: Path) -> list[tuple[int, str]]:
    """step_9 before step_10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(path))]


def _recognise(path: Path) -> str:
    formats = _formats()
    for name, format in formats.items():
        if any(fnmatch(path.name, f"*{mark}") for mark in format.file_marks):
            return name
    for number, line in read_rows(path):
        try:
            fields = set(parse_row(line))
        except RowRefused as refused:
            several = line.lstrip()[:1] == b"[" or line.strip() == b"{"
            problem = f"is not a JSON object ({'begins one value over several lines' if several else refused})"
            hint = "write one object a line, without an array around them" if several else "give --format"
            if not several:
                parse_json(line, path, number)  # says what is wrong with JSON, and which bytes are none
            raise InputError(problem, path=path, line=number, hint=hint) from None
        matching = _best_matching(formats, fields)
        if len(matching) == 1:
            return matching[0]
        known = f"could be {' or '.join(matching)}" if matching else "is not a known rollout log"
        hint = "give --format, or write the fields group and reward (docs/audit.md)"
        raise InputError(f"{known} (its fields: {', '.join(sorted(fields)[:8])})", path=path, line=number, hint=hint)
    raise InputError("is empty", path=path, hint="name the files that hold rollouts")


def _best_matching(formats: Mapping[str, type[LogFormat]], fields: set[str]) -> list[str]:
    """The formats that the fields tell by the most marks."""
    told = {
        name: max((len(shape) for shape in format.marks if shape <= fields), default=0)
        for name, format in formats.items()
    }
    most = max(told.values(), default=0)
    return [name for name, count in told.items() if count == most and most]
