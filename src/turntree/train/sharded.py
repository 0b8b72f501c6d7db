"""Weights that the ranks of a run hold in shards, by `fully_shard` (FSDP2; Zhao et al. 2023, "PyTorch FSDP"): each
layer is gathered while it computes, and gradients are summed (not averaged) over the ranks, because the normaliser of
the loss already spans all of them.

Trained bfloat16 weights are float32 in the shards, which so are the masters of mixed precision (`train.optimizer`),
and are gathered in bfloat16: a pass computes the same numbers as in one process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from turntree.train.ranks import ProcessGroup

T = TypeVar("T")

_PASS = "turntree_pass"


def shard(model: PreTrainedModel | None, group: ProcessGroup, *, frozen: bool = False) -> PreTrainedModel:
    """A copy of rank 0's `model` (None on the others) in shards, as passes use it; `frozen`: none of it is trained.

    One layer at a time is whole on a rank, so that no rank's device needs more than its shard and the largest layer
    (rank 0 has `model` beside it). The other ranks read no folder: they get the outline of the model, then its weights.
    """
    assert group.mesh is not None
    copied = group.scatter([_outline(model, frozen)] * group.size if model is not None else None)
    device = torch.device(group.mesh.device_type)
    for module in copied.modules():
        module._buffers.update({name: b.to(device) for name, b in module._buffers.items() if b is not None})
    narrow = any(p.dtype == torch.bfloat16 for p in parameters_of(copied).values())
    dtypes: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if narrow else {}
    policy = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False)
    layer_names = set(getattr(copied, "_no_split_modules", None) or ())
    layers = [module for module in copied.modules() if type(module).__name__ in layer_names]
    names = {id(parameter): name for name, parameter in copied.named_parameters()}
    for module in (*layers, copied):
        filled: dict[int, Parameter] = {}
        for parameter in [p for p in module.parameters() if not isinstance(p, DTensor)]:
            source = None if model is None else model.get_parameter(names[id(parameter)])
            value = (
                torch.empty_like(parameter, device=device) if source is None else source.detach().to(device, copy=True)
            )
            group.broadcast(value)
            widened = narrow and parameter.requires_grad
            filled[id(parameter)] = Parameter(value.float() if widened else value, parameter.requires_grad)
        for part in copied.modules():  # all of them, so that ties hold
            part._parameters.update({name: filled.get(id(p), p) for name, p in part._parameters.items()})
        fully_shard(module, mesh=group.mesh, mp_policy=policy, reshard_after_forward=True)
        module = cast(Any, module)
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
    setattr(copied, _PASS, _call)
    register_fsdp_forward_method(copied, _PASS)
    return copied


def _outline(model: PreTrainedModel, frozen: bool) -> PreTrainedModel:
    """A copy whose parameters have no values, and whose buffers lie on the CPU: what can be sent to another rank."""
    trained = {id(p): p.requires_grad and not frozen for p in model.parameters()}
    empty = {id(p): Parameter(torch.empty_like(p, device="meta"), trained[id(p)]) for p in model.parameters()}
    copied = copy.deepcopy(model, cast(Any, empty))
    for module in copied.modules():
        module._buffers.update({name: b.cpu() for name, b in module._buffers.items() if b is not None})
    return copied


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
