"""Attention over packed trees through Transformers' `AttentionInterface`: any decoder that uses it runs unpatched.

Slot q sees slot k iff `k <= q < last[k]`. Three layouts compute that: dense   SDPA with the boolean mask [B, 1, L, L];
    also what a model on stock "sdpa" gets blocks  SDPA per block of consecutive queries, over only the keys that some
    query of the block sees. In depth-first order those are the path above the block and the block itself, so a long
    prompt costs its causal half and siblings never compute scores with each other's keys flex    FlexAttention with a
    block mask (CUDA; on CPU it has no backward pass) With `TREE_SDPA` the cheaper of the first two is chosen for each
    batch; `TREE_FLEX` is the third. A call without a tree runs stock SDPA, so the same model can sample.

Shape suffixes as in `training.packing`; H heads, Q queries and K keys of a block, E width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from turntree.core.errors import ConfigError, InputError
from turntree.training.packing import PackedBatch

TREE_SDPA, TREE_FLEX = "turntree_sdpa", "turntree_flex"
Layout = Literal["dense", "blocks", "flex"]
_LAYOUTS: dict[str, tuple[Layout, ...]] = {
    "sdpa": ("dense",),
    TREE_SDPA: ("dense", "blocks"),
    TREE_FLEX: ("flex",),
}

# Costs in query-key pairs, measured on a CPU at four heads of 64: a call, and per slot of its row (copies of keys and
# values, and their gradient).
_CALL, _PER_SLOT = 4096, 12


@dataclass(frozen=True)
class Block:
    """Queries [start, end) of a row. `keys` are slices of the row, the last of which ends at `end`. `mask_QK` is added
    to the scores; None is plain causal attention."""

    start: int
    end: int
    keys: tuple[tuple[int, int], ...]
    mask_QK: Tensor | None


Blocks = tuple[tuple[Block, ...], ...]  # of every row


def set_tree_attention(model: PreTrainedModel, backend: Literal["sdpa", "flex_attention"] = "sdpa") -> None:
    """Set `model` to attend over packed trees efficiently. Flat rows are sampled and scored as with "sdpa".

    Raises `ConfigError` for FlexAttention off CUDA, and for a decoder that does not use `AttentionInterface`.
    """
    if backend == "flex_attention" and model.device.type != "cuda":
        raise ConfigError("'flex_attention' has no backward pass off CUDA", field="attention", hint="use sdpa")
    name = TREE_FLEX if backend == "flex_attention" else TREE_SDPA
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise ConfigError(f"{type(model).__name__} has its own attention code", field="attention", hint="use sdpa")


def layouts(model: PreTrainedModel) -> tuple[Layout, ...]:
    """The layouts that packed batches of `model` may take. Raises `InputError` for a backend that would misread a tree:
    eager attention adds a boolean mask as 0 and 1 instead of masking with it, silently wrong."""
    backend = model.config._attn_implementation
    if backend not in _LAYOUTS:
        raise InputError(
            f"attention backend {backend!r} does not read the boolean tree mask",
            field="attn_implementation",
            hint='load the model with attn_implementation="sdpa"',
        )
    return _LAYOUTS[backend]


def decoder_inputs(model: PreTrainedModel, batch: PackedBatch, layout: Layout | None = None) -> dict[str, Any]:
    """The keyword arguments, besides the tokens, with which the decoder of `model` attends over each row of `batch` as
    a tree.

    `layout` overrides the choice by cost, for `check_path_isolation`: "blocks" is then one block per chain.
    """
    if batch.is_flat:
        return {"attention_mask": None}
    positions = {"position_ids": batch.positions_BL}
    allowed = layouts(model) if layout is None else (layout,)
    if "flex" in allowed:
        return positions | {"attention_mask": tree_block_mask(batch)}
    rows = [_Row(*row) for row in zip(batch.last_BL.tolist(), batch.positions_BL.tolist(), strict=True)]
    dense_cost = len(rows) * batch.last_BL.shape[1] * (batch.last_BL.shape[1] + _PER_SLOT) + _CALL
    bounds = [row.runs() if layout else row.merged_runs() for row in rows] if "blocks" in allowed else []
    blocks_cost = sum(row.cost(*block) for row, blocks in zip(rows, bounds, strict=False) for block in blocks)
    if "dense" in allowed and (not bounds or dense_cost <= blocks_cost):
        return positions | {"attention_mask": batch.attention_mask()}
    # A decoder that does not pass the keyword on to its attention loses the tree and fails the isolation check.
    nothing = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=batch.tokens_BL.device)
    blocks = tuple(
        tuple(_block(row, last_L, start, end, model.dtype) for start, end in found)
        for row, last_L, found in zip(rows, batch.last_BL, bounds, strict=True)
    )
    return positions | {"attention_mask": nothing, "tree_blocks": blocks}


def tree_block_mask(batch: PackedBatch) -> BlockMask:
    """The block mask of the tree for FlexAttention; only blocks of 128 x 128 with a visible pair are computed."""
    last_BL = batch.last_BL

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < last_BL[row, key])

    rows, length = last_BL.shape
    return create_block_mask(visible, rows, None, length, length, device=str(last_BL.device))


@dataclass(frozen=True)
class _Row:
    """Subtree ends and depths of one row, slot by slot."""

    last: list[int]
    depths: list[int]

    def runs(self) -> list[tuple[int, int]]:
        """The row in stretches of slots that end together: chains without a branch."""
        last = self.last
        starts = [slot for slot in range(len(last)) if slot == 0 or last[slot] != last[slot - 1]]
        return list(pairwise([*starts, len(last)]))

    def merged_runs(self) -> list[tuple[int, int]]:
        """The runs, neighbours merged into one block while that is cheaper than another call."""
        first, *others = self.runs()
        blocks = [first]
        for start, end in others:
            before = blocks[-1][0]
            if self.cost(before, end) <= self.cost(before, start) + self.cost(start, end):
                blocks[-1] = (before, end)
            else:
                blocks.append((start, end))
        return blocks

    def cost(self, start: int, end: int) -> float:
        """Of one call, in query-key pairs."""
        queries, above = end - start, self.depths[start]
        pairs = queries * queries / 2 if self.is_causal(start, end) else queries * (above + queries)
        return pairs + _PER_SLOT * len(self.last) + _CALL

    def is_causal(self, start: int, end: int) -> bool:
        """Whether [start, end) is a chain that begins a path: plain causal attention over itself."""
        return self.depths[start] == 0 and min(self.last[start:end]) >= end

    def keys(self, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """The slots that some query in [start, end) sees, as slices: the path above, and the block itself."""
        edges, slot = [], 0
        while slot < start:
            if self.last[slot] <= start:
                slot = self.last[slot]  # a finished subtree
                continue
            if not edges or edges[-1][1] != slot:
                edges.append([slot, slot])
            slot += 1
            edges[-1][1] = slot
        if edges and edges[-1][1] == start:
            edges[-1][1] = end
        else:
            edges.append([start, end])
        return tuple((first, after) for first, after in edges)


def _block(row: _Row, last_L: Tensor, start: int, end: int, dtype: torch.dtype) -> Block:
    keys = row.keys(start, end)
    if row.is_causal(start, end):
        return Block(start, end, keys, None)
    slots_L = torch.arange(len(last_L), device=last_L.device)
    key_K, query_Q1 = torch.cat([slots_L[a:b] for a, b in keys]), slots_L[start:end, None]
    visible_QK = (key_K <= query_Q1) & (query_Q1 < last_L[key_K])
    return Block(start, end, keys, torch.zeros_like(visible_QK, dtype=dtype).masked_fill_(~visible_QK, -torch.inf))


def _attend(
    query_BHLE: Tensor, key_BHLE: Tensor, value_BHLE: Tensor, blocks: Blocks, scaling: float | None, dropout: float
) -> Tensor:
    """Attention of every block over its keys, [B, H, L, E]."""
    rows = zip(query_BHLE.split(1), key_BHLE.split(1), value_BHLE.split(1), blocks, strict=True)
    grouped = query_BHLE.shape[1] != key_BHLE.shape[1]
    return torch.cat([
        torch.cat([
            scaled_dot_product_attention(
                query,
                _slots(key_1HLE, block.keys),
                _slots(value_1HLE, block.keys),
                attn_mask=block.mask_QK,
                is_causal=block.mask_QK is None,
                dropout_p=dropout,
                scale=scaling,
                enable_gqa=grouped,
            )
            for query, block in zip(query_1HLE.split([b.end - b.start for b in row], dim=2), row, strict=True)
        ], dim=2)
        for query_1HLE, key_1HLE, value_1HLE, row in rows
    ])  # fmt: skip


def _slots(tensor_1HLE: Tensor, slices: tuple[tuple[int, int], ...]) -> Tensor:
    parts = [tensor_1HLE[:, :, a:b] for a, b in slices]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    *,
    tree_blocks: Blocks | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The function behind `TREE_SDPA` and `TREE_FLEX`, as `AttentionInterface` calls it."""
    stock = {"scaling": scaling, "dropout": dropout, **kwargs}
    if isinstance(attention_mask, BlockMask):
        return flex_attention_forward(module, query, key, value, attention_mask, **stock)
    if tree_blocks is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **stock)
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise InputError(f"attention with {name!r} cannot run over packed trees", hint="train on flat batches")
    attended_BHLE = _attend(query, key, value, tree_blocks, scaling, dropout)
    return attended_BHLE.transpose(1, 2).contiguous(), None


for _name in (TREE_SDPA, TREE_FLEX):
    AttentionInterface.register(_name, _tree_attention)
    AttentionMaskInterface.register(_name, sdpa_mask)
