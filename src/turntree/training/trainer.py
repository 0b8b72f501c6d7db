"""The trainer: weights and optimizer on every rank, and the work that all ranks do together.

`Trainer` is what one rank holds. `Trainers` is how a run sees all of them, on rank 0: `run` deals a function with one
part of the work a rank, all ranks call it at the same time, and the others `follow`. A run in one process is the case
of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from turntree.core.errors import InputError, TurntreeError
from turntree.training import shards
from turntree.training.config import OptimizerConfig
from turntree.training.lora import AdapterOff, Reference, frozen_reference
from turntree.training.optimizer import Optimizer
from turntree.training.sharded import ALONE, Alone, parameters_of

J = TypeVar("J")
R = TypeVar("R")


@dataclass
class Trainer:
    """One rank's part. `served` are the weights that rank 0's engine samples with, where they are not the trained
    ones."""

    model: PreTrainedModel
    reference: Reference | None
    optimizer: Optimizer
    group: Alone = ALONE
    served: Sequence[Tensor] | None = None
    names: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.names = list(parameters_of(self.model))

    def publish(self) -> None:
        """Bring the trained weights to the engine's model."""
        self.group.gather(self.optimizer.masters, self.served)

    def save(self, folder: Path) -> dict[str, str]:
        """Write one file a rank into `folder`; the names of all files with their checksums."""
        return shards.save(folder, self.optimizer.tensors(self.names), self.group)

    def load(self, folder: Path) -> None:
        """Take what any number of ranks has saved. Raises `InputError` for the state of another model."""
        saved = shards.shapes(folder)
        self.optimizer.expect_moments({name for name in self.names if f"exp_avg.{name}" in saved}, self.names)
        into = self.optimizer.tensors(self.names)
        if {name: value.shape for name, value in into.items()} != saved:
            raise InputError("holds the weights of another model", path=folder, hint="pass --overwrite to start again")
        shards.load(folder, into, self.group)
        self.optimizer.loaded(int(into["steps"]))
        self.publish()


@dataclass
class Trainers:
    """All ranks, seen from rank 0."""

    own: Trainer

    @property
    def size(self) -> int:
        return self.own.group.size

    def run(self, function: Callable[[Trainer, J], R], jobs: Sequence[J]) -> R:
        """`function(trainer, job)` on every rank with its job; what rank 0's call returns."""
        call, job = self.own.group.deal([(function, job) for job in jobs])
        return call(self.own, job)

    def save(self, folder: Path) -> dict[str, str]:
        return self.run(Trainer.save, [folder] * self.size)

    def load(self, folder: Path) -> None:
        self.run(Trainer.load, [folder] * self.size)


@dataclass(frozen=True)
class _Setup:
    """What the other ranks need to know to hold their part."""

    load: Callable[[], PreTrainedModel] | None
    with_reference: bool
    optimizer: OptimizerConfig
    total_steps: int | None
    threads: int


def open_trainers(
    model: PreTrainedModel,
    reference: Reference | None,
    config: OptimizerConfig,
    total_steps: int | None,
    group: Alone = ALONE,
) -> Trainers:
    """The trainers of `model`, which rank 0's engine samples from. The other ranks load it themselves (`group.load`);
    their reference is the policy as loaded, so `reference` is that too."""
    threads = max(1, torch.get_num_threads() // group.here)
    group.deal([_Setup(group.load, reference is not None, config, total_steps, threads)] * group.size)
    torch.set_num_threads(threads)
    trained = group.sharded(model, keep=True)
    if isinstance(reference, AdapterOff):
        reference = AdapterOff(trained)
    elif reference is not None:
        reference = group.sharded(reference, keep=False)
    optimizer = Optimizer(trained.parameters(), config, total_steps)
    return Trainers(Trainer(trained, reference, optimizer, group, list(parameters_of(model).values())))


def follow(group: Alone) -> Any:
    """Do what rank 0 deals until it ends the run (`end`); returns what it gave then. Raises `TurntreeError` where
    rank 0 is gone."""
    trainer: Trainer | None = None
    while True:
        order = _order(group)
        if isinstance(order, _Setup):
            trainer = _followed(order, group)
        elif isinstance(order, tuple):
            function, job = order
            function(trainer, job)
        else:
            return order


def _followed(setup: _Setup, group: Alone) -> Trainer:
    """This rank's part of the trainers that rank 0 opens."""
    if setup.load is None:
        raise TurntreeError("rank 0 does not say how to load the policy (sharded.Ranks.load)")
    torch.set_num_threads(setup.threads)
    model = setup.load()
    reference = frozen_reference(model) if setup.with_reference else None
    trained = group.sharded(model, keep=False)
    if isinstance(reference, PreTrainedModel):
        reference = group.sharded(reference, keep=False)
    return Trainer(trained, reference, Optimizer(trained.parameters(), setup.optimizer, setup.total_steps), group)


def _order(group: Alone) -> Any:
    try:
        return group.deal(None)
    except RuntimeError as error:
        raise TurntreeError(f"rank {group.rank} ends, because rank 0 has; its message says why") from error


def end(group: Alone, result: Any) -> None:
    """Let the other ranks go, with the result of the run (no tuple)."""
    group.deal([result] * group.size)
