"""Checkpoints of a training run: whole or absent, bit for bit, without pickle.

A checkpoint is a folder `step-00000040` with `weights.safetensors` (every trainable parameter), `optimizer.safetensors`
(moments and step counts) and `state.json` (what the loop itself remembers: its step, its place in the data, what it
spent). It is written under a hidden name, flushed to disk and renamed, so that a process killed at any point leaves
either the whole checkpoint or none.

No generator state is in it, because there is none: every draw is keyed by what it is for (`core.seeds`), so a loop
that knows its step knows its draws. The frozen reference is not in it either: a resumed stage loads it anew.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Module

from turntree.core.errors import ConfigError, InputError
from turntree.observe.files import read_json, write_json
from turntree.observe.run import RunDirectory, notice
from turntree.training.optimizer import Optimizer

_WEIGHTS, _OPTIMIZER, _STATE = "weights.safetensors", "optimizer.safetensors", "state.json"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """One checkpoint every `every` steps (0: none, and a killed run starts over); the newest `keep` stay until the
    run is finished. Neither changes a result, so both may differ when a run is resumed."""

    every: int = 10
    keep: int = 2

    def __post_init__(self) -> None:
        if self.every < 0 or self.keep < 1:
            raise ConfigError("every must be at least 0 and keep at least 1", field="every")


class Checkpoints:
    """The checkpoints of one run, in `folder`."""

    def __init__(self, folder: Path, config: CheckpointConfig) -> None:
        self.folder, self.config = folder, config

    def latest(self) -> int | None:
        """The step of the newest checkpoint; None where there is none."""
        return max(self._steps(), default=None)

    def due(self, step: int) -> bool:
        return self.config.every > 0 and step % self.config.every == 0

    def save(self, step: int, model: Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Write the checkpoint of `step` and remove the oldest beyond `keep`. `state` is plain JSON."""
        for leftover in self.folder.glob(".step-*"):  # of a process that was killed while it wrote
            shutil.rmtree(leftover)
        partial = self.folder / f".step-{step:08d}.partial"
        partial.mkdir(parents=True)
        save_file({name: value.contiguous() for name, value in trainable(model).items()}, partial / _WEIGHTS)
        save_file(optimizer.tensors(), partial / _OPTIMIZER)
        write_json(partial / _STATE, {"step": step, **state})
        for path in (partial / _WEIGHTS, partial / _OPTIMIZER, partial):
            _flush(path)
        partial.rename(self._path(step))
        _flush(self.folder)
        for old in sorted(self._steps())[: -self.config.keep]:
            shutil.rmtree(self._path(old))

    def restore(self, model: Module, optimizer: Optimizer) -> dict[str, Any] | None:
        """Put the newest checkpoint into `model` and `optimizer` and return its state; None where there is none.
        Raises `InputError` for one that is damaged or of another model."""
        step = self.latest()
        if step is None:
            return None
        folder = self._path(step)
        state = read_json(folder / _STATE)
        _copy(_load(folder / _WEIGHTS), trainable(model), folder / _WEIGHTS)
        optimizer.load_tensors(_load(folder / _OPTIMIZER))
        return state

    def clear(self) -> None:
        """Remove all of them: the run is finished."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _steps(self) -> list[int]:
        return [int(path.name.removeprefix("step-")) for path in self.folder.glob("step-*")]


def resume(run: RunDirectory, config: CheckpointConfig) -> tuple[Checkpoints, int]:
    """The checkpoints of `run` and the step of the newest (0: none), with the metrics rewound to it. Says so."""
    checkpoints = Checkpoints(run.checkpoints, config)
    done = checkpoints.latest()
    run.rewind(done)
    if done is not None:
        notice(f"{run.path} goes on after step {done}")
    return checkpoints, done or 0


def trainable(model: Module) -> dict[str, Tensor]:
    """The parameters that training changes, by name (tied ones once), sharing the model's memory."""
    return {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}


def _copy(saved: dict[str, Tensor], into: dict[str, Tensor], path: Path) -> None:
    if {name: value.shape for name, value in saved.items()} != {name: value.shape for name, value in into.items()}:
        raise InputError("holds the weights of another model", path=path, hint="pass --overwrite to start anew")
    with torch.no_grad():
        for name, value in saved.items():
            into[name].copy_(value)


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        problem = f"cannot be read ({str(error).splitlines()[0]})"
        raise InputError(problem, path=path, hint="delete its folder to go on from the checkpoint before") from error


def _flush(path: Path) -> None:
    """Onto the disk, contents or (for a folder) names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
