"""The process group of a run. Training code is written once, for a group: `SINGLE` is that of one process, in which
nothing is sent and every sum is its own, and `DistributedGroup` is the same over the ranks of torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

T = TypeVar("T")

_PATIENCE = timedelta(days=7)  # ranks wait for orders while rank 0 samples


class ProcessGroup:
    """The group of one process."""

    rank, size, here = 0, 1, 1  # `here`: ranks on this machine
    control: dist.ProcessGroup | None = None
    """What carries objects and sums between ranks."""
    mesh: DeviceMesh | None = None
    """What carries weights and gradients."""

    def scatter(self, items: Sequence[T] | None) -> T:
        """The item of this rank, of those that rank 0 gives (one a rank; the others give None)."""
        assert items is not None
        return items[0]

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Give `tensor` rank 0's values, in place."""

    def collect(self, item: T) -> list[T]:
        """Every rank's item, by rank, on all ranks."""
        return [item]

    def sums(self, values: Sequence[float]) -> list[float]:
        """Each value summed over the ranks, in float64."""
        return list(values)

    def largest(self, value: float) -> float:
        return value


SINGLE = ProcessGroup()


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

    def sums(self, values: Sequence[float]) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.control)
        return total.tolist()

    def largest(self, value: float) -> float:
        most = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.control)
        return most.item()
