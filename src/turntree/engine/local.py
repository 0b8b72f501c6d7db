"""What engines over a model in this process have in common: the queue, the weights, the calls of the protocol."""

from __future__ import annotations

import ctypes
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from transformers import PreTrainedModel

from turntree.core.completion import Completion, Finished, GenerationRequest
from turntree.core.cost import NO_COST, Cost
from turntree.core.errors import ConfigError, TurntreeError
from turntree.engine.compatibility import check_generation
from turntree.engine.limits import EngineConfig
from turntree.engine.requests import check_idle, check_requests


class LocalEngine(ABC):
    """`core.protocols.StreamingEngine` over a model in this process, which may be trained while nothing is in flight.

    `stop_ids` end a completion (the stop token is part of it). Requests are admitted in order of submission. One thread
    drives the engine: work is done inside `generate` and `poll`, and the same calls give the same bits. The reported
    log-probabilities equal those of a plain `model(input_ids)` call, up to rounding, which `_check` measures.
    """

    def __init__(
        self, model: PreTrainedModel, stop_ids: Collection[int], config: EngineConfig, *, positions: int
    ) -> None:
        """`positions` are those of the model, of which the configuration may allow fewer."""
        self.config, self.stop_ids = config, frozenset(stop_ids)
        self._positions, self.max_context = positions, min(config.max_context or positions, positions)
        self.model = model  # a trainer of the same object computes the same log-probabilities
        self.policy_version = 0
        self._vocabulary: int = model.config.get_text_config().vocab_size
        self._weights = 0  # the stamp of those that computed what is held
        self._tickets = 0
        self._queue: dict[int, GenerationRequest] = {}  # by ticket, in order
        self._done: dict[int, Completion] = {}  # by ticket, until they are returned

    def _check(self, how: str) -> None:
        """Raise `InputError` where sampling differs from plain calls; `how` says how rows are computed. A probe is
        longer than a small `max_context`, so it may take all positions of the model."""
        bounded, self.max_context = self.max_context, self._positions
        with _evaluating(self.model):
            check_generation(self.model, self.generate, how=how)
        self.max_context = bounded

    @property
    def in_flight(self) -> int:
        return len(self._queue) + self._decoding + len(self._done)

    def update_weights(self, model: PreTrainedModel, policy_version: int) -> None:
        """Raises `ConfigError` for another model than the engine's own, which is updated in place."""
        if model is not self.model:
            raise ConfigError("is not the model that the engine samples from", field="model", hint="train that one")
        self.clear_cache()
        self.policy_version = policy_version

    def clear_cache(self) -> None:
        """Raises `TurntreeError` while requests are in flight."""
        check_idle(self.in_flight)
        self._forget()
        with suppress(AttributeError, OSError, TypeError):  # another C library than glibc,
            ctypes.CDLL(None).malloc_trim(0)  # which would keep what was freed in pieces that are no use to an update

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Answer a wave, in order; other requests in flight continue beside it. Raises what `check_requests` raises
        before anything is computed, and what `poll` raises."""
        check_requests(requests, vocab_size=self._vocabulary, max_context=self.max_context)
        tickets = [self._enqueue(request) for request in requests]
        with self._running():
            while not all(ticket in self._done for ticket in tickets):
                self._step()
        return [self._done.pop(ticket) for ticket in tickets]

    def submit(self, request: GenerationRequest) -> int:
        check_requests([request], vocab_size=self._vocabulary, max_context=self.max_context)
        return self._enqueue(request)

    def cancel(self, ticket: int) -> Cost:
        if ticket in self._done:
            return self._done.pop(ticket).cost
        if (request := self._queue.pop(ticket, None)) is not None:
            self._dequeued(request)
            return NO_COST
        with torch.inference_mode():
            return self._stop(ticket)

    def poll(self, timeout: float | None = None) -> list[Finished]:
        """Raises `TurntreeError` where the weights changed unannounced or the logits are not finite. After an error
        nothing is in flight."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        with self._running():
            while not self._done and (self._queue or self._decoding):
                self._step()
                if time.monotonic() >= deadline:
                    break
        done, self._done = self._done, {}
        return [Finished(ticket=ticket, completion=done[ticket]) for ticket in sorted(done)]

    # what an engine has to say: `_step`, and the others where something is left between two steps

    @abstractmethod
    def _step(self) -> None:
        """Admit what there is room for, and draw a token at least for every request in decoding."""

    @property
    def _decoding(self) -> int:
        """The number of requests that are past the queue and not done."""
        return 0

    def _stop(self, ticket: int) -> Cost:
        """Take a request out of decoding, and return its cost so far. None has this ticket: nothing is done."""
        return NO_COST

    @property
    def _holds(self) -> bool:
        """Whether it holds anything that the weights computed."""
        return False

    def _forget(self) -> None:
        """Drop what is kept for later requests."""
        return None

    def _dequeued(self, request: GenerationRequest) -> None:
        """A request was cancelled before it was admitted."""
        return None

    def _enqueue(self, request: GenerationRequest) -> int:
        ticket, self._tickets = self._tickets, self._tickets + 1
        self._queue[ticket] = request
        return ticket

    def _abandon(self) -> None:
        """Drop everything in flight."""
        self._queue.clear()
        self._done.clear()

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Every model call is inside this context. An error ends everything in flight, so no state is half done."""
        trained = (p for p in self.model.parameters() if p.requires_grad and not p.is_inference())
        weights = sum(p._version for p in trained)  # changes with every step
        if self._holds and weights != self._weights:
            self._abandon()
            raise TurntreeError("the weights changed behind the engine; call update_weights after an update")
        self._weights = weights
        try:
            with _evaluating(self.model), torch.inference_mode():
                yield
        except BaseException:
            self._abandon()
            raise

    def _completed(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        entropies: Sequence[float],
        cost: Cost,
        *,
        by_text: bool = False,
    ) -> Completion:
        """`by_text`: its guide ended it."""
        if not math.isfinite(math.fsum(logprobs) + math.fsum(entropies)):
            raise TurntreeError("the policy's logits are not finite: it has diverged, or its dtype overflows")
        return Completion(
            token_ids=tuple(tokens),
            logprobs=tuple(logprobs),
            entropies=tuple(entropies),
            finish="stop" if tokens[-1] in self.stop_ids else "text" if by_text else "length",
            policy_version=self.policy_version,
            cost=cost,
        )


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Switch dropout off while sampling, and restore the trainer's mode afterwards."""
    training = model.training
    if training:
        model.eval()
    try:
        yield
    finally:
        if training:
            model.train()
