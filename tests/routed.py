"""The experts of tokens, for tests: what a model chooses, what a server says of it, and trees that have them.

>>> from routed import as_vllm, by_token, chosen, routed_at_random, to_replay
"""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from turntree.core.tree import RolloutTree
from turntree.engine.routes import mixture_of, routes_of


def mixed(model: PreTrainedModel) -> dict[int, torch.nn.Module]:
    """The layers with experts, by their number."""
    return {
        next(int(part) for part in name.split(".") if part.isdigit()): layer
        for name, layer in model.named_modules()
        if isinstance(getattr(layer, "experts", None), torch.nn.Module)
    }


@contextmanager
def chosen(model: PreTrainedModel) -> Iterator[dict[int, list[torch.Tensor]]]:
    """The experts [tokens, experts of a token] that each of these layers is called with in the block, call by call."""
    found: dict[int, list[torch.Tensor]] = {number: [] for number in mixed(model)}

    def look(number: int) -> Any:
        return lambda module, args: found[number].append(next(x for x in args if not x.is_floating_point()).clone())

    hooks = [layer.experts.register_forward_pre_hook(look(number)) for number, layer in mixed(model).items()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def by_token(model: PreTrainedModel, found: dict[int, list[torch.Tensor]]) -> np.ndarray:
    """[tokens, layers, experts of a token], as vLLM counts layers: 0 in those without experts."""
    layers, count, experts = mixture_of(model)
    calls = {number: torch.cat(each).numpy() for number, each in found.items()}
    told = np.zeros((len(next(iter(calls.values()))), layers, count), np.uint8 if experts <= 256 else np.uint16)
    for number, each in calls.items():
        told[:, number] = each
    return told


def as_vllm(told: np.ndarray) -> str:
    with io.BytesIO() as file:
        np.save(file, told, allow_pickle=False)
        return base64.b64encode(file.getvalue()).decode()


def as_told(model: PreTrainedModel, told: np.ndarray) -> tuple[str, ...]:
    """As a completion has them."""
    kept = told.astype("<i1" if mixture_of(model)[2] <= 128 else "<i2")
    return tuple(base64.b64encode(each.tobytes()).decode() for each in kept)


def to_replay(model: PreTrainedModel, told: np.ndarray) -> torch.Tensor:
    """As passes of `model` over one row of these tokens take them."""
    known = [[*base64.b64decode(route)] for route in as_told(model, told)]
    return routes_of(model, torch.tensor([known], dtype=torch.uint8))


class TellsPlaces:
    """Before a scripted engine: it tells of every token but the last where it stands, as if that were its experts."""

    def submit(self, request: Any) -> int:
        ticket = super().submit(request)
        self.__dict__.setdefault("prompts", {})[ticket] = len(request.prompt_ids)
        return ticket

    def poll(self, timeout: float | None = None) -> list[Any]:
        return [self._told(done) for done in super().poll(timeout)]

    def _told(self, done: Any) -> Any:
        count = self.prompts.pop(done.ticket) + len(done.completion.token_ids) - 1
        return replace(done, completion=replace(done.completion, routes=tuple(map(str, range(count)))))


def are_places(tree: RolloutTree) -> bool:
    """Whether every token of the tree that a sampled one follows has the place at which it stands."""
    followed = {above.id for node in tree if node.sampled for above in tree.path(node.id)[:-1]}
    for node in tree:
        start = sum(len(above.token_ids) for above in tree.path(node.id)[:-1])
        count = len(node.token_ids) if node.id in followed else max(0, len(node.token_ids) - 1) * node.sampled
        if tree.routes(node.id) != tuple(map(str, range(start, start + count))):
            return False
    return True


def routed_at_random(model: PreTrainedModel, tree: RolloutTree, share: float = 0.95) -> RolloutTree:
    """The same tree with random routes of the first tokens of its paths; of others they are not known. Both depend on
    the tokens of a path alone, as where each is computed once."""
    layers, count, experts = mixture_of(model)
    value = tree.to_json()
    value["routes"] = {}
    for node in tree:
        path = [token for part in tree.path(node.id) for token in part.token_ids]
        known: list[str] = []
        for end in range(1, len(path) + 1):
            draw = random.Random(str(path[:end]))
            if draw.random() > share:
                break
            known += as_told(model, np.array([[draw.sample(range(experts), count) for _ in range(layers)]]))
        if own := known[len(path) - len(node.token_ids) :]:
            value["routes"][str(node.id)] = own
    return RolloutTree.from_json(value)
