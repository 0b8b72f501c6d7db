"""Sampling from a stock Transformers decoder, prefix by prefix.

No position that the engine holds is computed again: equal prompts of a wave are prefilled once, prompts that are
prefixes of others ride along, and sequences of earlier requests (`retain`) are extended where they end. The reported
log-probabilities are those of a plain `model(input_ids)` call, to rounding.

Shape suffixes: P distinct prompts, N requests, R cells of a grid, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from turntree.core.completion import Completion, GenerationRequest
from turntree.core.cost import Cost
from turntree.core.errors import TurntreeError
from turntree.engines.cache import RowCache
from turntree.engines.compatibility import check_attention, check_generation
from turntree.engines.decoding import Grid, Lane, Sampled, decode
from turntree.engines.kept import KeptSequences, Retained
from turntree.engines.prefill import prefill
from turntree.engines.requests import check_requests
from turntree.engines.sampling import Laws
from turntree.engines.waves import Pool, pools_of, rows_of

_MAX_LANES = 32  # requests that decode side by side in one row
_ROOM = 24  # decode positions allocated ahead


class HFEngine:
    """`core.protocols.Engine` over a model in this process, which may be trained between waves.

    `stop_ids` end a completion (the stop token is part of it). `max_batch_rows` bounds the requests decoded at once,
    `max_prefill_tokens` the padded tokens of one prefill call, `max_kept_tokens` the memory of kept sequences in
    token slots. `pad_id` only fills padding, which nothing sees. `max_context` (default: the model's) bounds prompt
    plus completion; a completion that reaches it ends with "length".

    Raises `InputError` for a model whose keys and values cannot be shared by position (see `compatibility`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stop_ids: Collection[int],
        *,
        max_batch_rows: int = 256,
        pad_id: int = 0,
        policy_version: int = 0,
        max_context: int | None = None,
        max_kept_tokens: int = 2**19,
        max_prefill_tokens: int = 4096,
    ) -> None:
        config = model.config.get_text_config()
        self.max_context: int = config.max_position_embeddings
        bounded = min(max_context or self.max_context, self.max_context)
        check_attention(model, bounded)
        self.stop_ids = frozenset(stop_ids)
        self._model, self._vocabulary, self._pad = model, config.vocab_size, pad_id
        self._max_batch_rows, self._max_prefill_tokens = max_batch_rows, max_prefill_tokens
        self._version = policy_version
        self._kept = KeptSequences(max_kept_tokens)
        self._kept_weights = 0
        self._stops_V = torch.zeros(config.vocab_size, dtype=torch.bool, device=model.device)
        self._stops_V[sorted(self.stop_ids)] = True
        with _evaluating(model):
            check_generation(model, self.generate)
        self._kept.clear()
        self.max_context = bounded

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def kept_tokens(self) -> int:
        """Token slots that kept sequences occupy now."""
        return self._kept.held_tokens

    def weights_changed(self, policy_version: int) -> None:
        self._version = policy_version
        self._kept.clear()

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Answer a wave, in order. Raises what `check_requests` raises before anything is computed, and
        `TurntreeError` where the weights changed unannounced or the logits are not finite."""
        check_requests(requests, vocab_size=self._vocabulary, max_context=self.max_context)
        self._check_weights()
        completions: dict[int, Completion] = {}
        with _evaluating(self._model), torch.inference_mode():
            rows = rows_of(requests, self._kept.find)
            for pool in pools_of(rows, self._max_batch_rows, _MAX_LANES):
                completions.update(self._run(pool, requests))
                if pool.block is None:  # those that go on in place come first and must not be moved before
                    self._kept.settle()
        self._kept.settle()
        return [completions[index] for index in range(len(requests))]

    def _check_weights(self) -> None:
        """Kept keys and values belong to the weights that computed them."""
        weights = _weights_stamp(self._model)
        if len(self._kept) and weights != self._kept_weights:
            raise TurntreeError("the weights changed behind the engine; call weights_changed after an update")
        self._kept_weights = weights

    def _run(self, pool: Pool, requests: Sequence[GenerationRequest]) -> dict[int, Completion]:
        """Prefill and decode one pool. Inside, its N requests are numbered from 0, in order of `pool.requests`."""
        started = time.perf_counter()
        asked = [requests[index] for index in pool.requests]
        limits = [min(r.sampling.max_tokens, self.max_context - len(r.prompt_ids)) for r in asked]
        laws = Laws.of(asked, limits, self._model.device)
        sampled = Sampled.empty(len(asked), max(limits), self._model.device)
        retain_N = torch.tensor([*(request.retain for request in asked), False], device=self._model.device)

        lanes = _lanes_of(pool)
        room = min(max(limits), _ROOM) * min(_MAX_LANES, max(map(len, lanes)))
        cache, logits_PV = prefill(self._model, pool, room=room, max_tokens=self._max_prefill_tokens, pad_id=self._pad)
        copies = torch.tensor([len(prompt.requests) for row in pool.rows for prompt in row.prompts])
        logits_NV = logits_PV.repeat_interleave(copies.to(logits_PV.device), dim=0)
        logits_NV = torch.nn.functional.pad(logits_NV, (0, 0, 0, 1))  # a row for idle cells
        retained: list[tuple[RowCache, list[tuple[int, int]]]] = []
        for part, rows in _grids_of(pool, cache, lanes, self._max_batch_rows):
            grid = Grid(self._model, part, rows, len(asked), retain_N)
            decode(grid, logits_NV[grid.request_R], laws, self._stops_V, sampled)
            retained.extend(grid.retained)
        completions = self._completions(pool, asked, sampled, (time.perf_counter() - started) / len(asked))
        self._keep(pool, asked, completions, retained)
        return dict(zip(pool.requests, completions, strict=True))

    # results

    def _completions(
        self, pool: Pool, asked: Sequence[GenerationRequest], sampled: Sampled, seconds: float
    ) -> list[Completion]:
        """One completion per request of the pool. The first request of a row's longest prompt pays for its prefill;
        all others reuse."""
        prefilled = [
            row.missing if prompt is row.prompts[0] and index == prompt.requests[0] else 0
            for row in pool.rows
            for prompt in row.prompts
            for index in prompt.requests
        ]
        if not bool((sampled.logprobs_NT + sampled.entropies_NT).isfinite().all()):
            raise TurntreeError("the policy's logits are not finite: it has diverged, or its dtype overflows")
        columns = (sampled.tokens_NT, sampled.logprobs_NT, sampled.entropies_NT, sampled.counts_N)
        completions: list[Completion] = []
        for request, new, *answer in zip(asked, prefilled, *(c[:-1].tolist() for c in columns), strict=True):
            tokens, logprobs, entropies, count = answer
            completions.append(
                Completion(
                    token_ids=tuple(tokens[:count]),
                    logprobs=tuple(logprobs[:count]),
                    entropies=tuple(entropies[:count]),
                    finish="stop" if tokens[count - 1] in self.stop_ids else "length",
                    policy_version=self._version,
                    cost=Cost(
                        turns=1,
                        decoded_tokens=count,
                        prefilled_tokens=new,
                        reused_tokens=len(request.prompt_ids) - new,
                        engine_seconds=seconds,
                    ),
                )
            )
        return completions

    def _keep(
        self,
        pool: Pool,
        asked: Sequence[GenerationRequest],
        completions: Sequence[Completion],
        retained: Sequence[tuple[RowCache, list[tuple[int, int]]]],
    ) -> None:
        """Hand retained sequences to the kept ones, and forget those that they contain whole."""
        for cache, pairs in retained:
            sequences = [(row, asked[n].prompt_ids + completions[n].token_ids) for row, n in pairs]
            kept = [Retained(row, ids, len(ids) - 1) for row, ids in sequences]
            if pool.block is None:
                self._kept.add(cache, kept)
            else:
                self._kept.extend(pool.block, kept)
        numbers = iter(range(len(asked)))
        for row in pool.rows:
            mine = [next(numbers) for _ in range(row.lanes)]
            if row.match is not None and row.match.whole and any(asked[n].retain for n in mine):
                self._kept.drop(row.match.entry)


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Dropout off while sampling, whatever the trainer left."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _weights_stamp(model: PreTrainedModel) -> int:
    """Changes whenever autograd sees a parameter written in place (an optimizer step)."""
    return sum(p._version for p in model.parameters() if not p.is_inference())


def _lanes_of(pool: Pool) -> list[list[Lane]]:
    """Per row of the pool its lanes, with requests numbered in order."""
    lanes: list[list[Lane]] = []
    number = 0
    for row in pool.rows:
        lengths = [len(prompt.ids) for prompt in row.prompts for _ in prompt.requests]
        lanes.append([Lane(number + k, length) for k, length in enumerate(lengths)])
        number += len(lengths)
    return lanes


def _grids_of(
    pool: Pool, cache: RowCache, lanes: Sequence[list[Lane]], max_cells: int
) -> Iterator[tuple[RowCache, list[list[Lane]]]]:
    """The grids of a pool: a cache and the lanes of each of its rows. Mostly there is one; a pool of more than
    `max_cells` cells, or a row of more than `_MAX_LANES`, is cut into copies."""
    if pool.block is not None:
        by_place = {row.match.row: own for row, own in zip(pool.rows, lanes, strict=True) if row.match}
        yield cache, [by_place.get(place, []) for place in range(cache.rows)]
        return
    parts = [
        (index, row[k : k + _MAX_LANES]) for index, row in enumerate(lanes) for k in range(0, len(row), _MAX_LANES)
    ]
    size = max(1, max_cells // max(len(part) for _, part in parts))
    if len(parts) == len(lanes) <= size:
        yield cache, list(lanes)
        return
    for first in range(0, len(parts), size):
        indices, rows = zip(*parts[first : first + size], strict=True)
        yield cache.select(torch.tensor(indices, device=cache.device), cache.slots), list(rows)
