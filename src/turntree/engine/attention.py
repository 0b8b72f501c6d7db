"""Batched attention in which sequences that continue the same prompt share the prompt's keys and values.

A sequence in decoding consists of a prefix (rows of a `RowCache`, shared by all its siblings) and a tail of own tokens.
One forward serves R sequences, whatever their prefixes: attention to the prefixes is a matrix product per group of
rows, attention to the tails one batched product over all sequences, and the two are merged by their log-sum-exps
(as in Hydragen, arXiv:2402.05099; cascade inference in FlashInfer). Grouped-query heads are folded into the rows of
the products, so that keys and values are never repeated.

It is a registered attention function of Transformers: the `Cache` that it fills returns the keys and values to read.

Shape suffixes: R sequences, U rows of a cache, G sequences that continue a row, H heads, K key/value heads, J heads
per key/value head, P prefix slots, T tail slots, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from turntree.engine.cache import PositionedCache, RowCache

_NAME = "turntree_shared_prefix"


@dataclass(frozen=True)
class Group:
    """`rows` consecutive rows of a cache from `first` on, of which the first `width` slots are prefixes.

    `cells_UG` are the sequences that continue each row; where there are fewer than G, a cell points to any sequence
    and its result is dropped: `real_N` are the positions of the real ones in the flattened grid. `hidden_UGP` marks
    the slots beyond the prefix of a cell (None: all have `width` tokens).
    """

    cache: RowCache
    first: int
    rows: int
    width: int
    cells_UG: Tensor
    real_N: Tensor
    hidden_UGP: Tensor | None


class DecodingCache(PositionedCache):
    """The `past_key_values` of one decoding step: R sequences add a token each, [1, K, R, D].

    `tails` hold the own tokens of sequence r in row r, and expect the new ones; `hidden_RT` are the tail slots that a
    sequence does not see (None: all are as long).
    """

    def __init__(self, groups: Sequence[Group], tails: RowCache, hidden_RT: Tensor | None) -> None:
        super().__init__()
        self._groups, self._tails, self._hidden_RT = groups, tails, hidden_RT

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        own = self._tails.update(key_states.transpose(0, 2), value_states.transpose(0, 2), layer_idx)
        layer = _Layer(self, layer_idx, *own)
        return layer, layer

    def attend(self, layer: _Layer, query_HRD: Tensor) -> Tensor:
        """Attention [R, H, D] of queries that are scaled already."""
        query_RKJD = query_HRD.transpose(0, 1).unflatten(1, (layer.keys_RKTD.shape[1], -1))
        scores_RKJT = (query_RKJD @ layer.keys_RKTD.mT).float()
        if self._hidden_RT is not None:
            scores_RKJT.masked_fill_(self._hidden_RT[:, None, None], float("-inf"))
        tail = _Partial.of(scores_RKJT, layer.values_RKTD)
        parts = [_prefix(group, layer.number, query_RKJD) for group in self._groups]
        return tail.merged(_scattered(self._groups, parts, tail)).to(query_HRD.dtype).flatten(1, 2)


@dataclass(frozen=True)
class _Layer:
    """Stands for the keys and values of a layer between the cache and the attention function; has those of the
    tails."""

    cache: DecodingCache
    number: int
    keys_RKTD: Tensor
    values_RKTD: Tensor


@dataclass(frozen=True)
class _Partial:
    """Attention to some of the slots: the largest score, and relative to it the mass and the weighted values."""

    peak: Tensor
    mass: Tensor
    values: Tensor

    @classmethod
    def of(cls, scores: Tensor, values: Tensor) -> _Partial:
        peak = scores.amax(-1, keepdim=True)
        weights = scores.sub_(peak).exp_()
        return cls(peak, weights.sum(-1, keepdim=True), (weights.to(values.dtype) @ values).float())

    def merged(self, other: _Partial) -> Tensor:
        """Attention to the slots of both."""
        peak = torch.maximum(self.peak, other.peak)
        mine, theirs = (self.peak - peak).exp_(), (other.peak - peak).exp_()
        values = self.values * mine + other.values * theirs
        return values / (self.mass * mine + other.mass * theirs)


def _prefix(group: Group, layer: int, query_RKJD: Tensor) -> _Partial:
    """Attention of the cells of a group to their prefixes, [U * G, K, J, ...]."""
    keys_UKPD, values_UKPD = group.cache.rows_of(layer, group.first, group.rows, group.width)
    lanes, heads = group.cells_UG.shape[1], query_RKJD.shape[2]
    query = query_RKJD[group.cells_UG].transpose(1, 2).flatten(2, 3)  # U, K, G * J, D
    scores = (query @ keys_UKPD.mT).float()
    if group.hidden_UGP is not None:
        hidden = group.hidden_UGP[:, None, :, None]
        scores.unflatten(2, (lanes, heads)).masked_fill_(hidden, float("-inf"))
    part = _Partial.of(scores, values_UKPD)

    def by_cell(tensor: Tensor) -> Tensor:
        return tensor.unflatten(2, (lanes, heads)).transpose(1, 2).flatten(0, 1)

    return _Partial(by_cell(part.peak), by_cell(part.mass), by_cell(part.values))


def _scattered(groups: Sequence[Group], parts: Sequence[_Partial], like: _Partial) -> _Partial:
    """The parts of all groups in order of sequence; a sequence without a prefix (an idle one) has no mass there."""
    whole = _Partial(torch.zeros_like(like.peak), torch.zeros_like(like.mass), torch.zeros_like(like.values))
    for group, part in zip(groups, parts, strict=True):
        cells_N = group.cells_UG.flatten()[group.real_N]
        whole.peak[cells_N] = part.peak[group.real_N]
        whole.mass[cells_N] = part.mass[group.real_N]
        whole.values[cells_N] = part.values[group.real_N]
    return whole


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: _Layer,
    value: _Layer,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The signature of attention functions in Transformers: [1, H, R, D] queries; returns [1, R, H, D]."""
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise ValueError(f"its attention has {name!r}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return key.cache.attend(key, query[0] * scale)[None], None


@contextmanager
def shared_prefix_attention(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the model attends with `DecodingCache`; afterwards as before."""
    AttentionInterface.register(_NAME, _attend)
    before = model.config._attn_implementation
    model.config._attn_implementation = _NAME
    try:
        yield
    finally:
        model.config._attn_implementation = before
