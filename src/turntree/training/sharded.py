"""The ranks of a run: which trees each one trains on, what they add up, and the weights that they hold in shards.

Training code is written once, for a group of ranks. `ALONE` is the group of one process: nothing is sent, nothing is
sharded, and every sum is its own. `Ranks` is the same over a torch process group. Its weights are sharded by
`fully_shard` (FSDP2; Zhao et al. 2023, "PyTorch FSDP"): each layer is gathered while it computes, and gradients are
summed (not averaged) over the ranks, because the normaliser of the loss already spans all of them.

Trained bfloat16 weights are float32 in the shards, which so are the masters of mixed precision (`training.optimizer`),
and are gathered in bfloat16: a pass computes the same numbers as in one process.
"""

from __future__ import annotations

import copy
import heapq
import os
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from turntree.core.errors import InputError
from turntree.engines.checkpoint import policy_hash

T = TypeVar("T")

_PASS = "turntree_pass"
_PATIENCE = timedelta(days=7)  # ranks wait for orders while rank 0 samples


class Alone:
    """The group of one rank."""

    rank, size, here = 0, 1, 1  # `here`: ranks on this machine
    control: dist.ProcessGroup | None = None
    """What carries objects and sums between ranks."""
    load: Callable[[], PreTrainedModel] | None = None
    """How the other ranks load the policy that training begins with."""

    def deal(self, items: Sequence[T] | None) -> T:
        """The item of this rank, of those that rank 0 gives (one a rank; the others give None)."""
        assert items is not None
        return items[0]

    def collect(self, item: T) -> list[T]:
        """Every rank's item, by rank, on all ranks."""
        return [item]

    def sums(self, values: Sequence[float]) -> list[float]:
        """Each value summed over the ranks, in float64."""
        return list(values)

    def largest(self, value: float) -> float:
        return value

    def sharded(self, model: PreTrainedModel, *, keep: bool) -> PreTrainedModel:
        """`model` as passes use it. Each rank holds a shard of it, or of a copy to `keep` the model whole."""
        return model

    def gather(self, weights: Iterable[Tensor], into: Sequence[Tensor] | None) -> None:
        """Copy whole weights into the tensors of rank 0 (None elsewhere), which are others than the trained ones."""


ALONE = Alone()


class Ranks(Alone):
    """All ranks of the default process group, which is joined already. Weights are on `device`."""

    def __init__(self, device: str) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.here = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        self.control = cast(Any, dist.new_group(backend="gloo", timeout=_PATIENCE))
        self._mesh = init_device_mesh(torch.device(device).type, (self.size,))

    def deal(self, items: Sequence[T] | None) -> T:
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, None if items is None else list(items), src=0, group=self.control)
        return mine[0]

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

    def sharded(self, model: PreTrainedModel, *, keep: bool) -> PreTrainedModel:
        self._require_same(model)
        model = copy.deepcopy(model) if keep else model
        trained = [p for p in model.parameters() if p.requires_grad]
        narrow = any(p.dtype == torch.bfloat16 for p in trained)
        for parameter in trained:
            parameter.data = parameter.data.float() if narrow else parameter.data
        dtypes: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if narrow else {}
        policy = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False)
        whole = set(getattr(model, "_no_split_modules", None) or ())
        layers = [module for module in model.modules() if type(module).__name__ in whole]
        for module in (*layers, model):
            fully_shard(module, mesh=self._mesh, mp_policy=policy, reshard_after_forward=True)
            module = cast(Any, module)
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
        setattr(model, _PASS, _call)
        register_fsdp_forward_method(model, _PASS)
        return model

    def _require_same(self, model: PreTrainedModel) -> None:
        hashes = self.collect(policy_hash(model))
        others = [rank for rank, found in enumerate(hashes) if found != hashes[0]]
        if others:
            problem = f"rank {others[0]} has loaded other weights than rank 0"
            raise InputError(problem, field="model", hint="give every machine the same folder")

    def gather(self, weights: Iterable[Tensor], into: Sequence[Tensor] | None) -> None:
        for number, weight in enumerate(weights):
            found = whole(weight.detach())
            if into is not None:
                into[number].detach().copy_(found)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor whose shards are on several ranks, which all must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def in_pass(model: PreTrainedModel, function: Callable[..., T], *arguments: Any) -> T:
    """`function(*arguments)` with the weights of `model` at hand that belong to no layer: FSDP2 gathers them around a
    forward method only. The function returns tensors, or nests of them, so that FSDP2 sees the backward pass begin."""
    return getattr(model, _PASS, _call)(function, *arguments)


def _call(function: Callable[..., T], *arguments: Any) -> T:
    return function(*arguments)


def partition(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """The numbers of the items of each rank: each item on one rank, ranks alike in their sum of sizes.

    Longest first, each to the rank with the least so far (Graham 1969): the largest sum is at most 4/3 of the best
    possible one. Ties go to the lower number, so the same sizes give the same parts. Ranks may stay without an item.
    """
    loads = [(0, rank) for rank in range(ranks)]
    parts: list[list[int]] = [[] for _ in range(ranks)]
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        load, rank = heapq.heappop(loads)
        parts[rank].append(item)
        heapq.heappush(loads, (load + sizes[item], rank))
    return [sorted(part) for part in parts]


def parameters_of(model: PreTrainedModel) -> dict[str, Parameter]:
    """The parameters that training changes, by name (tied ones once)."""
    return {name: value for name, value in model.named_parameters() if value.requires_grad}
