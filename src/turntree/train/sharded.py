"""Weights that the ranks of a run hold in shards, by `fully_shard` (FSDP2; Zhao et al. 2023, "PyTorch FSDP"): each
layer is gathered while it computes, and gradients are summed (not averaged) over the ranks, because the normaliser of
the loss already spans all of them.

Trained bfloat16 weights are float32 in the shards, which so are the masters of mixed precision (`train.optimizer`),
and are gathered in bfloat16: a pass computes the same numbers as in one process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from turntree.core.errors import InputError
from turntree.engine.checkpoint import policy_hash
from turntree.train.ranks import ProcessGroup

T = TypeVar("T")

_PASS = "turntree_pass"


def shard(model: PreTrainedModel, group: ProcessGroup, *, keep: bool) -> PreTrainedModel:
    """`model` as passes use it. Each rank holds a shard of it, or of a copy to `keep` the model whole. Raises
    `InputError` where the ranks have loaded different weights."""
    if group.mesh is None:
        return model
    hashes = group.collect(policy_hash(model))
    if others := [rank for rank, found in enumerate(hashes) if found != hashes[0]]:
        problem = f"rank {others[0]} has loaded other weights than rank 0"
        raise InputError(problem, field="model", hint="give every machine the same folder")
    model = copy.deepcopy(model) if keep else model
    trained = list(parameters_of(model).values())
    narrow = any(p.dtype == torch.bfloat16 for p in trained)
    for parameter in trained:
        parameter.data = parameter.data.float() if narrow else parameter.data
    dtypes: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if narrow else {}
    policy = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False)
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    for module in (*layers, model):
        fully_shard(module, mesh=group.mesh, mp_policy=policy, reshard_after_forward=True)
        module = cast(Any, module)
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
    setattr(model, _PASS, _call)
    register_fsdp_forward_method(model, _PASS)
    return model


def gather(weights: Iterable[Tensor], into: Sequence[Tensor] | None, group: ProcessGroup) -> None:
    """Copy whole weights into the tensors of rank 0 (None elsewhere). In one process they are the same tensors."""
    for number, weight in enumerate(() if group.mesh is None else weights):
        value = whole(weight.detach())
        if into is not None:
            into[number].detach().copy_(value)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor whose shards are on several ranks, which all must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def in_pass(model: PreTrainedModel, function: Callable[..., T], *arguments: Any) -> T:
    """`function(*arguments)` with the weights of `model` at hand that belong to no layer: FSDP2 gathers them around a
    forward method only. The function returns tensors, or nests of them, so that FSDP2 sees the backward pass begin."""
    return getattr(model, _PASS, _call)(function, *arguments)


def _call(function: Callable[..., T], *arguments: Any) -> T:
    return function(*arguments)


def parameters_of(model: PreTrainedModel) -> dict[str, Parameter]:
    """The parameters that training changes, by name (tied ones once)."""
    return {name: value for name, value in model.named_parameters() if value.requires_grad}
