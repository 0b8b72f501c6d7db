"""Decoding a grid: U rows of a cache, each continued by up to G requests (lanes) at once.

The keys and values of a prompt lie in its row once; each lane adds its own slots after them and its mask shows the
slots of its own prompt and tokens only. For groups of siblings this saves both the copies of the prompt and most of
the memory traffic of attention. With one lane a row is an ordinary left-aligned sequence.

Shape suffixes: U rows, G lanes, R = U * G cells, S slots, N requests, T completion positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from turntree.engines.cache import Block, RowCache, hidden
from turntree.engines.sampling import Laws, draw


@dataclass(frozen=True)
class Lane:
    """Request `request` continues the first `prompt_length` slots of its row."""

    request: int
    prompt_length: int


@dataclass
class Sampled:
    """What N requests drew (row N catches what idle cells write); `counts_N` tokens of each row are valid."""

    tokens_NT: Tensor
    logprobs_NT: Tensor
    entropies_NT: Tensor
    counts_N: Tensor
    retained: list[tuple[RowCache, list[tuple[int, int]]]] = field(default_factory=list)
    """Sequences to keep: left-aligned caches with their (row, request) pairs."""

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
    """The state of one grid: per cell its request, next position and what it sees; per row its next free slot.

    An idle cell (padding, or a lane that is done) belongs to request `idle` and computes something harmless.
    """

    def __init__(
        self, model: PreTrainedModel, cache: RowCache, rows: Sequence[Sequence[Lane]], *, idle: int, max_context: int
    ) -> None:
        self._model, self._cache, self._idle, self._max_context = model, cache, idle, max_context
        device, lanes = model.device, max(map(len, rows))
        cells = [[(lane.request, lane.prompt_length) for lane in row] for row in rows]
        padded = [row + [(idle, 1)] * (lanes - len(row)) for row in cells]
        self.request_UG, self._position_UG = torch.tensor(padded, device=device).permute(2, 0, 1)
        self.active_UG = self.request_UG != idle
        self._next_slot_U = self._position_UG.amax(1)
        self._width = int(self._next_slot_U.max())
        self._shared_width = self._width
        self._aligned = lanes == 1  # each row is one sequence, slot = position
        self._mask_UGS = _show(self._position_UG, cache.slots, model.dtype)

    @property
    def request_R(self) -> Tensor:
        return self.request_UG.flatten()

    @property
    def active_R(self) -> Tensor:
        return self.active_UG.flatten()

    @property
    def crowded(self) -> bool:
        """Lanes pass over so many slots of their siblings that rows of their own are cheaper."""
        return self.request_UG.shape[1] > 1 and self._width > 5 * self._shared_width + 512

    def feed(self, tokens_R: Tensor) -> Tensor:
        """Append one token to every cell; the logits [R, V] after it."""
        rows, lanes = self.request_UG.shape
        lane_G = torch.arange(lanes, device=tokens_R.device)
        slots_UG = self._next_slot_U[:, None] + lane_G
        self._width += lanes
        self._reserve(self._width)
        self._mask_UGS[torch.arange(rows, device=tokens_R.device)[:, None], lane_G, slots_UG] = 0
        self._cache.expect(Block(first=0, slots_BQ=slots_UG, width=self._width))
        logits = self._model(
            input_ids=tokens_R.view(rows, lanes),
            attention_mask=self._mask_UGS[:, None, :, : self._width],
            position_ids=self._position_UG.clamp_max(self._max_context - 1),  # finished cells run on
            past_key_values=self._cache,
            use_cache=True,
        ).logits
        self._next_slot_U = self._next_slot_U + lanes
        self._position_UG = self._position_UG + 1
        return logits.flatten(0, 1)

    def take(self, cell_R: Tensor, lengths_C: Tensor) -> tuple[RowCache, list[tuple[int, int]]]:
        """The sequences in the marked cells with their (row, request): the first `lengths_C` slots that each sees.

        The cache of a grid with one lane is handed over itself; `repack` then goes on with a copy.
        """
        requests = self.request_R[cell_R].tolist()
        if self._aligned:
            return self._cache, list(zip(cell_R.nonzero()[:, 0].tolist(), requests, strict=True))
        return self._gather(cell_R, int(lengths_C.max())), list(enumerate(requests))

    def repack(self, tokens_R: Tensor) -> Tensor:
        """Close ranks: fewer lanes where possible (free), fewer rows where half of them are idle (a copy). Returns
        the tokens of the cells that remain."""
        if self.crowded:
            return self._separate(tokens_R)
        active_U = self.active_UG.any(1)
        lanes = int(self.active_UG.sum(1).max())
        order_UG = self.active_UG.logical_not().byte().argsort(dim=1, stable=True)[:, :lanes]
        rows_U = torch.arange(len(active_U), device=active_U.device)
        if int(active_U.sum()) * 2 <= len(active_U):
            rows_U = active_U.nonzero()[:, 0]
            self._cache = self._cache.select(rows_U, self._width + 8 * lanes)
        cells = (rows_U[:, None], order_UG[rows_U])
        tokens_UG = tokens_R.view(self.request_UG.shape)[cells]
        self._mask_UGS = self._mask_UGS[cells][..., : self._cache.slots]
        self._position_UG, self.active_UG = self._position_UG[cells], self.active_UG[cells]
        self.request_UG = self.request_UG[cells].masked_fill(~self.active_UG, self._idle)
        self._next_slot_U = self._next_slot_U[rows_U]
        return tokens_UG.flatten()

    def _separate(self, tokens_R: Tensor) -> Tensor:
        """Give every active cell a row of its own."""
        cell_R = self.active_R
        request_R, position_R = self.request_R[cell_R], self._position_UG.flatten()[cell_R]
        self._width = int(position_R.max())
        self._cache = self._gather(cell_R, self._width)
        self.request_UG, self._position_UG = request_R[:, None], position_R[:, None]
        self.active_UG = torch.ones_like(self.request_UG, dtype=torch.bool)
        self._next_slot_U, self._aligned = position_R, True
        self._mask_UGS = _show(self._position_UG, self._cache.slots, self._mask_UGS.dtype)
        return tokens_R[cell_R]

    def _gather(self, cell_R: Tensor, length: int) -> RowCache:
        """The first `length` slots that each marked cell sees (slots are given out in order of position)."""
        hidden_CS = self._mask_UGS.flatten(0, 1)[cell_R] != 0
        slots_CS = hidden_CS.byte().argsort(dim=1, stable=True)[:, :length]
        return self._cache.gather(cell_R.nonzero()[:, 0] // self.request_UG.shape[1], slots_CS)

    def _reserve(self, slots: int) -> None:
        self._cache.ensure(slots)
        missing = self._cache.slots - self._mask_UGS.shape[-1]
        if missing > 0:
            self._mask_UGS = torch.nn.functional.pad(self._mask_UGS, (0, missing), value=hidden(self._mask_UGS.dtype))


def _show(lengths_UG: Tensor, slots: int, dtype: torch.dtype) -> Tensor:
    """Additive mask [U, G, S] under which each cell sees its first `lengths_UG` slots."""
    unseen_UGS = torch.arange(slots, device=lengths_UG.device) >= lengths_UG[:, :, None]
    return torch.zeros(unseen_UGS.shape, dtype=dtype, device=lengths_UG.device).masked_fill_(unseen_UGS, hidden(dtype))


def decode(
    grid: Grid, logits_RV: Tensor, laws: Laws, stops_V: Tensor, lengths_N: Tensor, retain_N: Tensor, sampled: Sampled
) -> None:
    """Sample until every cell has drawn a stop token or its limit, writing to `sampled`.

    `logits_RV` follow the prompts, whose lengths are `lengths_N`; `retain_N` marks the requests whose sequences go to
    `sampled.retained`. The last token of a sequence is drawn but not fed: its keys and values are not part of that.
    """
    for position in range(sampled.tokens_NT.shape[1]):
        request_R = grid.request_R
        drawn = draw(logits_RV, laws, request_R, position)
        sampled.tokens_NT[request_R, position] = drawn.tokens
        sampled.logprobs_NT[request_R, position] = drawn.logprobs
        sampled.entropies_NT[request_R, position] = drawn.entropies
        sampled.counts_N[request_R] += grid.active_R.long()
        finished_R = stops_V[drawn.tokens] | (position + 1 >= laws.limit_N[request_R])
        grid.active_UG = grid.active_UG & ~finished_R.view(grid.active_UG.shape)
        tokens_R, active = drawn.tokens, int(grid.active_R.sum())
        if active * 2 <= len(request_R) or grid.crowded:
            leaving_R = ~grid.active_R & retain_N[request_R]
            if bool(leaving_R.any()):
                leaving = request_R[leaving_R]
                fed = lengths_N[leaving] + sampled.counts_N[leaving] - 1
                sampled.retained.append(grid.take(leaving_R, fed))
            if not active:
                return
            tokens_R = grid.repack(tokens_R)
        logits_RV = grid.feed(tokens_R)
