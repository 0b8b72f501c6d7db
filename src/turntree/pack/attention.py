"""Attention over packed trees through Transformers' `AttentionInterface`: any decoder that uses it runs unpatched.

Slot q sees slot k iff `k <= q < last[k]`. Three layouts compute that:

dense   SDPA with the boolean mask [B, 1, L, L]; also what a model on stock "sdpa" gets
pieces  plain calls over slices of the row: no score of a pair that nobody may see, no copied keys (CPU)
flex    FlexAttention with a block mask (CUDA; on CPU it has no backward pass)

carried models that keep a state (`pack.carried`): no attention over a tree at all

With `TREE_SDPA` the cheaper of the first two is chosen for each batch; `TREE_FLEX` is the third. A call without a tree
runs stock SDPA, so the same model can sample.

Pieces: the queries below a chain of slots all see the whole chain, and the chain sees itself causally. So a tree is one
triangle a chain and one rectangle for what lies below it, all of them slices of the row. A query adds up what its
pieces give it, weighted by their log-sum-exp, and the gradient of a piece follows from the sums (as between the devices
of ring attention: Liu et al. 2023, arXiv:2310.01889). Small neighbouring subtrees are one square with a mask where that
is cheaper than a call for each. On CPUs only: the kernel that returns the log-sum-exp is called by its own name.

Shape suffixes as in `pack.packing`; H heads, Q queries and K keys of a piece, E width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch._dynamo import config as dynamo
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from turntree.core.errors import ConfigError, InputError
from turntree.engine.compatibility import check_window
from turntree.pack.carried import is_carried
from turntree.pack.head import decoder_of
from turntree.pack.packing import PackedBatch
from turntree.pack.slots import chains

# The side of a block of FlexAttention's mask, in slots, and how many graphs its compiled kernel may have. One policy
# needs nine: one row or several, less than a block of slots or more, with a gradient or without. PyTorch stops at
# eight, and then makes whole score matrices, with a warning and no error.
BLOCK, GRAPHS = 128, 64
# Costs in query-key pairs, measured on a CPU at four heads of 16 and 64: a call, and adding a query's pieces up.
CALL, ADD = 4096, 24

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

TREE_SDPA, TREE_FLEX = "turntree_sdpa", "turntree_flex"
Layout = Literal["dense", "pieces", "flex", "carried"]
_LAYOUTS: dict[str, tuple[Layout, ...]] = {
    "sdpa": ("dense",),
    TREE_SDPA: ("dense", "pieces"),
    TREE_FLEX: ("flex",),
}


def set_tree_attention(model: PreTrainedModel, backend: Literal["sdpa", "flex_attention"] = "sdpa") -> None:
    """Set `model` to attend over packed trees efficiently. Flat rows are sampled and scored as with "sdpa".

    A model that Transformers gives other attention than that (sinks, capped scores) keeps it, and is refused when a
    tree is packed. Raises `ConfigError` for FlexAttention off CUDA, and for a decoder that cannot have it.
    """
    if backend == "flex_attention" and model.device.type != "cuda":
        raise ConfigError("'flex_attention' has no backward pass off CUDA", field="attention", hint="use sdpa")
    own = model.config._attn_implementation
    if own not in _LAYOUTS:
        if backend == "flex_attention":
            raise ConfigError(f"{type(model).__name__} has {own} attention", field="attention", hint="use sdpa")
        return
    name = TREE_SDPA
    if backend == "flex_attention":
        name, dynamo.recompile_limit = TREE_FLEX, max(dynamo.recompile_limit, GRAPHS)
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise ConfigError(f"{type(model).__name__} has its own attention code", field="attention", hint="use sdpa")
    if "pieces" in layouts(model) and not _hands_pieces_on(model):
        model.set_attn_implementation("sdpa")  # dense, which needs no keyword of its own


class _Arrived(Exception):
    """The keyword of the pieces came to the attention."""


_ASKING: Any = object()  # in place of pieces


def _hands_pieces_on(model: PreTrainedModel) -> bool:
    """Whether the decoder passes a keyword that it does not know on to its attention. StableLM and Nemotron do not."""
    token_BL = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    try:
        with torch.no_grad():
            decoder_of(model)(input_ids=token_BL, use_cache=False, tree_pieces=_ASKING)
    except _Arrived:
        return True
    except TypeError:  # it takes no keywords at all
        return False
    return False


def layouts(model: PreTrainedModel) -> tuple[Layout, ...]:
    """The layouts that packed batches of `model` may take. Raises `InputError` for a backend that would misread a tree:
    eager attention adds a boolean mask as 0 and 1 instead of masking with it, silently wrong."""
    if is_carried(model):
        return ("carried",)
    backend = model.config._attn_implementation
    if backend not in _LAYOUTS:
        raise InputError(
            f"attention backend {backend!r} does not read the boolean tree mask",
            field="attn_implementation",
            hint='load the model with attn_implementation="sdpa"',
        )
    # the kernel of the pieces runs on CPUs, and wants values as wide as queries (latent attention has others)
    in_pieces = model.device.type == "cpu" and getattr(model.config, "v_head_dim", None) is None
    return tuple(one for one in _LAYOUTS[backend] if one != "pieces" or in_pieces)


def decoder_inputs(model: PreTrainedModel, batch: PackedBatch, layout: Layout | None = None) -> dict[str, Any]:
    """The keyword arguments, besides the tokens, with which the decoder of `model` attends over each row of `batch` as
    a tree.

    `layout` overrides the choice by cost, for `check_path_isolation`, which measures: "pieces" are then the smallest.
    Else layers that would not see the tree raise `InputError`: trees of such a model are packed with `shared=False`.
    """
    if batch.is_flat:
        return {"attention_mask": None}
    if layout is None:
        check_window(model, batch.longest, field="max_tokens")
    positions = {"position_ids": batch.positions_BL}
    allowed = layouts(model) if layout is None else (layout,)
    if "flex" in allowed:
        return positions | {"attention_mask": tree_block_mask(batch)}
    if "pieces" in allowed:
        call = CALL if layout is None else 0
        costs, planned = zip(*(plan(last, call) for last in batch.last_BL.tolist()), strict=True)
        if "dense" not in allowed or sum(costs) < batch.last_BL.shape[0] * batch.last_BL.shape[1] ** 2 + call:
            rows = tuple(pieces(*row, model.dtype) for row in zip(batch.last_BL, planned, strict=True))
            # A decoder that does not pass the keyword on to its attention loses the tree and fails the isolation check.
            nothing = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=batch.tokens_BL.device)
            return positions | {"attention_mask": nothing, "tree_pieces": rows}
    return positions | {"attention_mask": batch.attention_mask()}


def tree_block_mask(batch: PackedBatch) -> BlockMask:
    """The block mask of the tree for FlexAttention; only blocks of 128 x 128 with a visible pair are computed.

    Made from the blocks alone: `create_block_mask` makes the mask of all pairs first, at ten bytes a pair. A block of
    keys is seen from a later block of queries as far as `last` of its slots reach.
    """
    last_BL = batch.last_BL
    length = last_BL.shape[1]

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < last_BL[row, key])

    last_BKL = torch.nn.functional.pad(last_BL, (0, -length % BLOCK)).unflatten(1, (-1, BLOCK))
    block_K = torch.arange(last_BKL.shape[1], device=last_BL.device)
    query_Q1 = BLOCK * block_K[:, None]  # the first of the block
    before_QK = block_K < block_K[:, None]
    full_BQK = before_QK & (last_BKL.amin(-1)[:, None] >= query_Q1 + BLOCK)
    some_BQK = (before_QK & (last_BKL.amax(-1)[:, None] > query_Q1)) | (block_K == block_K[:, None])
    return BlockMask.from_kv_blocks(
        *_in_order(some_BQK & ~full_BQK), *_in_order(full_BQK), BLOCK, visible, seq_lengths=(length, length)
    )


def _in_order(seen_BQK: Tensor) -> tuple[Tensor, Tensor]:
    """For each block of queries, as `BlockMask` takes them for all heads: how many blocks of keys, and these first."""
    order_BQK = torch.argsort(seen_BQK.int(), dim=-1, descending=True, stable=True)
    return seen_BQK.sum(-1, dtype=torch.int32)[:, None], order_BQK.int()[:, None]


def _tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    *,
    tree_pieces: Rows | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The function behind `TREE_SDPA` and `TREE_FLEX`, as `AttentionInterface` calls it."""
    if tree_pieces is _ASKING:
        raise _Arrived
    stock = {"scaling": scaling, "dropout": dropout, **kwargs}
    if isinstance(attention_mask, BlockMask):
        # torch's own choice for less than a block of queries is a kernel that cannot do grouped heads (seen on an H100)
        options = {"FORCE_USE_FLEX_ATTENTION": True}
        return flex_attention_forward(module, query, key, value, attention_mask, kernel_options=options, **stock)
    if tree_pieces is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **stock)
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise InputError(f"attention with {name!r} cannot run over packed trees", hint="train on flat batches")
    if dropout:
        raise InputError("attention with dropout cannot run over packed trees", hint="train in evaluation mode")
    attended_BHLE = PieceAttention.apply(query, key, value, tree_pieces, scaling)
    return attended_BHLE.transpose(1, 2).contiguous(), None


for _name in (TREE_SDPA, TREE_FLEX):
    AttentionInterface.register(_name, _tree_attention)
    AttentionMaskInterface.register(_name, sdpa_mask)


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
    for start, end in reversed(chains(last)):
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
