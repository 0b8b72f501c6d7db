"""The run directory: `config.json`, `metrics.jsonl`, `cost.json`, and what the stage makes.

The life of a run: `config.json` says what runs here, `metrics.jsonl` grows a row a step, `checkpoints` hold what a
killed run needs to go on, `model` is the result, and `cost.json` comes last: where it is, the run is finished.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from turntree.core.cost import NO_COST, Cost
from turntree.core.errors import InputError
from turntree.observe import files

T = TypeVar("T")

_OWN = ("config.json", "metrics.jsonl", "cost.json", "pass_rates.jsonl", "model")
_FREE = "config.checkpoints"  # how often to save changes no result


class RunDirectory:
    """One run's folder. Metrics are appended and flushed to disk a row at a time; everything else is atomic."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.model = self.path / "model"
        self.checkpoints = self.path / "checkpoints"
        self._config, self._metrics, self._cost = (
            self.path / name for name in ("config.json", "metrics.jsonl", "cost.json")
        )

    @property
    def finished(self) -> bool:
        return self._cost.exists()

    def log(self, row: dict[str, Any]) -> None:
        with self._metrics.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(row, allow_nan=False) + "\n")
            handle.flush()
            os.fsync(handle.fileno())  # a checkpoint must not outlive the rows before it

    def metrics(self) -> list[dict[str, Any]]:
        """The rows logged so far. Raises `InputError` for a line that is not JSON."""
        lines = enumerate(self._metrics.read_text(encoding="utf-8").splitlines(), start=1)
        return [files.parse_line(text, self._metrics, number) for number, text in lines]

    def rewind(self, step: int | None) -> None:
        """Forget the rows after `step` (None: all of them), which a killed process logged after its last checkpoint.
        The last line may be half a row."""
        kept: list[str] = []
        if step is not None:
            for line in self._metrics.read_text(encoding="utf-8").splitlines(keepends=True):
                if not line.endswith("\n") or json.loads(line)["step"] > step:
                    break
                kept.append(line)
        with files.atomic_write(self._metrics) as handle:
            handle.writelines(kept)

    def write_cost(self, cost: Cost, checks: Cost = NO_COST) -> None:
        """The bill of the stage, which finishes the run; what held-out checks spent is an entry of its own."""
        bill = {**cost.counts(), "timing": cost.timing()}
        files.write_json(self._cost, {**bill, "checks": {**checks.counts(), "timing": checks.timing()}})

    def begin(self, identity: dict[str, Any], *, overwrite: bool) -> None:
        """Take the folder for the run that `identity` describes, or go on with the unfinished run of the same
        identity that lies here. Raises `InputError` for a finished run, and for another run (naming a key that
        differs), unless `overwrite`."""
        if self._config.exists():
            found = files.read_json(self._config)
            if not isinstance(found, dict) or "stage" not in found:
                raise InputError("is no training run's folder", path=self.path, hint="choose another --out")
            self._tidy()
            if overwrite:
                self._clear()
            else:
                self._check_same(found, identity)
        files.write_json(self._config, identity)

    def _tidy(self) -> None:
        """Remove what a killed process left half done: atomic writes, and checkpoints that a finished run dropped."""
        for leftover in (path for name in _OWN for path in self.path.glob(f".{name}.*")):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        if self.finished:
            shutil.rmtree(self.checkpoints, ignore_errors=True)

    def finished_with(self, config: dict[str, Any]) -> bool:
        """Whether a run of this configuration lies here, finished. Raises `InputError` where it is of another one."""
        if not self.finished:
            return False
        self._compare({"config": files.read_json(self._config)["config"]}, {"config": config})
        return True

    def _check_same(self, found: dict[str, Any], identity: dict[str, Any]) -> None:
        self._compare(found, identity)
        if self.finished:
            raise InputError("holds this run, finished", path=self.path, hint="pass --overwrite to run it again")

    def _compare(self, found: dict[str, Any], identity: dict[str, Any]) -> None:
        here, wanted = _flat(found), _flat(identity)
        for key in sorted({*here, *wanted}):
            if not key.startswith(_FREE) and here.get(key) != wanted.get(key):
                raise InputError(
                    f"holds another run ({here.get(key)!r}, and not {wanted.get(key)!r})",
                    path=self.path,
                    field=key.removeprefix("config."),
                    hint="choose another --out, or pass --overwrite",
                )

    def _clear(self) -> None:
        """Remove what the run before made; the mark that it is finished goes first."""
        self._cost.unlink(missing_ok=True)
        for folder in (self.checkpoints, self.model):
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def open_run(
    path: str | Path, stage: str, config: dict[str, Any], inputs: dict[str, Any], *, overwrite: bool = False
) -> Iterator[RunDirectory]:
    """The folder of a run, for this process alone while the block lasts (`RunDirectory.begin` says what is refused).

    `config` is the resolved configuration and `inputs` names the contents that it points to (hashes): together they
    are the identity of the run, which says whether an unfinished one may go on.
    """
    run = RunDirectory(path)
    run.path.mkdir(parents=True, exist_ok=True)
    with _locked(run.path):
        run.begin({"stage": stage, "config": config, "inputs": inputs}, overwrite=overwrite)
        yield run


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Nobody else's folder meanwhile; the kernel lets go of it when the process dies, however it dies."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError("is in use by another process", path=folder, hint="choose another --out") from error
        yield
    finally:
        os.close(descriptor)


def progress(
    items: Iterable[T], what: str, total: int | None = None, *, initial: int = 0, quiet: bool = False
) -> tqdm[T]:
    """Progress on standard error (standard output carries results only); `quiet` inside another bar."""
    return tqdm(
        items,
        desc=what,
        total=total,
        initial=initial,
        file=sys.stderr,
        mininterval=1.0,
        dynamic_ncols=True,
        disable=quiet,
    )


def notice(text: str) -> None:
    """One line for a person on standard error, above whatever bar is drawn there."""
    tqdm.write(f"turntree: {text}", file=sys.stderr)


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys."""
    if not isinstance(value, dict):
        return {prefix: value}
    parts = [_flat(item, f"{prefix}.{key}" if prefix else str(key)) for key, item in value.items()]
    return {key: item for part in parts for key, item in part.items()}
