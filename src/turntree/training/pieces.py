"""Attention over packed trees in pieces, each a plain call: no score of a pair that nobody may see, no copied keys.

The queries below a chain of slots all see the whole chain, and the chain sees itself causally. So a tree is one
triangle a chain and one rectangle for what lies below it, all of them slices of the row. A query adds up what its
pieces give it, weighted by their log-sum-exp, and the gradient of a piece follows from the sums (as between the devices
of ring attention: Liu et al. 2023, arXiv:2310.01889). Small neighbouring subtrees are one square with a mask where that
is cheaper than a call for each.

On CPUs only: the kernel that returns the log-sum-exp is called by its own name. Shape suffixes as in
`training.attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

# Costs in query-key pairs, measured on a CPU at four heads of 16 and 64: a call, and adding a query's pieces up.
CALL, ADD = 4096, 24

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Piece:
    """Queries [start, end) over the keys [first, after) of a row: a triangle or square (the same slots), or a rectangle
    (keys before the queries, all of them seen). `mask_QK` is added to the scores of a square."""

    start: int
    end: int
    first: int
    after: int
    mask_QK: Tensor | None = None

    @property
    def is_own(self) -> bool:
        return self.first == self.start

    @property
    def is_causal(self) -> bool:
        return self.is_own and self.mask_QK is None


@dataclass(frozen=True)
class _Part:
    """Neighbouring subtrees [start, end): their pieces as (start, end, first, after), and the cost of these."""

    start: int
    end: int
    cost: float
    pieces: list[tuple[int, int, int, int]]


def plan(last: Sequence[int], call: float = CALL) -> tuple[float, list[tuple[int, int, int, int]]]:
    """The cheapest cover found of a row with these ends of subtrees, and its cost in query-key pairs, `call` for each
    piece. The pieces of a slot's own chain or square come before rectangles."""
    parts: dict[int, _Part] = {}  # finished subtrees, by their start
    starts = [slot for slot in range(len(last)) if slot == 0 or last[slot] != last[slot - 1]]
    for start, end in reversed(list(pairwise([*starts, len(last)]))):
        stop = last[start]
        below = _siblings(parts, end, stop, call)
        size = end - start
        cost = size * size / 2 + call + sum(part.cost for part in below)
        pieces = [(start, end, start, end)]
        if stop > end:
            cost += (stop - end) * (size + ADD) + call
            pieces.append((end, stop, start, end))
        pieces += [piece for part in below for piece in part.pieces]
        square = _square(start, stop, call)
        parts[start] = square if len(pieces) > 1 and square.cost <= cost else _Part(start, stop, cost, pieces)
    top = _siblings(parts, 0, len(last), call)
    own_first = sorted((piece for part in top for piece in part.pieces), key=lambda piece: piece[0] != piece[2])
    return sum(part.cost for part in top), own_first


def _siblings(parts: dict[int, _Part], start: int, stop: int, call: float) -> list[_Part]:
    """The subtrees that fill [start, stop), neighbours made one square while that is cheaper."""
    found: list[_Part] = []
    while start < stop:
        part = parts.pop(start)
        start = part.end
        if found and (square := _square(found[-1].start, start, call)).cost <= found[-1].cost + part.cost:
            found[-1] = square
        else:
            found.append(part)
    return found


def _square(start: int, end: int, call: float) -> _Part:
    return _Part(start, end, (end - start) ** 2 + call, [(start, end, start, end)])


def pieces(last_L: Tensor, planned: Sequence[tuple[int, int, int, int]], dtype: torch.dtype) -> tuple[Piece, ...]:
    """The planned pieces with their masks."""
    slots_L = torch.arange(len(last_L), device=last_L.device)
    found: list[Piece] = []
    for start, end, first, after in planned:
        mask_QK = None
        if first == start and bool((last_L[start:end] < end).any()):
            key_K, query_Q1 = slots_L[start:end], slots_L[start:end, None]
            hidden_QK = (key_K > query_Q1) | (query_Q1 >= last_L[start:end])
            mask_QK = torch.zeros_like(hidden_QK, dtype=dtype).masked_fill_(hidden_QK, -torch.inf)
        found.append(Piece(start, end, first, after, mask_QK))
    return tuple(found)


Rows = tuple[tuple[Piece, ...], ...]


class PieceAttention(torch.autograd.Function):
    """`PieceAttention.apply(query, key, value, rows, scale)`: [B, H, L, E] from such queries and from keys and values
    with as many heads or a divisor of H."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, rows: Rows, scale: float | None) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        out, sums_BHL = torch.empty_like(query, dtype=wide), query.new_empty(query.shape[:3], dtype=wide)
        for row, piece, (q, k, v) in _slices(rows, query, key, value):
            found, sums = _forward(q, k, v, 0.0, piece.is_causal, attn_mask=piece.mask_QK, scale=scale)
            slots = (slice(row, row + 1), slice(None), slice(piece.start, piece.end))
            if piece.is_own:
                out[slots], sums_BHL[slots] = found, sums
                continue
            both = torch.logaddexp(sums_BHL[slots], sums)
            out[slots] *= (sums_BHL[slots] - both).exp_().unsqueeze(-1)
            out[slots] += found * (sums - both).exp_().unsqueeze(-1)
            sums_BHL[slots] = both
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, sums_BHL)
        ctx.rows, ctx.scale = rows, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, sums_BHL = ctx.saved_tensors
        wide = sums_BHL.dtype
        found = [torch.zeros_like(tensor, dtype=wide) for tensor in (query, key, value)]
        for row, piece, (q, k, v) in _slices(ctx.rows, query, key, value):
            slots = (slice(row, row + 1), slice(None), slice(piece.start, piece.end))
            parts = _backward(
                grads[0][slots], q, k, v, out[slots], sums_BHL[slots], 0.0, piece.is_causal,
                attn_mask=piece.mask_QK, scale=ctx.scale,
            )  # fmt: skip
            keys = (slots[0], slots[1], slice(piece.first, piece.after))
            for gradient, part, where in zip(found, parts, (slots, keys, keys), strict=True):
                gradient[where] += part
        query_grad, key_grad, value_grad = (g.to(t.dtype) for g, t in zip(found, (query, key, value), strict=True))
        return query_grad, key_grad, value_grad, None, None


def _slices(rows: Rows, query: Tensor, key: Tensor, value: Tensor) -> Any:
    for row, found in enumerate(rows):
        for piece in found:
            q = query[row : row + 1, :, piece.start : piece.end]
            k, v = (tensor[row : row + 1, :, piece.first : piece.after] for tensor in (key, value))
            yield row, piece, (q, k, v)
