"""Attention over packed trees through Transformers' `AttentionInterface`: any decoder that uses it runs unpatched.

Slot q sees slot k iff `k <= q < last[k]`. Three layouts compute that:

dense   SDPA with the boolean mask [B, 1, L, L]; also what a model on stock "sdpa" gets
pieces  plain calls over slices of the row, only the visible pairs (`training.pieces`; CPU)
flex    FlexAttention with a block mask (CUDA; on CPU it has no backward pass)

With `TREE_SDPA` the cheaper of the first two is chosen for each batch; `TREE_FLEX` is the third. A call without a tree
runs stock SDPA, so the same model can sample.

Shape suffixes as in `training.packing`; H heads, Q queries and K keys of a piece, E width of a head.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from turntree.core.errors import ConfigError, InputError
from turntree.training.head import decoder_of
from turntree.training.packing import PackedBatch
from turntree.training.pieces import CALL, PieceAttention, Rows, pieces, plan

TREE_SDPA, TREE_FLEX = "turntree_sdpa", "turntree_flex"
Layout = Literal["dense", "pieces", "flex"]
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
    name = TREE_FLEX if backend == "flex_attention" else TREE_SDPA
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

    `layout` overrides the choice by cost, for `check_path_isolation`: "pieces" are then the smallest.
    """
    if batch.is_flat:
        return {"attention_mask": None}
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
    """The block mask of the tree for FlexAttention; only blocks of 128 x 128 with a visible pair are computed."""
    last_BL = batch.last_BL

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < last_BL[row, key])

    rows, length = last_BL.shape
    return create_block_mask(visible, rows, None, length, length, device=str(last_BL.device))


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
        return flex_attention_forward(module, query, key, value, attention_mask, **stock)
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
