"""Checkpoints of a training run: whole or absent, bit for bit, without pickle.

A checkpoint is a folder `step-00000040` with one safetensors file a rank (`train.trainer`: the trained weights, the
optimizer's moments and step counts) and `state.json`: the state of the loop (its step, its place in the data, its
costs), the identity of the run, the length of the run's logs, and checksums of all of it. Any number of ranks may
resume from it. It is written under a hidden name, flushed to disk and renamed, so that a process killed at any point
leaves either the whole checkpoint or none. A flipped bit or a checkpoint of another run is refused.

There is no generator state to save: every draw is keyed by its purpose (`core.seeds`), so the step determines the
draws. The frozen reference is not saved either; a resumed stage loads it again.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from turntree.core.config import Count, from_mapping
from turntree.core.errors import InputError
from turntree.core.progress import notice
from turntree.run.files import write_json, writing
from turntree.run.folder import RunDirectory
from turntree.run.identity import FREE, file_digest, fingerprint, require_same
from turntree.run.jsonl import read_bytes
from turntree.train.config import CheckpointConfig

SCHEMA = "turntree.checkpoint/5"
_STATE = "state.json"
_GO_ON = "delete its folder to resume from the checkpoint before"


class Saved(Protocol):
    """What a checkpoint holds: weights and the state of the optimizer."""

    def save(self, folder: Path) -> dict[str, str]:
        """Write files into `folder`, flushed to disk; their names with their checksums."""
        ...

    def load(self, folder: Path) -> None: ...


@dataclass(frozen=True, kw_only=True)
class _Held:
    """What `state.json` holds, beside its checksum. The stage reads its state."""

    schema: str
    identity: dict[str, Any]
    logs: dict[str, Count]  # in bytes
    files: dict[str, str]
    state: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run, in `folder`. With `run` they record its identity and the length of its logs. `clock`
    returns seconds."""

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        run: RunDirectory | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder, self.config, self._run, self._clock = folder, config, run, clock
        self._saved = clock()

    def due(self, step: int) -> bool:
        """Whether to save after `step`."""
        steps, seconds = self.config.every, self.config.every_seconds
        return (steps > 0 and step % steps == 0) or (seconds > 0 and self._clock() - self._saved >= seconds)

    def save(self, step: int, trainers: Saved, state: dict[str, Any]) -> None:
        """Write the checkpoint of `step` and remove the oldest beyond `keep`. `state` is plain JSON."""
        for leftover in self.folder.glob(".step-*"):  # of a process that was killed while it wrote
            shutil.rmtree(leftover)
        partial = self.folder / f".step-{step:08d}.partial"
        try:
            with writing(self.folder):
                self._write(partial, step, trainers, state)
                partial.rename(checkpoint_path(self.folder, step))
                _flush(self.folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # partial files after a full disk
        self._saved = self._clock()
        for old in _saved_steps(self.folder)[: -self.config.keep]:
            shutil.rmtree(checkpoint_path(self.folder, old))

    def _write(self, folder: Path, step: int, trainers: Saved, state: dict[str, Any]) -> None:
        folder.mkdir(parents=True)
        files = trainers.save(folder)
        held: dict[str, Any] = {
            "schema": SCHEMA,
            "identity": {} if self._run is None else self._run.identity,
            "logs": {} if self._run is None else self._run.logged(),
            "files": files,
            "state": {"step": step, **state},
        }
        write_json(folder / _STATE, {**held, "digest": _digest(held)})
        _flush(folder)

    def restore(self, trainers: Saved) -> dict[str, Any] | None:
        """Load the newest checkpoint into the trainers and return its state; None without a checkpoint.
        Raises `InputError` for one that is damaged, of another run or of another model."""
        held = self.held()
        if held is None:
            return None
        folder = checkpoint_path(self.folder, held["state"]["step"])
        for name, wanted in held["files"].items():
            if not (folder / name).exists():
                raise InputError("is missing", path=folder / name, hint=_GO_ON)
            if file_digest(folder / name) != wanted:
                problem = "is damaged: its checksum differs"
                raise InputError(problem, path=folder / name, hint=_GO_ON)
        try:
            trainers.load(folder)
        except InputError:
            raise
        except Exception as error:  # the boundary to foreign code, whose errors name no file
            raise InputError(f"cannot be loaded ({type(error).__name__}: {error})", path=folder, hint=_GO_ON) from error
        return held["state"]

    def held(self) -> dict[str, Any] | None:
        """The contents of the newest checkpoint's `state.json`; None without a checkpoint. Raises `InputError` where it
        is damaged or of another run."""
        step = max(_saved_steps(self.folder), default=None)
        if step is None:
            return None
        path = checkpoint_path(self.folder, step) / _STATE
        try:
            held = json.loads(read_bytes(path))
            whole = held["schema"] == SCHEMA and held.pop("digest") == _digest(held) and held["state"]["step"] == step
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError("is not the state of a checkpoint", path=path, hint=_GO_ON) from error
        if not whole:
            raise InputError("is damaged or of another version: its checksum differs", path=path, hint=_GO_ON)
        from_mapping(_Held, held, path=path)
        if self._run is not None:
            require_same(held["identity"], self._run.identity, path.parent, free=FREE)
        return held


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def _saved_steps(folder: Path) -> list[int]:
    """The steps of all checkpoints in `folder`, in order."""
    names = (path.name.removeprefix("step-") for path in folder.glob("step-*"))
    return sorted(int(name) for name in names if name.isdecimal())


def resume(run: RunDirectory, config: CheckpointConfig) -> tuple[Checkpoints, int]:
    """The checkpoints of `run` and the step of the newest (0: none), with the logs cut back to it. Prints a notice."""
    checkpoints = Checkpoints(run.checkpoints, config, run)
    held = checkpoints.held()
    run.rewind(None if held is None else held["logs"])
    if held is None:
        return checkpoints, 0
    done = int(held["state"]["step"])
    notice(f"{run.path} resumes after step {done}")
    return checkpoints, done


def _digest(held: dict[str, Any]) -> str:
    """Equality of JSON values, independent of the order and type of their keys."""
    return fingerprint(json.loads(json.dumps(held)), 16)


def _flush(path: Path) -> None:
    """Sync a file's contents or a folder's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
