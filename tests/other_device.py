"""A second device on a machine that has none: tensors that say `meta`, hold real numbers, and cannot be mixed with
those of the CPU where a GPU would refuse it.

>>> with other_device(): model = tiny_model().to(OTHER)

What a GPU forgives is forgiven here: scalars of the CPU as operands, indices from the CPU, lists as indices, and copies
from one device to the other. Numbers are computed on the CPU, by kernels that may be others than those of a tensor of
the CPU: they are equal up to rounding. Weights cannot change their dtype in place (`parameter.data = wider`), which
PEFT does to adapters in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

OTHER = torch.device("meta")  # the one device, besides the CPU, for which a CPU build of PyTorch records gradients
CPU = torch.device("cpu")
_OPS = torch.ops.aten
_TRANSFERS = {_OPS.copy_.default, _OPS._to_copy.default}
_INDEXED = {_OPS.index.Tensor, _OPS.index_put.default, _OPS.index_put_.default, _OPS._index_put_impl_.default}


class Elsewhere(Tensor):
    """A tensor of the other device; `here` has its numbers."""

    here: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, here: Tensor) -> Elsewhere:
        shape = {"strides": here.stride(), "storage_offset": here.storage_offset(), "dtype": here.dtype}
        made = Tensor._make_wrapper_subclass(cls, here.size(), **shape, device=OTHER, requires_grad=here.requires_grad)
        made.here = here
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operation on the CPU; its result on the device that was named, else on that of its operands."""
    operands = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    away = [each for each in operands if isinstance(each, Elsewhere)]
    if away and func not in _TRANSFERS:
        # the indices of an indexed tensor are its second argument
        bound = tree_leaves([args[:1], args[2:]]) if func in _INDEXED else operands
        if any(isinstance(each, Tensor) and not isinstance(each, Elsewhere) and each.dim() for each in bound):
            shapes = [(str(each.device), tuple(each.shape)) for each in operands]
            raise RuntimeError(f"{func}: tensors on two devices, {shapes}")
    device = kwargs.get("device")
    placed = kwargs if device is None else kwargs | {"device": CPU}
    found = func(*tree_map(_here, args), **tree_map(_here, placed))
    stays = func is _OPS._local_scalar_dense.default
    if stays or not (away if device is None else torch.device(device).type == OTHER.type):
        return found
    found = tree_map(lambda each: Elsewhere(each) if isinstance(each, Tensor) else each, found)
    return return_and_correct_aliasing(func, args, kwargs, found) if away else found


def _here(value: Any) -> Any:
    return value.here if isinstance(value, Elsewhere) else value


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):  # in inference mode
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        return _run(func, args, kwargs)


class _Calls(TorchFunctionMode):
    """What PyTorch does with the data of a tensor before it asks for an operation."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func in (torch.tensor, torch.as_tensor) and device is not None:
            return func(*args, **kwargs | {"device": CPU}).to(device)
        if args and isinstance(args[0], Elsewhere):
            if func is Tensor.tolist:
                return args[0].here.tolist()
            if func is Tensor.numpy:
                raise TypeError("a tensor of another device has no array; use Tensor.cpu() first")
            if func in (Tensor.__getitem__, Tensor.__setitem__):
                index = args[1]
                args = (args[0], tuple(map(_index, index)) if type(index) is tuple else _index(index), *args[2:])
        return func(*args, **kwargs)


def _index(value: Any) -> Any:
    listed = isinstance(value, list | range | tuple)
    return torch.tensor(list(value), dtype=None if len(value) else torch.long) if listed else value


@contextmanager
def other_device() -> Iterator[None]:
    with _Calls(), _Operations():
        yield
