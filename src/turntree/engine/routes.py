"""The experts that a server routed each token to, replayed in this process: sampler and trainer are one mixture then,
though they round differently (rollout routing replay: Ma et al. 2025, arXiv:2510.11370).

Nothing goes by a model's name. While a layer with experts computes, `torch.topk` over all of them answers with those
that are replayed, and the family's own code weighs them, with its gradient. Whether its experts were called with these
is looked at in every pass.
"""

from __future__ import annotations

from collections.abc import Iterator
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

_HOOKED = "turntree_routes"
_WITHOUT = "start the server without --enable-return-routed-experts: the model then routes every token itself"


def mixture_of(model: PreTrainedModel) -> tuple[int, int, int] | None:
    """Layers, experts of a token, and experts of a layer; None for a model that is no mixture."""
    config = model.config.get_text_config()
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    return (config.num_hidden_layers, config.num_experts_per_tok, experts) if experts else None


def routes_of(model: PreTrainedModel, told: Tensor | None) -> Tensor | None:
    """The experts [..., layers, experts of a token] that these bytes [..., R] name (`core.completion.Completion`), -1
    where the model chooses. None stays None. Raises `InputError` for routes of another model."""
    if told is None:
        return None
    layers, count, experts = mixture_of(model) or (0, 0, 0)
    kind = torch.int8 if experts <= NARROW else torch.int16
    if told.shape[-1] != layers * count * kind.itemsize:
        raise InputError(f"{type(model).__name__} cannot replay the routes of another model", hint=_WITHOUT)
    return told.view(kind).unflatten(-1, (layers, count)).long()


@contextmanager
def replayed(model: PreTrainedModel, routes: Tensor | None) -> Iterator[None]:
    """Passes of `model` within go over tokens [...] with these `routes_of` them; None: the model chooses. A pass raises
    `InputError` where the experts of a layer are not called with them."""
    for name, layer in model.named_modules() if routes is not None else ():
        if isinstance(experts := getattr(layer, "experts", None), torch.nn.Module) and not hasattr(layer, _HOOKED):
            number = next(int(part) for part in name.split(".") if part.isdigit())
            layer.register_forward_pre_hook(partial(_begin, number, mixture_of(model)))
            experts.register_forward_pre_hook(_look, with_kwargs=True)
            layer.register_forward_hook(_end, always_call=True)
            setattr(layer, _HOOKED, True)
    with _within(None if routes is None else routes.flatten(0, -3).to(model.device)):
        yield


def again() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For a layer that the backward pass computes again, when the block has ended (torch's `context_fn`)."""
    return nullcontext(), _within(_ROUTES.get())


@contextmanager
def _within(routes: Tensor | None) -> Iterator[None]:
    before = _ROUTES.set(routes)
    try:
        yield
    finally:
        _ROUTES.reset(before)


class _Chosen(TorchFunctionMode):
    """The largest of all experts are those that were given; -1 leaves the model's own."""

    def __init__(self, given: Tensor, experts: int) -> None:
        super().__init__()
        self.given, self.size, self.chosen = given, (len(given), experts), given

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or args[0].shape != self.size:  # one group of them has another size
            return found
        self.chosen = torch.where(self.given < 0, found.indices, self.given)
        return torch.return_types.topk((args[0].gather(-1, self.chosen), self.chosen))


_ROUTES: ContextVar[Tensor | None] = ContextVar("routes", default=None)  # [tokens, layers, experts of a token]
_OPEN: ContextVar[_Chosen | None] = ContextVar("open", default=None)


def _begin(number: int, sizes: tuple[int, int, int], layer: Any, args: Any) -> None:
    if (routes := _ROUTES.get()) is not None:
        _OPEN.set(_Chosen(routes[:, number], sizes[2]).__enter__())


def _look(experts: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The choice is made: whether the experts are called with it."""
    if (mode := _closed()) is not None:
        given = [each.data_ptr() for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        if mode.chosen is mode.given or mode.chosen.data_ptr() not in given:
            raise _unseen(experts)


def _end(layer: Any, args: Any, output: Any) -> None:
    if _closed() is not None and output is not None:  # None: it failed
        raise _unseen(layer)


def _closed() -> _Chosen | None:
    if (mode := _OPEN.get()) is not None:
        _OPEN.set(None)
        mode.__exit__(None, None, None)
    return mode


def _unseen(layer: Any) -> InputError:
    return InputError(f"{type(layer).__name__} chooses its experts in a way that cannot be replayed", hint=_WITHOUT)
