"""Sampling from a stock Transformers decoder, prefix by prefix.

No position that the engine holds is computed again: equal prompts of a wave are prefilled once, prompts that are
prefixes of others ride along, and sequences of earlier requests (`retain`) are extended where they end. The reported
log-probabilities are those of a plain `model(input_ids)` call, to rounding.

Shape suffixes: B rows, Q tokens of a block, N requests, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from turntree.core.completion import Completion, GenerationRequest
from turntree.core.cost import Cost
from turntree.core.errors import InputError, TurntreeError
from turntree.engines.cache import Block, RowCache, causal_mask
from turntree.engines.decoding import Grid, Lane, Sampled, decode
from turntree.engines.kept import KeptSequences
from turntree.engines.sampling import Laws
from turntree.engines.waves import Row, pools_of, rows_of

_MAX_LANES = 32  # requests that decode side by side in one row
_ROOM = 24  # decode positions allocated ahead


class ContextOverflow(InputError):
    """A prompt leaves no room for a completion; callers end the rollout before (`HFEngine.max_context`)."""


class HFEngine:
    """`core.protocols.Engine` over a model in this process, which may be trained between waves.

    `stop_ids` end a completion (the stop token is part of it). `max_batch_rows` bounds the requests decoded at once,
    `max_prefill_tokens` the padded tokens of one prefill call, `max_kept_tokens` the memory of kept sequences in
    token slots. `pad_id` only fills padding, which nothing sees. `max_context` (default: the model's) bounds prompt
    plus completion; a completion that reaches it ends with "length".

    Raises `InputError` for an architecture whose keys and values cannot be shared by position (see `check_model`).
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
        max_prefill_tokens: int = 8192,
    ) -> None:
        check_model(model)
        config = model.config.get_text_config()
        self.max_context = min(max_context or config.max_position_embeddings, config.max_position_embeddings)
        self.stop_ids = frozenset(stop_ids)
        self._model, self._vocabulary, self._pad = model, config.vocab_size, pad_id
        self._max_batch_rows, self._max_prefill_tokens = max_batch_rows, max_prefill_tokens
        self._version = policy_version
        self._kept = KeptSequences(max_kept_tokens)
        self._kept_weights = 0
        self._stops_V = torch.zeros(config.vocab_size, dtype=torch.bool, device=model.device)
        self._stops_V[sorted(self.stop_ids)] = True

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
        """Answer a wave, in order. Raises `ContextOverflow` for a prompt of `max_context` tokens or more and
        `InputError` for an empty one or an unknown token id, before anything is computed."""
        self._check(requests)
        completions: dict[int, Completion] = {}
        with _evaluating(self._model), torch.inference_mode():
            rows = rows_of(requests, self._kept.find)
            for pool in pools_of(rows, self._max_batch_rows, _MAX_LANES):
                completions.update(self._run(pool, requests))
        return [completions[index] for index in range(len(requests))]

    def _check(self, requests: Sequence[GenerationRequest]) -> None:
        for index, request in enumerate(requests):
            size = len(request.prompt_ids)
            if size >= self.max_context:
                raise ContextOverflow(
                    f"request {index} has a prompt of {size} tokens, the context holds {self.max_context}",
                    hint="end such rollouts before they reach the engine (engine.max_context)",
                )
            if not size or not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < self._vocabulary:
                raise InputError(
                    f"request {index} has an empty prompt or a token id outside 0..{self._vocabulary - 1}",
                    hint="render prompts with the tokenizer of this model",
                )
        weights = _weights_stamp(self._model)
        if len(self._kept) and weights != self._kept_weights:
            raise TurntreeError(
                "the weights changed, but the engine was not told; call weights_changed after an update"
            )
        self._kept_weights = weights

    def _run(self, pool: Sequence[Row], requests: Sequence[GenerationRequest]) -> dict[int, Completion]:
        """Prefill and decode one pool. Inside, requests are numbered 0..N-1 in order of appearance."""
        started = time.perf_counter()
        members = [index for row in pool for prompt in row.prompts for index in prompt.requests]
        asked = [requests[index] for index in members]
        limits = [min(r.sampling.max_tokens, self.max_context - len(r.prompt_ids)) for r in asked]
        device = self._model.device
        laws = Laws.of(asked, limits, device)
        lengths_N = torch.tensor([*(len(r.prompt_ids) for r in asked), 1], device=device)
        retain_N = torch.tensor([*(r.retain for r in asked), False], device=device)
        sampled = Sampled.empty(len(asked), max(limits), device)

        lanes = _lanes_of(pool)
        room = min(max(limits), _ROOM) * min(_MAX_LANES, max(map(len, lanes)))
        cache, logits_NV = self._prefill(pool, max(len(row.ids) for row in pool) + room)
        for first, rows, cells in _grids_of(lanes, self._max_batch_rows):
            whole = first == 0 and rows == list(range(len(pool)))
            part = cache if whole else cache.select(torch.tensor(rows, device=device))
            grid = Grid(self._model, part, cells, idle=len(asked), max_context=self.max_context)
            decode(grid, logits_NV[grid.request_R], laws, self._stops_V, lengths_N, retain_N, sampled)
        completions = self._completions(pool, asked, sampled, (time.perf_counter() - started) / len(asked))
        self._keep(pool, asked, completions, sampled)
        return dict(zip(members, completions, strict=True))

    # prefill

    def _prefill(self, pool: Sequence[Row], slots: int) -> tuple[RowCache, Tensor]:
        """The keys and values of every row and the logits [N + 1, V] after every request's prompt."""
        cache = RowCache(len(pool), slots)
        _load_kept(cache, pool)
        found: list[Tensor] = []
        for first, last in _micro_batches(pool, self._max_prefill_tokens):
            found.append(self._prefill_rows(cache, first, pool[first:last]))
        logits_PV = torch.cat(found)  # per distinct prompt
        prompts = [prompt for row in pool for prompt in row.prompts]
        copies = torch.tensor([len(prompt.requests) for prompt in prompts], device=logits_PV.device)
        logits_NV = logits_PV.repeat_interleave(copies, dim=0)
        return cache, torch.nn.functional.pad(logits_NV, (0, 0, 0, 1))

    def _prefill_rows(self, cache: RowCache, first: int, rows: Sequence[Row]) -> Tensor:
        """Compute the missing tokens of consecutive rows; the logits [P, V] after each of their distinct prompts."""
        longest = max(len(row.ids) - row.start for row in rows)
        tokens_BQ = np.full((len(rows), longest), self._pad)
        slots_BQ = np.full((len(rows), longest), cache.trash)
        positions_BQ = np.zeros((len(rows), longest), dtype=np.int64)
        for index, row in enumerate(rows):
            new = len(row.ids) - row.start
            tokens_BQ[index, :new] = row.ids[row.start :]
            slots_BQ[index, :new] = positions_BQ[index, :new] = np.arange(row.start, len(row.ids))
        device = self._model.device
        positions = torch.from_numpy(positions_BQ).to(device)
        width, fresh = max(len(row.ids) for row in rows), all(row.start == 0 for row in rows)
        cache.expect(Block(first=first, slots_BQ=torch.from_numpy(slots_BQ).to(device), width=width, fresh=fresh))
        ends = [(b, len(prompt.ids) - 1 - row.start) for b, row in enumerate(rows) for prompt in row.prompts]
        columns = sorted({end for _, end in ends})
        logits_BKV = self._model(
            input_ids=torch.from_numpy(tokens_BQ).to(device),
            attention_mask=None if fresh else causal_mask(positions, width, self._model.dtype),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=torch.tensor(columns, device=device),
        ).logits
        return logits_BKV[[b for b, _ in ends], [columns.index(end) for _, end in ends]]

    # results

    def _completions(
        self, pool: Sequence[Row], asked: Sequence[GenerationRequest], sampled: Sampled, seconds: float
    ) -> list[Completion]:
        """One completion per request of the pool. The first request of a row's longest prompt pays for its prefill;
        all others reuse."""
        prefilled = [
            len(row.ids) - row.start if prompt is row.prompts[0] and index == prompt.requests[0] else 0
            for row in pool
            for prompt in row.prompts
            for index in prompt.requests
        ]
        columns = (sampled.tokens_NT, sampled.logprobs_NT, sampled.entropies_NT, sampled.counts_N)
        completions: list[Completion] = []
        for request, new, *answer in zip(asked, prefilled, *(c[:-1].tolist() for c in columns), strict=True):
            tokens, logprobs, entropies, count = answer
            if not np.isfinite(entropies[:count]).all() or not np.isfinite(logprobs[:count]).all():
                raise TurntreeError("the policy's logits are not finite: it has diverged, or its dtype overflows")
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
        pool: Sequence[Row],
        asked: Sequence[GenerationRequest],
        completions: Sequence[Completion],
        sampled: Sampled,
    ) -> None:
        """Hand retained sequences to the kept ones, and forget those that they contain whole."""
        for cache, pairs in sampled.retained:
            rows = [(row, asked[n].prompt_ids + completions[n].token_ids) for row, n in pairs]
            self._kept.add(cache, [(row, ids, len(ids) - 1) for row, ids in rows])
        numbers = iter(range(len(asked)))
        for row in pool:
            mine = [next(numbers) for _ in range(row.lanes)]
            if row.match is not None and row.match.whole and any(asked[n].retain for n in mine):
                self._kept.drop(row.match.entry)


