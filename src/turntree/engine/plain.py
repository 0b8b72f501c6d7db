"""Sampling from any Transformers decoder with the cache that is its own: for models whose prefixes cannot be shared by
position (linear attention, sliding windows, attention sinks, latent attention).

Requests are answered in batches of rows that begin together, padded on the left. Equal prompts are prefilled once, and
what the cache holds of them is copied for the siblings. A row that is done leaves the batch at once; requests that wait
begin when the batch has ended. Nothing is kept for later turns: every turn prefills its whole prompt.

Shape suffixes: P distinct prompts, R rows of the batch, Q tokens of a prompt, L tokens so far, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from turntree.core.completion import GenerationRequest
from turntree.core.cost import NO_COST, Cost
from turntree.core.errors import InputError
from turntree.engine.compatibility import check_positions, positions_of
from turntree.engine.limits import EngineConfig
from turntree.engine.local import LocalEngine
from turntree.engine.requests import cost_of
from turntree.engine.sampling import SamplingBatch, draw


@dataclass(eq=False)
class _Row:
    """A request in decoding. `prefilled` tokens of its prompt were computed for it."""

    ticket: int
    request: GenerationRequest
    limit: int
    prefilled: int
    place: int  # among the requests of `_Batch.sampling`
    seconds: float = 0.0
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    entropies: list[float] = field(default_factory=list[float])

    @property
    def cost(self) -> Cost:
        return cost_of(self.request, decoded=len(self.tokens), prefilled=self.prefilled, seconds=self.seconds)


@dataclass
class _Batch:
    """The rows in decoding, in the order of the cache. `logits_RV` follow what was fed so far."""

    rows: list[_Row]
    cache: Any  # a DynamicCache
    mask_RL: Tensor  # 0 at the padding on the left
    logits_RV: Tensor
    sampling: SamplingBatch


class PlainEngine(LocalEngine):
    """A batch takes as many waiting requests as `max_batch_rows` allows and as have at most `max_prefill_tokens` padded
    tokens of distinct prompts (one prompt at least).

    Raises `InputError` for a model whose batches change its log-probabilities, and for one that has no number of
    positions where `max_context` gives none.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stop_ids: Collection[int],
        config: EngineConfig | None = None,
    ) -> None:
        config = config or EngineConfig()
        positions = positions_of(model) or config.max_context  # a model that counts none (Mamba) is given some
        if positions is None:
            problem = f"the config of {type(model).__name__} has no max_position_embeddings"
            hint = "say how long prompt and completion may be"
            raise InputError(problem, field="device.engine.max_context", hint=hint)
        super().__init__(model, stop_ids, config, positions=positions)
        check_positions(model, self.max_context, field="max_context")
        self._batch: _Batch | None = None
        self._check("in padded batches")

    @property
    def _decoding(self) -> int:
        return 0 if self._batch is None else len(self._batch.rows)

    def _stop(self, ticket: int) -> Cost:
        rows = [] if self._batch is None else self._batch.rows
        stopped = next((row for row in rows if row.ticket == ticket), None)
        if stopped is None:
            return NO_COST
        self._keep([place for place, row in enumerate(rows) if row is not stopped])
        return stopped.cost

    def _abandon(self) -> None:
        super()._abandon()
        self._batch = None

    def _step(self) -> None:
        started = time.perf_counter()
        if (batch := self._batch) is not None:
            tokens_R1 = torch.tensor([[row.tokens[-1]] for row in batch.rows], device=self.model.device)
            batch.mask_RL = torch.cat([batch.mask_RL, torch.ones_like(tokens_R1)], dim=1)
            batch.logits_RV = self._logits(tokens_R1, batch.mask_RL, batch.cache)
        elif self._queue:
            self._batch = batch = self._begin()
        if batch is not None:
            self._draw(batch, started)

    def _begin(self) -> _Batch:
        """Prefill what waits, in order of submission. The first request of a prompt pays for it; its siblings reuse."""
        prompts: dict[tuple[int, ...], int] = {}
        rows: list[_Row] = []
        for ticket, request in self._queue.items():
            longest = max(map(len, [*prompts, request.prompt_ids]))
            width = len(prompts.keys() | {request.prompt_ids}) * longest
            if rows and (len(rows) == self.config.max_batch_rows or width > self.config.max_prefill_tokens):
                break
            prefilled = 0 if request.prompt_ids in prompts else len(request.prompt_ids)
            prompts.setdefault(request.prompt_ids, len(prompts))
            limit = min(request.sampling.max_tokens, self.max_context - len(request.prompt_ids))
            rows.append(_Row(ticket, request, limit, prefilled, len(rows)))
        for row in rows:
            del self._queue[row.ticket]
        longest, device = max(map(len, prompts)), self.model.device
        cache: Any = DynamicCache(config=self.model.config)
        tokens_PQ = torch.tensor([[0] * (longest - len(ids)) + list(ids) for ids in prompts], device=device)
        sizes_P1 = torch.tensor([[len(ids)] for ids in prompts], device=device)
        mask_PQ = (torch.arange(longest, device=device) >= longest - sizes_P1).long()
        logits_PV = self._logits(tokens_PQ, mask_PQ, cache)
        chosen_R = torch.tensor([prompts[row.request.prompt_ids] for row in rows], device=device)
        cache.reorder_cache(chosen_R)
        sampling = SamplingBatch.of([row.request for row in rows], [row.limit for row in rows], device)
        return _Batch(rows, cache, mask_PQ[chosen_R], logits_PV[chosen_R], sampling)

    def _logits(self, tokens_RQ: Tensor, mask_RL: Tensor, cache: Any) -> Tensor:
        """After the last token of each row."""
        positions_RQ = (mask_RL.cumsum(-1) - 1).clamp_min(0)[:, -tokens_RQ.shape[1] :]
        model: Any = self.model
        return model(
            input_ids=tokens_RQ,
            attention_mask=mask_RL,
            position_ids=positions_RQ,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]

    def _draw(self, batch: _Batch, started: float) -> None:
        """The next token of every row; those that are done leave."""
        device = self.model.device
        places_R = torch.tensor([row.place for row in batch.rows], device=device)
        counts_R = torch.tensor([len(row.tokens) for row in batch.rows], device=device)
        drawn = draw(batch.logits_RV, batch.sampling, places_R, counts_R)
        columns = (drawn.tokens.tolist(), drawn.logprobs.tolist(), drawn.entropies.tolist())
        seconds = (time.perf_counter() - started) / len(batch.rows)
        going: list[int] = []
        for place, (row, token, logprob, entropy) in enumerate(zip(batch.rows, *columns, strict=True)):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.entropies.append(entropy)
            row.seconds += seconds
            if token in self.stop_ids or len(row.tokens) == row.limit:
                self._done[row.ticket] = self._completed(row.tokens, row.logprobs, row.entropies, row.cost)
            else:
                going.append(place)
        if len(going) < len(batch.rows):
            self._keep(going)

    def _keep(self, places: list[int]) -> None:
        """Only the rows at these places go on."""
        batch = self._batch
        if batch is None or not places:
            self._batch = None
            return
        batch.rows = [batch.rows[place] for place in places]
        chosen_R = torch.tensor(places, device=self.model.device)
        batch.cache.reorder_cache(chosen_R)
        batch.mask_RL, batch.logits_RV = batch.mask_RL[chosen_R], batch.logits_RV[chosen_R]
