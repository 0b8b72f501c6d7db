"""Keys and values of a batch of sequences, addressed by row and slot.

A stock `DynamicCache` appends a column to the whole batch and so copies everything it holds at every step. Here the
tensors are allocated ahead and each block of tokens is written where its row says, which makes rows of different
lengths, reuse of a prefix and several continuations of one prompt in a single row the same operation. Models need no
patch: they call `update` of whatever `Cache` is passed as `past_key_values`, and take a 4-D mask as it is.

Shape suffixes: B rows, H key/value heads, S slots, D head size, Q tokens of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache


@dataclass(frozen=True)
class Block:
    """Where the tokens of the next forward go: rows [first, first + B) and, per token, a slot.

    `width` slots of those rows are shown to attention; which of them a token sees is the caller's mask. A `fresh`
    block starts every row at slot 0, so its tokens see each other only and the plain causal mask is exact.
    """

    first: int
    slots_BQ: Tensor
    width: int
    fresh: bool = False


class RowCache(Cache):
    """A Transformers cache of fixed rows; `trash` is a slot that is never shown, for padding to write to."""

    def __init__(self, rows: int, slots: int) -> None:
        super().__init__(layers=[])
        self.rows, self.slots = rows, slots
        self._keys: list[Tensor] = []  # one [B, H, S + 1, D] per layer
        self._values: list[Tensor] = []
        self._block: Block | None = None
        self._where: tuple[Tensor, Tensor] | None = None

    @property
    def trash(self) -> int:
        return self.slots

    @property
    def device(self) -> torch.device:
        return self._keys[0].device

    def expect(self, block: Block) -> None:
        """Say where the next forward writes."""
        rows_B1 = torch.arange(block.slots_BQ.shape[0], device=block.slots_BQ.device)[:, None]
        self._block, self._where = block, (rows_B1, block.slots_BQ)

    # what a model calls

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [B, H, Q, D] keys and values; return those that attention reads, [B, H, width, D]."""
        assert self._block is not None and self._where is not None
        if layer_idx == len(self._keys):
            # zeros, not garbage: a masked slot must not hold NaN, and untouched zero pages cost no memory on CPU
            self._keys.append(self._zeros(key_states))
            self._values.append(self._zeros(value_states))
        block = self._block
        rows = slice(block.first, block.first + block.slots_BQ.shape[0])
        keys, values = self._keys[layer_idx][rows], self._values[layer_idx][rows]
        rows_B1, slots_BQ = self._where
        keys[rows_B1, :, slots_BQ] = key_states.transpose(1, 2)
        values[rows_B1, :, slots_BQ] = value_states.transpose(1, 2)
        if block.fresh:
            return key_states, value_states
        return keys[:, :, : block.width], values[:, :, : block.width]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions and masks are always given

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0  # asked for fresh blocks only

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    # moving rows

    def ensure(self, slots: int) -> None:
        """Make room for at least `slots` slots (growing by a quarter, so that growth is rare)."""
        if slots <= self.slots:
            return
        held, self.slots = self.slots, max(slots, self.slots + self.slots // 4)
        for tensors in (self._keys, self._values):
            for layer, old in enumerate(tensors):
                tensors[layer] = self._zeros(old)
                tensors[layer][:, :, :held] = old[:, :, :held]

    def select(self, rows: Tensor, slots: int | None = None) -> RowCache:
        """A copy of the given rows (repeats allowed), cut to `slots`."""
        copy = RowCache(len(rows), self.slots if slots is None else min(slots, self.slots))
        copy._keys = [t[:, :, : copy.slots + 1].index_select(0, rows) for t in self._keys]
        copy._values = [t[:, :, : copy.slots + 1].index_select(0, rows) for t in self._values]
        return copy

    def gather(self, rows_N: Tensor, slots_NS: Tensor) -> RowCache:
        """A copy with row n = the given slots of row `rows_N[n]`, in that order."""
        copy = RowCache(slots_NS.shape[0], slots_NS.shape[1])
        slots_NS = torch.nn.functional.pad(slots_NS, (0, 1))  # the trash slot of the copy: any finite value
        index = (rows_N[:, None], slice(None), slots_NS)
        copy._keys = [t[index].transpose(1, 2).contiguous() for t in self._keys]
        copy._values = [t[index].transpose(1, 2).contiguous() for t in self._values]
        return copy

    def load(self, rows: Sequence[int], source: RowCache, source_rows: Sequence[int], slots: int) -> None:
        """Copy the first `slots` slots of rows of another cache into rows of this one."""
        if not self._keys:
            self._keys = [self._zeros(t) for t in source._keys]
            self._values = [self._zeros(t) for t in source._values]
        to, of = torch.tensor([rows, source_rows], device=source._keys[0].device)
        for mine, theirs in ((self._keys, source._keys), (self._values, source._values)):
            for target, origin in zip(mine, theirs, strict=True):
                target[to, :, :slots] = origin[of, :, :slots]

    def _zeros(self, like: Tensor) -> Tensor:
        return like.new_zeros(self.rows, like.shape[1], self.slots + 1, like.shape[3])


def hidden(dtype: torch.dtype) -> float:
    """The additive mask value of a slot that is not seen. Boolean masks are silently wrong under eager attention."""
    return torch.finfo(dtype).min


def causal_mask(positions_BQ: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Additive mask [B, 1, Q, width] of rows whose slots are their positions: a token sees slots up to its own."""
    slots_S = torch.arange(width, device=positions_BQ.device)
    unseen_BQS = slots_S > positions_BQ[:, :, None]
    mask_BQS = torch.zeros(unseen_BQS.shape, dtype=dtype, device=positions_BQ.device)
    return mask_BQS.masked_fill_(unseen_BQS, hidden(dtype))[:, None]