def check_model(model: PreTrainedModel) -> None:
    """Raise `InputError` unless the decoder can be run with keys and values addressed by position: full attention in
    every layer, computed by an implementation that takes a 4-D mask."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if kinds != {"full_attention"} or (window is not None and not hasattr(config, "layer_types")):
        raise InputError(
            f"{type(model).__name__} has layers without full attention ({', '.join(sorted(kinds))}, window {window})",
            hint="use a decoder with full attention",
        )
    implementation = model.config._attn_implementation
    if implementation not in ("sdpa", "eager"):
        raise InputError(
            f"attention implementation {implementation!r} takes no 4-D mask", hint="load the model with sdpa or eager"
        )


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


def _lanes_of(pool: Sequence[Row]) -> list[list[Lane]]:
    """Per row of the pool its lanes, with requests numbered in order."""
    lanes: list[list[Lane]] = []
    number = 0
    for row in pool:
        lengths = [len(prompt.ids) for prompt in row.prompts for _ in prompt.requests]
        lanes.append([Lane(number + k, length) for k, length in enumerate(lengths)])
        number += len(lengths)
    return lanes


def _grids_of(lanes: Sequence[Sequence[Lane]], max_cells: int) -> Iterator[tuple[int, list[int], list[list[Lane]]]]:
    """Cut rows into grids of at most `max_cells` cells (at least one row): number, rows of the pool, lanes of each.
    A row with too many lanes is taken several times."""
    parts = [
        (index, list(row[k : k + _MAX_LANES]))
        for index, row in enumerate(lanes)
        for k in range(0, len(row), _MAX_LANES)
    ]
    width = max(len(part) for _, part in parts)
    size = max(1, max_cells // width)
    for number, first in enumerate(range(0, len(parts), size)):
        chunk = parts[first : first + size]
        yield number, [index for index, _ in chunk], [part for _, part in chunk]


def _micro_batches(pool: Sequence[Row], max_tokens: int) -> Iterator[tuple[int, int]]:
    """Consecutive rows (sorted by missing tokens) whose padded block has at most `max_tokens` tokens."""
    first = 0
    for last in range(1, len(pool) + 1):
        if last == len(pool) or (last + 1 - first) * (len(pool[last].ids) - pool[last].start) > max_tokens:
            yield first, last
            first = last


def _load_kept(cache: RowCache, pool: Sequence[Row]) -> None:
    sources: dict[int, list[int]] = {}
    for index, row in enumerate(pool):
        if row.match is not None:
            sources.setdefault(id(row.match.cache), []).append(index)
    for indices in sources.values():
        matches = [match for index in indices if (match := pool[index].match) is not None]
        longest = max(match.length for match in matches)
        cache.load(indices, matches[0].cache, [match.row for match in matches], longest)
