"""The process group of a run. Training code is written once, for a group: `SINGLE` is that of one process, in which
nothing is sent and every sum is its own, and `launch.DistributedGroup` is the same over the ranks of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


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


SINGLE = ProcessGroup()
