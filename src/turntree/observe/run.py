"""The run directory: `config.json`, `metrics.jsonl`, `cost.json`, and the stage's results.

`config.json` is written first, `metrics.jsonl` (and the stage's other logs) grow, `checkpoints` hold what a killed run
needs to resume, `model` is the result. `cost.json` is written last: where it exists, the run is finished. A checkpoint
records the length of the logs and their checksums, so a resumed run cuts them back to that length, and notices rows
that are missing or changed.

A run may be extended: started again with a larger total (`Extent`), it resumes from its last checkpoint, which is kept
when a run finishes, and gives what a run of that total would have given from the start. `history` in `config.json`
lists its earlier totals.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turntree.core.cost import NO_COST, Cost
from turntree.core.errors import InputError
from turntree.core.progress import notice
from turntree.observe import files
from turntree.observe.identity import FREE, file_digest, locked, require_same
from turntree.observe.jsonl import read_lines

_MADE = ("metrics.jsonl", "cost.json", "checkpoints", "model")  # by a run, after its config.json
LOGGER_MARKS = "loggers.json"  # how far each logger has come (`observe.loggers`)
_LOGS = ("rollouts.jsonl", "trees.jsonl", "gate.jsonl", "held_out.jsonl", "pass_rates.jsonl")  # of all stages
_OWN = ("config.json", "metrics.jsonl", "cost.json", "pass_rates.jsonl", "model", LOGGER_MARKS)

Logged = dict[str, dict[str, Any]]  # by file name: {"rows", "bytes", "digest"}


@dataclass(frozen=True)
class Extent:
    """Length of a run: the value `total` of its configuration key `key`, which gives `steps` steps (as checkpoints
    count them). `fixed` says why a run with another total differs from its first step on; None: it does not, so the run
    may be extended."""

    key: str
    total: int
    steps: int
    fixed: str | None = None


class RunDirectory:
    """One run's folder. Metrics are appended and flushed to disk a row at a time; everything else is atomic."""

    def __init__(self, path: str | Path, logs: tuple[str, ...] = (), extent: Extent | None = None) -> None:
        self.path, self.extent = Path(path), extent
        self.model = self.path / "model"
        self.checkpoints = self.path / "checkpoints"
        self.logs = ("metrics.jsonl", *logs)  # what the stage appends to
        self.listeners: list[Callable[[dict[str, Any]], None]] = []
        self.identity: dict[str, Any] = {}  # of the run in this folder; `begin` sets it
        self._config, self._metrics, self._cost = (
            self.path / name for name in ("config.json", "metrics.jsonl", "cost.json")
        )

    @property
    def finished(self) -> bool:
        return self._cost.exists()

    @property
    def extendable(self) -> bool:
        return self.extent is not None and self.extent.fixed is None

    @property
    def free(self) -> tuple[str, ...]:
        """The keys that may differ when the run is resumed."""
        return FREE if self.extent is None else (*FREE, f"config.{self.extent.key}")

    def log(self, row: dict[str, Any]) -> None:
        """Append a row of metrics, then call the listeners."""
        self.append("metrics.jsonl", [row])
        for listener in self.listeners:
            listener(row)

    def append(self, name: str, rows: Iterable[dict[str, Any]]) -> None:
        """Append rows to one of `logs`. They are on disk when this returns, so that no checkpoint refers to a lost
        row."""
        with files.writing(self.path / name), (self.path / name).open("a", encoding="utf-8") as handle:
            handle.writelines(files.json_line(row, allow_nan=False) for row in rows)
            handle.flush()
            os.fsync(handle.fileno())

    def metrics(self) -> list[dict[str, Any]]:
        """The rows logged so far. Raises `InputError` for a line that is not JSON."""
        return [files.parse_line(text, self._metrics, number) for number, text in read_lines(self._metrics)]

    def logged(self) -> Logged:
        """Rows, bytes and checksum of every log, for the checkpoint that is being saved."""
        found: Logged = {}
        for path in (self.path / name for name in self.logs):
            if path.exists():
                checksum, rows, size = file_digest(path, flush=True)
                found[path.name] = {"rows": rows, "bytes": size, "digest": checksum}
        return found

    def rewind(self, logged: Logged | None) -> None:
        """Cut the logs back to their length at a checkpoint (None: no checkpoint, so to nothing): what a killed process
        wrote after it will be written again. Raises `InputError`, before anything is cut, where rows from before the
        checkpoint are missing or changed."""
        known = logged or {}
        for name, seen in known.items():
            _check_rows(self.path / name, seen)
        for path in (self.path / name for name in self.logs):
            if path.name in known:
                os.truncate(path, known[path.name]["bytes"])
            else:
                path.unlink(missing_ok=True)

    def write_cost(self, cost: Cost, checks: Cost = NO_COST) -> None:
        """Write the cost of the stage, which finishes the run; held-out checks are a separate entry."""
        bill = {**cost.counts(), "timing": cost.timing()}
        files.write_json(self._cost, {**bill, "checks": {**checks.counts(), "timing": checks.timing()}})

    def begin(self, identity: dict[str, Any], *, overwrite: bool) -> None:
        """Begin the run that `identity` describes in this folder, or resume the run of the same identity that is here
        (unfinished, or to be extended). Unless `overwrite`, raises `InputError` for a finished run, for another run
        (naming what differs) and for a total that the run cannot have; always for a folder that holds no run."""
        self.identity = json.loads(json.dumps(identity))
        history: list[dict[str, Any]] = []
        if self._config.exists():
            found = _read_config(self._config)
            if overwrite:
                self._tidy()
                self._clear()
            else:
                history = self._go_on(found)
        elif made := next((name for name in _MADE if (self.path / name).exists()), None):
            problem = f"holds {made}, and no config.json that says which run made it"
            raise InputError(problem, path=self.path, hint="choose another --out, or delete it")
        files.write_json(self._config, self.identity | ({"history": history} if history else {}))

    def _go_on(self, found: dict[str, Any]) -> list[dict[str, Any]]:
        """Resume the run that `found` describes, with another total where one is given. Returns its history."""
        history = found.pop("history", [])
        require_same(found, self.identity, self.path, free=self.free)
        self._tidy()  # not before: a command that is refused leaves another run as it is
        before = None if self.extent is None else _at(found["config"], self.extent.key)
        if self.extent is None or before == self.extent.total:
            if self.finished:
                more = f", or ask for more {self.extent.key} to extend it" if self.extent and self.extendable else ""
                hint = f"pass --overwrite to run it again{more}"
                raise InputError("holds this run, finished", path=self.path, hint=hint)
            return history
        done = self._require_extendable(self.extent, before)
        entry = {self.extent.key: before, "done": done, "finished": self.finished}
        if self.finished:
            entry["last"] = self.metrics()[-1]  # with the closing check, which an extended run lacks
        self._cost.unlink(missing_ok=True)  # removed first: from here on the run counts as unfinished
        notice(f"{self.path} is extended: {self.extent.key} {before} -> {self.extent.total}")
        return [*history, entry]

    def _require_extendable(self, extent: Extent, before: Any) -> int:
        """The step of the last checkpoint (0: none). Raises `InputError` where the run cannot have another total."""
        new_run = f"start a new run from its policy: --model {self.model} with another --out"
        if extent.fixed is not None:
            problem = f"holds a run of {extent.key} {before} that cannot be changed to {extent.total}: {extent.fixed}"
            raise InputError(problem, path=self.path, hint=new_run)
        done = max(saved_steps(self.checkpoints), default=0)
        if self.finished and not done:
            problem = "holds a finished run that kept no checkpoint to be extended from (checkpoints.extendable)"
            raise InputError(problem, path=self.path, hint=new_run)
        if extent.steps < done:
            problem = f"holds a run that has done {done} steps, more than the {extent.steps} of {extent.key}"
            hint = f"ask for more than {extent.total}, or choose another --out"
            raise InputError(f"{problem} {extent.total}", path=self.path, hint=hint)
        if extent.steps == done and not self.finished:  # it went on after that step without the check that ends a run
            problem = f"holds an unfinished run of {extent.key} {before} that cannot end with step {done}: it is done"
            raise InputError(problem, path=self.path, hint=f"ask for more than {extent.total}, or choose another --out")
        return done

    def _tidy(self) -> None:
        """Remove what a killed process left behind: temporary files of atomic writes, and checkpoints of a finished
        run."""
        unfinished = (*(f".{name}.*" for name in _OWN), "own/.*.partial", "own/.*.tmp")
        for leftover in (path for names in unfinished for path in self.path.glob(names)):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        if self.finished:
            self.drop_checkpoints(keep_last=self.extendable)

    def drop_checkpoints(self, *, keep_last: bool) -> None:
        """Remove the checkpoints of a finished run, except the last where it is kept so that the run can be
        extended."""
        steps = saved_steps(self.checkpoints)
        if not keep_last or not steps:
            shutil.rmtree(self.checkpoints, ignore_errors=True)
        for step in sorted(steps)[:-1]:
            shutil.rmtree(checkpoint_path(self.checkpoints, step), ignore_errors=True)

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
        for name in (LOGGER_MARKS, *_LOGS, "report.html"):
            (self.path / name).unlink(missing_ok=True)
        for folder in (self.checkpoints, self.model, self.path / "own"):
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
    extent: Extent | None = None,
) -> Iterator[RunDirectory]:
    """The folder of a run, locked for this process while the block lasts (`RunDirectory.begin` says what is refused).

    `config` is the resolved configuration and `inputs` the hashes of the contents that it points to. Together they are
    the identity of the run, which decides whether an unfinished run may be resumed. `logs` are the files that the stage
    appends to beside the metrics. With `extent` the run may be started again with another total.
    """
    run = RunDirectory(path, logs, extent)
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


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def saved_steps(folder: Path) -> list[int]:
    """The steps of all checkpoints in `folder`, in no order."""
    names = (path.name.removeprefix("step-") for path in folder.glob("step-*"))
    return [int(name) for name in names if name.isdecimal()]


def _at(config: Any, key: str) -> Any:
    """The value of a dotted key; None where there is none."""
    for name in key.split("."):
        config = config.get(name) if isinstance(config, dict) else None
    return config


def _check_rows(path: Path, seen: dict[str, Any]) -> None:
    hint = "put the file back as it was, or pass --overwrite to start again"
    checksum, held, _ = file_digest(path, seen["bytes"]) if path.exists() else ("", 0, 0)
    if held < seen["rows"]:
        problem = f"holds {held} of the {seen['rows']} rows that the run had written when it was saved"
        raise InputError(f"{problem}: {seen['rows'] - held} are missing", path=path, hint=hint)
    if checksum != seen["digest"]:
        raise InputError(f"its first {seen['rows']} rows are not those that the run wrote", path=path, hint=hint)
