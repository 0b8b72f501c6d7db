"""The ranks of a run: a launcher (torchrun, a batch system, Ray Train) starts the same command on each of them.

A rank knows its place by torch's environment only (WORLD_SIZE, RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT). Rank 0 runs
the command, the others follow (`train.trainer.follow`). Without a launcher a run has one rank, this process. Where a
rank dies, the launcher ends the others.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from turntree.core.errors import ConfigError
from turntree.train.ranks import SINGLE, ProcessGroup, T

_WAIT = timedelta(minutes=30)  # of a rank for the others, within an update
_PATIENCE = timedelta(days=7)  # ranks wait for orders while rank 0 samples
_PLACE = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")


class DistributedGroup(ProcessGroup):
    """All ranks of torch's default process group, which is joined already. Weights are on `device`."""

    def __init__(self, device: str) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.here = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        self.control = cast(Any, dist.new_group(backend="gloo", timeout=_PATIENCE))
        self.mesh = init_device_mesh(torch.device(device).type, (self.size,))

    def scatter(self, items: Sequence[T] | None) -> T:
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, None if items is None else list(items), src=0, group=self.control)
        return mine[0]

    def broadcast(self, tensor: torch.Tensor) -> None:
        assert self.mesh is not None
        dist.broadcast(tensor, 0, group=self.mesh.get_group())

    def collect(self, item: T) -> list[T]:
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, item, group=self.control)
        return every


@contextlib.contextmanager
def open_ranks(device: str = "cpu") -> Iterator[ProcessGroup]:
    """The group of this run, on every rank. A process group that is there already (Ray Train makes one) is used and
    left as it is. Raises `ConfigError` where the environment names half a launcher, or a rank has no device."""
    if not _launched():
        yield SINGLE
        return
    local = int(os.environ.get("LOCAL_RANK") or 0)
    _check_device(device, local)
    cuda = device == "cuda"
    if cuda:
        torch.cuda.set_device(local)
    own = not dist.is_initialized()
    if own:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=_WAIT)
    try:
        yield DistributedGroup(device)
    finally:
        if own:
            dist.destroy_process_group()


def _launched() -> bool:
    """Whether a launcher started several ranks."""
    size, rank, address, port = (os.environ.get(name, "") for name in _PLACE)
    if size in ("", "1"):
        return False
    reachable = dist.is_initialized() or (address and port.isdecimal())
    if not (size.isdecimal() and rank.isdecimal() and reachable):
        problem = "the environment says " + ", ".join(f"{name}={os.environ.get(name, '')!r}" for name in _PLACE)
        hint = "a launcher such as torchrun sets all of them: unset WORLD_SIZE to run without one"
        raise ConfigError(problem, field="WORLD_SIZE", hint=hint)
    return True


def _check_device(device: str, local: int) -> None:
    """Raise `ConfigError` unless this rank, the number `local` of its machine, can have a device of its own."""
    kind, number, _ = device.partition(":")
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"is {device!r}, which ranks cannot use", field="device.name", hint="use cpu or cuda")
    if number:
        raise ConfigError(f"{device!r} is one device", field="device.name", hint="use cuda: each rank takes its own")
    if kind == "cuda" and local >= (seen := torch.cuda.device_count()):
        problem = f"is cuda, and {local + 1} ranks of this machine see {seen} GPUs"
        raise ConfigError(problem, field="device.name", hint="start one a GPU, and let each see all GPUs")
