"""Keys and values of a batch of sequences, addressed by row and slot.

A stock `DynamicCache` appends a column to the whole batch and so copies everything it holds at every step. Here the
tensors are allocated ahead and each block of tokens is written where its row says, which makes rows of different
lengths, reuse of a prefix and several continuations of one prompt in a single row the same operation. Models need no
patch: they call `update` of whatever `Cache` is passed as `past_key_values`, and take a 4-D mask as it is.

Shape suffixes: B rows, H key/value heads, S slots, D head size, Q tokens of a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache


@dataclass(frozen=True)
class Block:
    """Where the tokens of the next forward go: rows `rows_B` and, per token, a slot.

    `width` slots of those rows are shown to attention; which of them a token sees is the caller's mask. A `fresh`
    block starts every row at slot 0, so its tokens see each other only and the plain causal mask is exact. `first`
    is given when the rows are consecutive: then they are shown without a copy.
    """

    rows_B: Tensor
    slots_BQ: Tensor
    width: int
    first: int | None = None
    fresh: bool = False


class PositionedCache(Cache):
    """A cache for calls that always give positions and masks: to the model it is empty, and as long as it likes."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0


class RowCache(PositionedCache):
    """A Transformers cache of rows.

    Memory is reserved ahead and zeroed only as far as it has been `shown`, because a masked slot must not
    hold NaN, while touching fresh memory is what costs most on a CPU. One more slot, `trash`, is never shown: padding
    writes to it.
    """

    def __init__(self, rows: int, slots: int) -> None:
        super().__init__()
        self.rows, self.slots = rows, slots
        self._keys: list[Tensor] = []  # one [B, H, S + 1, D] per layer
        self._values: list[Tensor] = []
        self.shown = 0
        self._block: Block | None = None

    @property
    def trash(self) -> int:
        return self.slots

    @property
    def device(self) -> torch.device:
        return self._keys[0].device

    @property
    def slot_bytes(self) -> int:
        """Of the keys and values of one token in all layers."""
        return sum(t.shape[1] * t.shape[3] * t.element_size() for t in (*self._keys, *self._values))

    def expect(self, block: Block) -> None:
        """Set where the next forward writes."""
        self._show(block.width)
        self._block = block

    # what a model calls

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [B, H, Q, D] keys and values; return those that attention reads, [B, H, width, D]."""
        block = self._block
        assert block is not None, "expect() comes before the forward"
        if layer_idx == len(self._keys):
            for held, states in ((self._keys, key_states), (self._values, value_states)):
                held.append(self._like(states))
                held[-1][:, :, : self.shown] = 0
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        where = (block.rows_B[:, None], slice(None), block.slots_BQ)
        keys[where] = key_states.transpose(1, 2)
        values[where] = value_states.transpose(1, 2)
        if block.fresh:
            return key_states, value_states
        if block.first is not None:
            return self.rows_of(layer_idx, block.first, len(block.rows_B), block.width)
        keys, values = keys[:, :, : block.width], values[:, :, : block.width]
        return keys.index_select(0, block.rows_B), values.index_select(0, block.rows_B)

    # moving rows

    def ensure(self, slots: int, rows: int = 0) -> None:
        """Reserve at least so many slots and rows, and more, so that growth is rare."""
        if slots <= self.slots and rows <= self.rows:
            return
        held = self.rows
        if rows > held:
            self.rows = max(rows, 2 * held)
        if slots > self.slots:
            # on a CPU, memory that is not written costs nothing; on an accelerator it is allocated at once
            self.slots = max(slots, self.slots + self.slots // (2 if self.device.type == "cpu" else 8))
        for tensors in (self._keys, self._values):
            for layer, old in enumerate(tensors):
                tensors[layer] = self._like(old)
                tensors[layer][:held, :, : self.shown] = old[:, :, : self.shown]
                tensors[layer][held:, :, : self.shown] = 0

    def move(self, origin: Tensor, target: Tensor) -> None:
        """Copy rows to others."""
        for tensor in (*self._keys, *self._values):
            tensor[target, :, : self.shown] = tensor[origin, :, : self.shown]

    def select(self, rows: Sequence[int], slots: int) -> RowCache:
        """A copy of the given rows (repeats allowed), cut to `slots`."""
        copy = RowCache(len(rows), slots)
        copy.load(range(len(rows)), self, rows, min(slots, self.shown))
        return copy

    def load(self, places: Sequence[int], source: RowCache, rows: Sequence[int], slots: int) -> None:
        """Copy the first `slots` slots of rows of another cache (repeats allowed) to rows of this one."""
        if not self._keys:
            self._keys, self._values = [self._like(t) for t in source._keys], [self._like(t) for t in source._values]
        self.reserve(slots)
        index, first = torch.tensor(rows, device=self.device), places[0]
        consecutive = list(places) == list(range(first, first + len(places)))
        targets = torch.tensor(places, device=self.device)
        for target, origin in self._pairs(source):
            if consecutive:  # one pass, where assigning an indexed copy takes two
                torch.index_select(origin[:, :, :slots], 0, index, out=target[first : first + len(rows), :, :slots])
            else:
                target[targets, :, :slots] = origin[index, :, :slots]

    def gather(self, copies: Iterable[tuple[int, RowCache, int, int]]) -> None:
        """Copy (to a row of this cache, from another cache, its row, so many slots); all of one cache at once."""
        by_source: dict[RowCache, list[tuple[int, int, int]]] = {}
        for place, source, row, slots in copies:
            by_source.setdefault(source, []).append((place, row, slots))
        for source, group in by_source.items():
            places, rows, slots = zip(*group, strict=True)
            self.load(places, source, rows, max(slots))

    def write(self, rows_B: Tensor, slots_BQ: Tensor, source: RowCache) -> None:
        """Write the first Q slots of the B rows of another cache, each token to its slot. The caller has made room."""
        where = (rows_B[:, None], slice(None), slots_BQ)
        for target, origin in self._pairs(source):
            target[where] = origin[:, :, : slots_BQ.shape[1]].transpose(1, 2)

    def reserve(self, slots: int, rows: int = 0) -> None:
        """Make room for `slots` slots that will be written, in at least so many rows."""
        self.ensure(slots, rows)
        self._show(slots)

    def rows_of(self, layer: int, first: int, rows: int, slots: int) -> tuple[Tensor, Tensor]:
        """Views [rows, H, slots, D] of the keys and values of consecutive rows."""
        where = (slice(first, first + rows), slice(None), slice(slots))
        return self._keys[layer][where], self._values[layer][where]

    def _show(self, slots: int) -> None:
        if slots > self.shown:
            for tensor in (*self._keys, *self._values):
                tensor[:, :, self.shown : slots] = 0
            self.shown = slots

    def _pairs(self, source: RowCache) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(self._keys, source._keys, strict=True)
        yield from zip(self._values, source._values, strict=True)

    def _like(self, tensor: Tensor) -> Tensor:
        return tensor.new_empty(self.rows, tensor.shape[1], self.slots + 1, tensor.shape[3])


def prefix_mask(lengths: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Additive mask [*lengths.shape, width] under which each entry sees its first `lengths` slots. (Boolean masks are
    silently wrong under eager attention.)"""
    unseen = torch.arange(width, device=lengths.device) >= lengths[..., None]
    return torch.zeros(unseen.shape, dtype=dtype, device=lengths.device).masked_fill_(unseen, torch.finfo(dtype).min)
