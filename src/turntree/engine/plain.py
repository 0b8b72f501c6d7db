"""Sampling from any Transformers decoder with the cache that is its own: for models whose prefixes cannot be shared by
position (linear attention, sliding windows, attention sinks, latent attention).

Requests are answered in batches of rows that begin together, padded on the left, and a step is a whole batch. Equal
prompts are prefilled once, and what the cache holds of them is copied for the siblings. A row that is done leaves the
batch at once. Nothing is kept for later turns: every turn prefills its whole prompt.

Shape suffixes: P distinct prompts, R rows of the batch, Q tokens of a prompt, L tokens so far.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from turntree.core.completion import GenerationRequest
from turntree.core.errors import InputError
from turntree.engine.compatibility import check_positions, positions_of
from turntree.engine.limits import EngineConfig
from turntree.engine.local import LocalEngine
from turntree.engine.requests import cost_of
from turntree.engine.sampling import draw, ended, restricted, uniforms_of


class PlainEngine(LocalEngine):
    """A batch takes as many waiting requests as `max_batch_rows` allows and as have at most `max_prefill_tokens` padded
    tokens of distinct prompts (one prompt at least).

    Raises `InputError` for a model whose batches change its log-probabilities, and for one that has no number of
    positions where `max_context` gives none.
    """

    def __init__(self, model: PreTrainedModel, stop_ids: Collection[int], config: EngineConfig | None = None) -> None:
        config = config or EngineConfig()
        positions = positions_of(model) or config.max_context  # a model that counts none (Mamba) is given some
        if positions is None:
            problem = f"the config of {type(model).__name__} has no max_position_embeddings"
            hint = "say how long prompt and completion may be"
            raise InputError(problem, field="device.engine.max_context", hint=hint)
        super().__init__(model, stop_ids, config, positions=positions)
        check_positions(model, self.max_context, field="max_context")
        self._check("in padded batches")

    def _step(self) -> None:
        if not self._queue:
            return
        started, asked = time.perf_counter(), self._taken()
        distinct = dict.fromkeys(request.prompt_ids for request in asked.values())
        prompts = {ids: place for place, ids in enumerate(distinct)}
        drawn, by_text = self._decode(list(asked.values()), prompts)
        seconds = (time.perf_counter() - started) / len(asked)
        for row, ((ticket, request), columns) in enumerate(zip(asked.items(), drawn, strict=True)):
            tokens, logprobs, entropies = zip(*columns, strict=True)
            prefilled = 0 if prompts.pop(request.prompt_ids, None) is None else len(request.prompt_ids)
            cost = cost_of(request, decoded=len(tokens), prefilled=prefilled, seconds=seconds)
            self._done[ticket] = self._completed(tokens, logprobs, entropies, cost, by_text=row in by_text)

    def _taken(self) -> dict[int, GenerationRequest]:
        """The requests of the next batch, in order of submission."""
        taken: dict[int, GenerationRequest] = {}
        prompts = set[tuple[int, ...]]()
        for ticket, request in self._queue.items():
            prompts.add(request.prompt_ids)
            width = len(prompts) * max(map(len, prompts))
            if taken and (len(taken) == self.config.max_batch_rows or width > self.config.max_prefill_tokens):
                break
            taken[ticket] = request
        for ticket in taken:
            del self._queue[ticket]
        return taken

    def _decode(
        self, requests: list[GenerationRequest], prompts: dict[tuple[int, ...], int]
    ) -> tuple[list[list[tuple[int, float, float]]], set[int]]:
        """The tokens of every request, each with its log-probability and entropy; the requests that a guide ended."""
        longest, device = max(map(len, prompts)), self.model.device
        cache: Any = DynamicCache(config=self.model.config)
        tokens_RQ = torch.tensor([[0] * (longest - len(ids)) + list(ids) for ids in prompts], device=device)
        sizes_P1 = torch.tensor([[len(ids)] for ids in prompts], device=device)
        mask_RL = (torch.arange(longest, device=device) >= longest - sizes_P1).long()
        limits = [request.longest(self.max_context) for request in requests]
        temperatures = [float(request.sampling.temperature) for request in requests]
        temperature_N = torch.tensor(temperatures, device=device)
        uniform_NT = uniforms_of(requests, limits).to(device)
        drawn, by_text = [list[tuple[int, float, float]]() for _ in requests], set[int]()
        logits_RV = self._logits(tokens_RQ, mask_RL, cache)
        rows, places = list(range(len(requests))), [prompts[request.prompt_ids] for request in requests]
        for count in range(max(limits)):
            chosen_R = torch.tensor(places, device=device)  # of the rows of the cache
            if count == 0 or len(places) < len(mask_RL):
                cache.reorder_cache(chosen_R)
                mask_RL = mask_RL[chosen_R]
            if count > 0:
                tokens_R1 = torch.tensor([[drawn[row][-1][0]] for row in rows], device=device)
                mask_RL = torch.cat([mask_RL, torch.ones_like(tokens_R1)], dim=1)
                logits_RV = self._logits(tokens_R1, mask_RL, cache)
            else:
                logits_RV = logits_RV[chosen_R]
            rows_R = torch.tensor(rows, device=device)
            guides = {k: guide for k, row in enumerate(rows) if (guide := requests[row].guide) is not None}
            laws = temperature_N[rows_R], uniform_NT[rows_R, count], temperatures
            found = draw(restricted(logits_RV, guides), *laws)
            by_text |= {rows[k] for k in ended(found.tokens, guides)}
            columns = zip(found.tokens.tolist(), found.logprobs.tolist(), found.entropies.tolist(), strict=True)
            for row, column in zip(rows, columns, strict=True):
                drawn[row].append(column)
            done = {r for r in rows if drawn[r][-1][0] in self.stop_ids or count + 1 >= limits[r]} | by_text
            places = [k for k, r in enumerate(rows) if r not in done]
            rows = [rows[place] for place in places]
            if not rows:
                break
        return drawn, by_text

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
