"""Decoding a grid: U rows of a cache, each continued by up to G requests (lanes) at once.

The keys and values of a prompt lie in its row once; each lane adds its own slots after them and its mask shows the
slots of its own prompt and tokens only. For groups of siblings this saves both the copies of the prompt and most of
the memory traffic of attention. With one lane a row is an ordinary left-aligned sequence.

Shape suffixes: U rows, G lanes, R = U * G cells, S slots, N requests, T completion positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from turntree.engines.cache import Block, RowCache, hidden, prefix_mask
from turntree.engines.sampling import Laws, draw


@dataclass(frozen=True)
class Lane:
    """Request `request` continues the first `prompt_length` slots of its row."""

    request: int
    prompt_length: int


@dataclass(frozen=True)
class Sampled:
    """What N requests drew (row N catches what idle cells write); `counts_N` tokens of each row are valid."""

    tokens_NT: Tensor
    logprobs_NT: Tensor
    entropies_NT: Tensor
    counts_N: Tensor

    @classmethod
    def empty(cls, requests: int, positions: int, device: torch.device) -> Sampled:
        shape = (requests + 1, positions)
        return cls(
            tokens_NT=torch.zeros(shape, dtype=torch.long, device=device),
            logprobs_NT=torch.zeros(shape, device=device),
            entropies_NT=torch.zeros(shape, device=device),
            counts_N=torch.zeros(requests + 1, dtype=torch.long, device=device),
        )


class Grid:
    """The state of one grid: per cell its request, length so far and what it sees; per row its next free slot.

    An idle cell (padding, or a lane that is done) belongs to request `idle` and computes something harmless; a row
    without lanes is left untouched. `retain_N` marks the requests whose sequences are handed over in `retained`:
    (cache, [(row, request), ...]), left-aligned. The last token of a sequence is drawn but not fed: its keys and
    values are not part of that.
    """

    def __init__(
        self, model: PreTrainedModel, cache: RowCache, rows: Sequence[Sequence[Lane]], idle: int, retain_N: Tensor
    ) -> None:
        self._model, self._idle, self._retain_N = model, idle, retain_N
        self._cache = self._base = cache  # a selection of the base's rows, where many of them are done
        device, lanes = model.device, max(1, *map(len, rows))
        cells = [[(lane.request, lane.prompt_length) for lane in row] for row in rows]
        padded = [row + [(idle, 1)] * (lanes - len(row)) for row in cells]
        self._request_UG, self._length_UG = torch.tensor(padded, device=device).permute(2, 0, 1)
        self._active_UG = self._request_UG != idle
        self._rows_U = torch.arange(len(rows), device=device)  # in the base
        self._foreign_U = ~self._active_UG.any(1)
        self._next_slot_U = self._length_UG.amax(1)
        self._width = self._prompt_width = self._split = int(self._next_slot_U.max())
        self._aligned = lanes == 1  # each row is one sequence, slot = position
        self._mask_UGS = prefix_mask(self._length_UG, cache.slots, model.dtype)
        self._departed: list[tuple[Tensor, Tensor, list[int]]] = []  # rows of the base, slots, requests
        self.retained: list[tuple[RowCache, list[tuple[int, int]]]] = []
        if self._aligned:
            self._retain_rows()

    @property
    def request_R(self) -> Tensor:
        return self._request_UG.flatten()

    @property
    def active_R(self) -> Tensor:
        return self._active_UG.flatten()

    @property
    def crowded(self) -> bool:
        """Lanes pass over so many slots of their siblings that rows of their own are cheaper."""
        return not self._aligned and self._width > 5 * self._prompt_width + 512

    def finish(self, finished_R: Tensor) -> int:
        """Mark cells that need no further token; how many remain."""
        self._active_UG = self._active_UG & ~finished_R.view(self._active_UG.shape)
        return int(self._active_UG.sum())

    def feed(self, tokens_R: Tensor) -> Tensor:
        """Append one token to every active cell; the logits [R, V] after it."""
        rows, lanes = self._request_UG.shape
        lane_G = torch.arange(lanes, device=tokens_R.device)
        slots_UG = self._next_slot_U[:, None] + lane_G
        self._width += lanes
        self._reserve(self._width)
        self._mask_UGS[torch.arange(rows, device=tokens_R.device)[:, None], lane_G, slots_UG] = 0
        slots_UG = slots_UG.masked_fill(self._foreign_U[:, None], self._cache.trash)
        rows_U = torch.arange(rows, device=tokens_R.device)
        self._cache.expect(Block(rows_U, slots_UG, self._width, first=0))
        logits = self._model(
            input_ids=tokens_R.view(rows, lanes),
            attention_mask=self._mask_UGS[:, None, :, : self._width],
            position_ids=self._length_UG,
            past_key_values=self._cache,
            use_cache=True,
        ).logits
        self._next_slot_U = self._next_slot_U + lanes
        self._length_UG = self._length_UG + self._active_UG.long()
        return logits.flatten(0, 1)

    def repack(self, tokens_R: Tensor) -> Tensor:
        """Close ranks: fewer lanes where possible (free), fewer rows where most of them are idle (a copy), or a row
        for every lane when it is crowded. Returns the tokens of the cells that remain."""
        self._note_departures()
        if self.crowded:
            return self._separate(tokens_R)
        active_U = self._active_UG.any(1)
        lanes = int(self._active_UG.sum(1).max())
        order_UG = self._active_UG.logical_not().byte().argsort(dim=1, stable=True)[:, :lanes]
        keep_U = torch.arange(len(active_U), device=active_U.device)
        if int(active_U.sum()) * 3 <= len(active_U):
            keep_U = active_U.nonzero()[:, 0]
            self._write_back()
            self._split = int(self._next_slot_U[keep_U].min())
            self._cache = self._cache.select(keep_U, self._width + 8 * lanes)
            self._rows_U = self._rows_U[keep_U]
        cells = (keep_U[:, None], order_UG[keep_U])
        tokens_UG = tokens_R.view(self._request_UG.shape)[cells]
        self._mask_UGS = self._mask_UGS[cells][..., : self._cache.slots]
        self._length_UG, self._active_UG = self._length_UG[cells], self._active_UG[cells]
        self._request_UG = self._request_UG[cells].masked_fill(~self._active_UG, self._idle)
        self._next_slot_U, self._foreign_U = self._next_slot_U[keep_U], self._foreign_U[keep_U]
        return tokens_UG.flatten()

    def close(self) -> None:
        """Hand over what is retained, once all cells are done."""
        self._note_departures()
        self._write_back()
        self._hand_over()

    def _note_departures(self) -> None:
        """Remember where the finished sequences that leave the grid lie (an aligned grid knows from the start)."""
        leaving_R = ~self.active_R & self._retain_N[self.request_R]
        if self._aligned or not bool(leaving_R.any()):
            return
        longest = int(self._length_UG.flatten()[leaving_R].max())
        rows = self._rows_U[leaving_R.nonzero()[:, 0] // self._request_UG.shape[1]]
        self._departed.append((rows, self._seen(leaving_R, longest), self.request_R[leaving_R].tolist()))

    def _hand_over(self) -> None:
        """Gather the departed sequences of a shared grid, each into a row of its own."""
        if not self._departed:
            return
        rows, slots, requests = zip(*self._departed, strict=True)
        longest = max(s.shape[1] for s in slots)
        slots_BS = torch.cat([pad(s, (0, longest - s.shape[1])) for s in slots])
        pairs = list(enumerate(request for part in requests for request in part))
        self.retained.append((self._base.gather(torch.cat(rows), slots_BS), pairs))
        self._departed = []

    def _retain_rows(self) -> None:
        """The rows of an aligned grid are what is retained."""
        retained = self._retain_N[self.request_R].nonzero()[:, 0]
        pairs = list(zip(retained.tolist(), self.request_R[retained].tolist(), strict=True))
        if pairs:
            self.retained.append((self._base, pairs))

    def _write_back(self) -> None:
        """Store what a selection of rows has added in the base."""
        if self._cache is not self._base:
            self._base.store(self._rows_U, self._cache, self._split, self._width)

    def _separate(self, tokens_R: Tensor) -> Tensor:
        """Give every active cell a row of its own."""
        self._write_back()
        self._hand_over()
        active_R = self.active_R
        self._width = int(self._length_UG.flatten()[active_R].max())
        slots_RS = self._seen(active_R, self._width)
        self._cache = self._base = self._base.gather(
            self._rows_U[active_R.nonzero()[:, 0] // self._request_UG.shape[1]], slots_RS
        )
        self._request_UG = self.request_R[active_R, None]
        self._length_UG = self._length_UG.flatten()[active_R, None]
        self._active_UG = torch.ones_like(self._request_UG, dtype=torch.bool)
        self._rows_U = torch.arange(len(slots_RS), device=slots_RS.device)
        self._foreign_U = torch.zeros_like(self._rows_U, dtype=torch.bool)
        self._next_slot_U, self._aligned = self._length_UG[:, 0], True
        self._mask_UGS = prefix_mask(self._length_UG, self._cache.slots, self._mask_UGS.dtype)
        self._retain_rows()
        return tokens_R[active_R]

    def _seen(self, cell_R: Tensor, count: int) -> Tensor:
        """The first `count` slots that each marked cell sees; slots are given out in order of position."""
        hidden_RS = self._mask_UGS.flatten(0, 1)[cell_R] != 0
        return hidden_RS.byte().argsort(dim=1, stable=True)[:, :count]

    def _reserve(self, slots: int) -> None:
        self._cache.ensure(slots)
        missing = self._cache.slots - self._mask_UGS.shape[-1]
        if missing > 0:
            self._mask_UGS = pad(self._mask_UGS, (0, missing), value=hidden(self._mask_UGS.dtype))


def decode(grid: Grid, logits_RV: Tensor, laws: Laws, stops_V: Tensor, sampled: Sampled) -> None:
    """Sample from the logits after the prompts on, until every cell has drawn a stop token or its limit."""
    for position in range(sampled.tokens_NT.shape[1]):
        request_R = grid.request_R
        drawn = draw(logits_RV, laws, request_R, position)
        sampled.tokens_NT[request_R, position] = drawn.tokens
        sampled.logprobs_NT[request_R, position] = drawn.logprobs
        sampled.entropies_NT[request_R, position] = drawn.entropies
        sampled.counts_N[request_R] += grid.active_R.long()
        finished_R = stops_V[drawn.tokens] | (position + 1 >= laws.limit_N[request_R])
        active, tokens_R = grid.finish(finished_R), drawn.tokens
        if not active:
            break
        if active * 2 <= len(request_R) or grid.crowded:
            tokens_R = grid.repack(tokens_R)
        logits_RV = grid.feed(tokens_R)
    grid.close()
