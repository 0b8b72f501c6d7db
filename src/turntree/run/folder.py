"""The run directory: `config.json`, `metrics.jsonl`, `cost.json`, and the stage's results.

`config.json` is written first, `metrics.jsonl` (and the stage's other logs) grow, `checkpoints` hold what a killed run
needs to resume, `model` is the result. `cost.json` is written last: where it exists, the run is finished. A checkpoint
records the length of the logs, so a resumed run cuts them back to that length, and notices rows that are missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from turntree.core.cost import NO_COST, Cost
from turntree.core.errors import InputError
from turntree.run import files
from turntree.run.identity import FREE, locked, require_same
from turntree.run.jsonl import json_line, read_lines

_MADE = ("metrics.jsonl", "cost.json", "checkpoints", "model")  # by a run, after its config.json
LOGGER_MARKS = "loggers.json"  # how far each logger has come (`run.loggers`)
HELD_OUT = "held_out.jsonl"  # outcomes of the held-out tasks
_LOGS = ("rollouts.jsonl", "trees.jsonl", "gate.jsonl", HELD_OUT)  # of all stages
_OWN = ("config.json", "metrics.jsonl", "cost.json", "model", "best", LOGGER_MARKS)

Logged = dict[str, int]  # by file name: its bytes


class RunDirectory:
    """One run's folder. Metrics are appended and flushed to disk a row at a time; everything else is atomic."""

    def __init__(self, path: str | Path, logs: tuple[str, ...] = ()) -> None:
        self.path = Path(path)
        self.model = self.path / "model"
        self.checkpoints = self.path / "checkpoints"
        self.logs = ("metrics.jsonl", *logs)  # what the stage appends to
        self.listeners: list[Callable[[dict[str, Any]], None]] = []
        self.identity: dict[str, Any] = {}  # of the run in this folder; `begin` sets it
        self._config, self._cost = self.path / "config.json", self.path / "cost.json"

    @property
    def finished(self) -> bool:
        return self._cost.exists()

    def log(self, row: dict[str, Any]) -> None:
        """Append a row of metrics, then call the listeners."""
        self.append("metrics.jsonl", [row])
        for listener in self.listeners:
            listener(row)

    def append(self, name: str, rows: Iterable[dict[str, Any]]) -> None:
        """Append rows to one of `logs`. They are on disk when this returns, so that no checkpoint refers to a lost
        row."""
        with files.writing(self.path / name), (self.path / name).open("a", encoding="utf-8") as handle:
            handle.writelines(json_line(row) for row in rows)
            handle.flush()
            os.fsync(handle.fileno())

    def metrics(self) -> list[dict[str, Any]]:
        """The rows logged so far. Raises `InputError` for a line that is not JSON."""
        return self.rows("metrics.jsonl")

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of one of `logs` so far; none where nothing was appended. Raises as `metrics` does."""
        path = self.path / name
        return [files.parse_line(text, path, number) for number, text in read_lines(path)] if path.exists() else []

    def outcomes(self) -> dict[int, dict[str, float]]:
        """Success by task at every held-out check, by its iteration or step; tasks without an outcome are left out."""
        found: dict[int, dict[str, float]] = {}
        for row in self.rows(HELD_OUT):
            tasks = found.setdefault(row["iteration"], {})
            if row["rewards"]:
                tasks[row["task"]] = sum(row["rewards"]) / len(row["rewards"])
        return found

    def logged(self) -> Logged:
        """The length of every log, for the checkpoint that is being saved."""
        paths = [self.path / name for name in self.logs]
        return {path.name: path.stat().st_size for path in paths if path.exists()}

    def rewind(self, logged: Logged | None) -> None:
        """Cut the logs back to their length at a checkpoint (None: no checkpoint, so to nothing): what a killed process
        wrote after it will be written again. Raises `InputError`, before anything is cut, where rows from before the
        checkpoint are missing."""
        lengths = logged or {}
        for name, length in lengths.items():
            _check_length(self.path / name, length)
        for path in (self.path / name for name in self.logs):
            if path.name in lengths:
                os.truncate(path, lengths[path.name])
            else:
                path.unlink(missing_ok=True)

    def write_cost(self, cost: Cost, checks: Cost = NO_COST, bill: dict[str, float] | None = None) -> None:
        """Write the cost of the stage, which finishes the run: it needs no checkpoint any more. Held-out checks are a
        separate entry; `bill` is what a server asks for both."""
        counted = {**cost.counts(), "timing": cost.timing()}
        asked = {} if bill is None else {"bill": bill}
        checked = {**checks.counts(), "timing": checks.timing()}
        files.write_json(self._cost, {**counted, "checks": checked, **asked})
        shutil.rmtree(self.checkpoints, ignore_errors=True)

    def begin(self, identity: dict[str, Any], *, overwrite: bool) -> None:
        """Begin the run that `identity` describes in this folder, or resume the unfinished run of the same identity
        that is here. Unless `overwrite`, raises `InputError` for a finished run and for another run (naming what
        differs); always for a folder that holds no run."""
        self.identity = json.loads(json.dumps(identity))
        if self._config.exists():
            found = _read_config(self._config)
            if not overwrite:
                require_same(found, self.identity, self.path, free=FREE)
            self._tidy()  # not before: a command that is refused leaves another run as it is
            if overwrite:
                self._clear()
            elif self.finished:
                hint = "pass --overwrite to run it again"
                raise InputError("holds this run, finished", path=self.path, hint=hint)
        elif made := next((name for name in _MADE if (self.path / name).exists()), None):
            problem = f"holds {made}, and no config.json that says which run made it"
            raise InputError(problem, path=self.path, hint="choose another --out, or delete it")
        files.write_json(self._config, self.identity)

    def _tidy(self) -> None:
        """Put back a folder that a killed process had moved away, and remove what it left behind: temporary files of
        atomic writes, and checkpoints of a finished run."""
        for old in self.path.glob(".*.old/*"):  # its process ended while the new folder took its place
            if not (self.path / old.name).exists():
                old.rename(self.path / old.name)
        unfinished = (*(f".{name}.*" for name in _OWN), "own/.*.partial", "own/.*.tmp")
        for leftover in (path for names in unfinished for path in self.path.glob(names)):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        if self.finished:
            shutil.rmtree(self.checkpoints, ignore_errors=True)

    def finished_with(self, config: dict[str, Any]) -> bool:
        """Whether this folder holds a finished run of this configuration. Raises `InputError` for another
        configuration."""
        if not self.finished:
            return False
        found = _read_config(self._config).get("config")
        require_same({"config": found}, {"config": config}, self.path, free=FREE)
        return True

    def _clear(self) -> None:
        """Remove the files of the previous run, which may have been of another stage; `cost.json`, the mark of a
        finished run, goes first."""
        self._cost.unlink(missing_ok=True)
        for name in (LOGGER_MARKS, *_LOGS, "report.html", "trees.html"):
            (self.path / name).unlink(missing_ok=True)
        for folder in (self.checkpoints, self.model, self.path / "own", self.path / "best"):
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def open_run(
    path: str | Path,
    stage: str,
    config: dict[str, Any],
    inputs: dict[str, Any],
    *,
    overwrite: bool = False,
    logs: tuple[str, ...] = (),
) -> Iterator[RunDirectory]:
    """The folder of a run, locked for this process while the block lasts (`RunDirectory.begin` says what is refused).

    `config` is the resolved configuration and `inputs` the hashes of the contents that it points to. Together they are
    the identity of the run, which decides whether an unfinished run may be resumed. `logs` are the files that the stage
    appends to beside the metrics.
    """
    run = RunDirectory(path, logs)
    with files.writing(run.path):
        run.path.mkdir(parents=True, exist_ok=True)
    with locked(run.path):
        run.begin({"stage": stage, "config": config, "inputs": inputs}, overwrite=overwrite)
        yield run


@contextlib.contextmanager
def open_folder(
    path: Path, stage: str, config: dict[str, Any], *, overwrite: bool = False, free: tuple[str, ...] = ()
) -> Iterator[None]:
    """The folder of a stage that keeps runs in subfolders, locked for this process while the block lasts. The stage may
    run there repeatedly. Raises `InputError` where another configuration was run there, unless `overwrite`."""
    with files.writing(path):
        path.mkdir(parents=True, exist_ok=True)
    described, place = {"stage": stage, "config": config}, path / "config.json"
    with locked(path):
        found = _read_config(place) if place.exists() else None
        if found is not None and not overwrite:
            require_same(found, described, path, free=free)
        files.write_json(place, described)
        yield


def _read_config(path: Path) -> dict[str, Any]:
    found = files.read_json(path)
    if not isinstance(found, dict) or "stage" not in found:
        raise InputError("is not the folder of a training run", path=path.parent, hint="choose another --out")
    return found


def _check_length(path: Path, length: int) -> None:
    """Raise `InputError` where the file does not have `length` bytes that end with a row."""
    size = path.stat().st_size if path.exists() else 0
    hint = "put the file back as it was, or pass --overwrite to start again"
    if size < length:
        problem = f"has {size} bytes of the {length} that the run had written when it was saved: rows are missing"
        raise InputError(problem, path=path, hint=hint)
    with path.open("rb") as handle:
        handle.seek(max(0, length - 1))
        if length and handle.read(1) != b"\n":
            raise InputError(f"has no row that ends at byte {length}: rows were changed", path=path, hint=hint)
