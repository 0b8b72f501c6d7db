"""The experts that a server computed each token with, replayed in this process: sampler and trainer are one mixture
then, though they round differently (rollout routing replay: Ma et al. 2025, arXiv:2510.11370).

Nothing goes by a model's name. While a layer with experts computes, `torch.topk` over all of them answers with those
that are replayed, and the family's own code weighs them, with its gradient. Whether the experts were called with these
is looked at in every pass.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from turntree.core.completion import NARROW
from turntree.core.errors import InputError

_WITHOUT = "start the server without --enable-return-routed-experts: the model then routes every token itself"


def mixture_of(model: PreTrainedModel) -> tuple[int, int, int]:
    """Layers, experts of a token, and experts of a layer; zeros for a model that is no mixture."""
    config = model.config.get_text_config()
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    count = getattr(config, "num_experts_per_tok", None)
    return (config.num_hidden_layers, count, experts) if experts and count else (0, 0, 0)


def routes_of(model: PreTrainedModel, told: Tensor | Sequence[str] | None) -> Tensor | None:
    """The experts [..., layers, experts of a token] that bytes [..., R] name, for `replayed` passes of `model`; -1
    where it chooses. None where nothing is told. A sequence is `Completion.routes` of all tokens of a row but the last.
    Raises `InputError` for routes of another model."""
    if told is None or not len(told):
        return None
    if not isinstance(told, Tensor):
        known = [[*b64decode(route)] for route in told]
        told = torch.tensor([*known, [255] * len(known[0])], dtype=torch.uint8)
    layers, count, experts = mixture_of(model)
    kind = torch.int8 if experts <= NARROW else torch.int16
    if told.shape[-1] != layers * count * kind.itemsize:
        raise InputError(f"{type(model).__name__} cannot replay the routes of another model", hint=_WITHOUT)
    for name, layer in model.named_modules():
        own = getattr(layer, "experts", None)
        if isinstance(own, torch.nn.Module) and _end not in layer._forward_hooks.values():
            number = next(int(part) for part in name.split(".") if part.isdigit())
            layer.register_forward_pre_hook(partial(_begin, number, experts))
            own.register_forward_pre_hook(_end, with_kwargs=True)
            layer.register_forward_hook(_end, always_call=True)
    return told.view(kind).unflatten(-1, (layers, count)).long().to(model.device)


@contextmanager
def replayed(routes: Tensor | None) -> Iterator[None]:
    """Passes within go over tokens [...] with these `routes_of` them; None: the model chooses. A pass raises
    `InputError` where the experts of a layer are not called with them."""
    before = _ROUTES.set(routes)
    try:
        yield
    finally:
        _ROUTES.reset(before)


def again() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For a layer that the backward pass computes again, when the block has ended (torch's `context_fn`)."""
    return nullcontext(), replayed(_ROUTES.get())


class _Chosen(TorchFunctionMode):
    """The largest of all experts are those that were given; -1 leaves the model's own."""

    def __init__(self, given: Tensor, experts: int) -> None:
        super().__init__()
        self.given, self.size, self.chosen = given, (len(given), experts), given

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or args[0].shape != self.size:  # groups of them have another size
            return found
        self.chosen = torch.where(self.given < 0, found.indices, self.given)
        return torch.return_types.topk((args[0].gather(-1, self.chosen), self.chosen))


_ROUTES: ContextVar[Tensor | None] = ContextVar("routes", default=None)
_OPEN: ContextVar[_Chosen | None] = ContextVar("open", default=None)


def _begin(number: int, experts: int, layer: Any, args: Any) -> None:
    if (routes := _ROUTES.get()) is not None:
        _OPEN.set(_Chosen(routes[..., number, :].flatten(0, -2), experts).__enter__())


def _end(module: Any, args: tuple[Any, ...], rest: Any) -> None:
    """Before the experts are called, with the choice (`rest`: by name), and behind their layer (None: it failed)."""
    if (mode := _OPEN.get()) is not None:
        _OPEN.set(None)
        mode.__exit__(None, None, None)
        given = (*args, *(rest.values() if isinstance(rest, dict) else ()))
        if rest is not None and mode.chosen.data_ptr() not in [x.data_ptr() for x in given if isinstance(x, Tensor)]:
            problem = f"{type(module).__name__} takes experts that were chosen in a way that cannot be replayed"
            raise InputError(problem, hint=_WITHOUT)
