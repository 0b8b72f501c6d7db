"""The trainer: weights and optimizer on every rank, what all ranks do together, and the tensors that they save.

`Trainer` is what one rank holds. `Trainers` is how a run sees all of them, on rank 0: `run` deals a function with one
part of the work a rank, all ranks call it at the same time, and the others `follow`. A run in one process is the case
of one rank.

Tensors are saved by torch's distributed checkpoint (DCP) in safetensors files: every rank writes them, and any number
of ranks reads them. DCP's own format keeps its index in a pickle (`.metadata`), which would run code when a checkpoint
is opened. Its safetensors storage has none: the header of each rank's file says where in the whole tensor each shard
lies (JSON), and readers gather the index from the headers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from transformers import PreTrainedModel

from turntree.core.errors import InputError, TurntreeError
from turntree.run.identity import file_digest
from turntree.train.config import OptimizerConfig
from turntree.train.lora import AdapterOff, Reference, frozen_reference, is_fresh
from turntree.train.optimizer import Optimizer
from turntree.train.ranks import SINGLE, ProcessGroup
from turntree.train.sharded import parameters_of, shard, whole

J = TypeVar("J")
R = TypeVar("R")


@dataclass
class Trainer:
    """One rank's part. `served` are the weights that rank 0's engine samples with, where they are not the trained
    ones."""

    model: PreTrainedModel
    reference: Reference | None
    optimizer: Optimizer
    group: ProcessGroup = SINGLE
    served: Sequence[Tensor] | None = None
    names: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.names = list(parameters_of(self.model))

    def publish(self) -> None:
        """Bring the trained weights to the engine's model, whose own they are in one process."""
        for number, weight in enumerate(() if self.group.mesh is None else self.optimizer.masters):
            value = whole(weight.detach())  # by all ranks
            if self.served is not None:
                self.served[number].detach().copy_(value)

    def save(self, folder: Path) -> dict[str, str]:
        """Write one file a rank into `folder`, flushed to disk; the names of all files with their checksums."""
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        tensors: dict[str, Any] = self.optimizer.tensors(self.names)
        with _plain_errors():
            state_dict_saver.save(tensors, storage_writer=writer, **self._ranks())
        own = sorted(folder.glob(f"shard-{self.group.rank + 1:05d}-*.safetensors"))
        files = self.group.collect({path.name: file_digest(path) for path in own})
        return {name: checksum for of_rank in files for name, checksum in of_rank.items()}

    def load(self, folder: Path) -> None:
        """Take what any number of ranks has saved. Raises `InputError` for the state of another model."""
        reader = HuggingFaceStorageReader(str(folder))
        index: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
        self.optimizer.expect_moments({name for name in self.names if f"exp_avg.{name}" in index}, self.names)
        into: dict[str, Any] = self.optimizer.tensors(self.names)
        if {name: value.shape for name, value in into.items()} != {name: held.size for name, held in index.items()}:
            raise InputError("holds the weights of another model", path=folder, hint="pass --overwrite to start again")
        with _plain_errors():
            state_dict_loader.load(into, storage_reader=reader, **self._ranks())
        self.optimizer.loaded(int(into["steps"]))
        self.publish()

    def _ranks(self) -> dict[str, Any]:
        return {"process_group": self.group.control, "no_dist": self.group.size == 1}


@dataclass
class Trainers:
    """All ranks, seen from rank 0."""

    own: Trainer

    @property
    def size(self) -> int:
        return self.own.group.size

    def run(self, function: Callable[[Trainer, J], R], jobs: Sequence[J]) -> R:
        """`function(trainer, job)` on every rank with its job; what rank 0's call returns."""
        call, job = self.own.group.scatter([(function, job) for job in jobs])
        return call(self.own, job)

    def save(self, folder: Path) -> dict[str, str]:
        return self.run(Trainer.save, [folder] * self.size)

    def load(self, folder: Path) -> None:
        self.run(Trainer.load, [folder] * self.size)


def open_trainers(
    model: PreTrainedModel,
    config: OptimizerConfig,
    total_steps: int | None,
    group: ProcessGroup = SINGLE,
    *,
    reference: PreTrainedModel | None = None,
) -> Trainers:
    """The trainers of `model`, which rank 0's engine samples from. `reference` is that of the KL term: a frozen model,
    or `model` itself for what it is now. With several ranks each holds a shard of copies of both."""
    own = reference is model
    if group.size == 1:
        frozen = frozen_reference(model) if own else reference
        return Trainers(Trainer(model, frozen, Optimizer(model.parameters(), config, total_steps)))
    threads = max(1, torch.get_num_threads() // group.here)
    kind = None if reference is None else "adapter off" if own and is_fresh(model) else "frozen"
    opened = partial(joined, None, None, kind, config, total_steps, threads)
    group.scatter([opened] * group.size)
    return Trainers(joined(model, reference, kind, config, total_steps, threads, group))


def joined(
    model: PreTrainedModel | None,
    reference: PreTrainedModel | None,
    kind: Literal["adapter off", "frozen"] | None,
    config: OptimizerConfig,
    total_steps: int | None,
    threads: int,
    group: ProcessGroup,
) -> Trainer:
    """A rank's part of the trainers that rank 0 opens, which alone has the models. `kind`: of the reference."""
    torch.set_num_threads(threads)
    trained = shard(model, group)
    if kind == "frozen":
        referred = shard(reference, group, frozen=True)
    else:
        referred = None if kind is None else AdapterOff(trained)
    served = None if model is None else list(parameters_of(model).values())
    return Trainer(trained, referred, Optimizer(trained.parameters(), config, total_steps), group, served)


def follow(group: ProcessGroup) -> Any:
    """Do what rank 0 deals until it ends the run (`end`); returns what it gave then. Raises `TurntreeError` where
    rank 0 is gone."""
    trainer: Trainer | None = None
    while True:
        try:
            order: Any = group.scatter(None)
        except RuntimeError as error:
            raise TurntreeError(f"rank {group.rank} ends, because rank 0 has; its message says why") from error
        if isinstance(order, partial):
            trainer = order(group)
        elif isinstance(order, tuple):
            function, job = order
            function(trainer, job)
        else:
            return order


def end(group: ProcessGroup, result: Any) -> None:
    """Let the other ranks go, with the result of the run (no tuple)."""
    group.scatter([result] * group.size)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """DCP warns where it runs in one process, and raises an exception that is no `Exception`, with those of all
    ranks inside."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        first, _ = min(error.failures.items())[1]
        raise first from None  # which also says whose disk is full
