"""The checks of requests that every engine makes before it computes anything, the wait for what an engine finishes, the
cost of a request, and what engines over a server have in common."""

from __future__ import annotations

import concurrent.futures
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Any, cast

from turntree.core.completion import Completion, Finished, GenerationRequest
from turntree.core.cost import NO_COST, Cost
from turntree.core.errors import InputError, TurntreeError
from turntree.core.foreign import call_part
from turntree.core.protocols import StreamingEngine


def check_requests(requests: Sequence[GenerationRequest], *, vocab_size: int, max_context: int) -> None:
    """Raise `InputError` for a prompt of `max_context` tokens or more, which leaves no room for a completion, for an
    empty one, and for a token id that the model does not have."""
    for index, request in enumerate(requests):
        size = len(request.prompt_ids)
        if size >= max_context:
            raise InputError(
                f"request {index} has a prompt of {size} tokens, the context holds {max_context}",
                hint="end such rollouts before they reach the engine (engine.max_context)",
            )
        if not size or not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocab_size:
            raise InputError(
                f"request {index} has an empty prompt or a token id outside 0..{vocab_size - 1}",
                hint="render prompts with the tokenizer of this model",
            )


def polled(engine: StreamingEngine, waiting: Collection[int], timeout: float | None = None) -> list[Finished]:
    """What `engine.poll` gives to one who waits for these tickets. Raises `TurntreeError` where the engine has lost
    them, which would never come, and for a ticket that nobody waits for."""
    if waiting and not engine.in_flight:
        told = f"the engine lost {len(waiting)} requests"
        raise TurntreeError(f"{told}: its in_flight is 0, and `poll` never returned them")
    found: Any = call_part("engine", engine.poll, timeout)
    seen = set[int]()
    if not isinstance(found, list) or not all(isinstance(each, Finished) for each in cast("list[Any]", found)):
        raise TurntreeError("the engine's `poll` gave something that is not a list of finished requests")
    for finished in cast("list[Finished]", found):
        if finished.ticket not in waiting or finished.ticket in seen:
            raise TurntreeError(f"the engine returned ticket {finished.ticket}, which nobody waits for")
        seen.add(finished.ticket)
    return cast("list[Finished]", found)


def check_idle(in_flight: int) -> None:
    """Raise `TurntreeError` while requests are in flight: a completion is sampled by one policy."""
    if in_flight:
        raise TurntreeError(f"requests are in flight ({in_flight}); poll or cancel them before the weights change")


def hashes_of_prefixes(ids: tuple[int, ...], stride: int) -> list[int]:
    """Chained hashes of the prefixes of length stride, 2 stride, ... (ints hash alike in every process)."""
    hashes: list[int] = []
    for end in range(stride, len(ids) + 1, stride):
        hashes.append(hash((hashes[-1] if hashes else end, ids[end - stride : end])))
    return hashes


def cost_of(request: GenerationRequest, *, decoded: int, prefilled: int, seconds: float = 0.0) -> Cost:
    """The cost of one model call. Positions of its prompt that were not prefilled for it count as reused."""
    return Cost(
        turns=1,
        decoded_tokens=decoded,
        prefilled_tokens=prefilled,
        reused_tokens=len(request.prompt_ids) - prefilled,
        engine_seconds=seconds,
    )


class RemoteEngine(ABC):
    """`core.protocols.StreamingEngine` over a server that answers each request with a future. `vocabulary` is the
    number of token ids that a prompt may hold, `patience` the seconds that a wait for the next answer may take (None:
    the requests have limits of their own). After an error nothing is in flight."""

    where = "the server"

    def __init__(
        self, stop_ids: Collection[int], vocabulary: int, max_context: int, patience: float | None = None
    ) -> None:
        self.stop_ids, self.max_context = frozenset(stop_ids), max_context
        self._vocabulary, self._patience = vocabulary, patience
        self.policy_version, self._next = 0, 0
        self._open: dict[int, tuple[GenerationRequest, Future[Any]]] = {}
        self._since = 0.0  # when the server answered last, or was asked while it had nothing to do

    @property
    def in_flight(self) -> int:
        return len(self._open)

    def clear_cache(self) -> None:
        """The server keeps what it has: it decides for itself what goes, and its weights are the same."""
        check_idle(self.in_flight)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Raises `TurntreeError` for a fault of a request, which it cannot return."""
        check_requests(requests, vocab_size=self._vocabulary, max_context=self.max_context)
        order = [self.submit(request) for request in requests]
        waiting, found = set(order), dict[int, Finished]()
        while waiting:
            found |= {finished.ticket: finished for finished in self._poll(None, waiting)}
            waiting -= found.keys()
        if fault := next((found[ticket].fault for ticket in order if found[ticket].fault is not None), None):
            raise TurntreeError(f"{self.where}: {fault}")
        return [completion for ticket in order if (completion := found[ticket].completion) is not None]

    def submit(self, request: GenerationRequest) -> int:
        check_requests([request], vocab_size=self._vocabulary, max_context=self.max_context)
        future = self._send(request)
        self._since = self._since if self._open else time.perf_counter()
        ticket, self._next = self._next, self._next + 1
        self._open[ticket] = request, future
        return ticket

    def cancel(self, ticket: int) -> Cost:
        """What the server had done by then (its connection is closed) is not known and counts as zero."""
        if ticket in self._open:
            self._open.pop(ticket)[1].cancel()
        return NO_COST

    def poll(self, timeout: float | None = None) -> list[Finished]:
        return self._poll(timeout, self._open)

    def _poll(self, timeout: float | None, tickets: Collection[int]) -> list[Finished]:
        """What is finished of these tickets."""
        started, futures = time.perf_counter(), {ticket: self._open[ticket][1] for ticket in sorted(tickets)}
        silent = math.inf if self._patience is None else self._since + self._patience
        wait = min(max(0.0, silent - started), math.inf if timeout is None else timeout)
        bound = None if math.isinf(wait) else wait
        done, _ = concurrent.futures.wait(futures.values(), bound, concurrent.futures.FIRST_COMPLETED)
        self._since = time.perf_counter() if done else self._since
        try:
            if futures and not done and time.perf_counter() >= silent:
                raise self._silence()
            seconds = (time.perf_counter() - started) / max(1, len(done))  # waiting is shared by those that it was for
            ready = [ticket for ticket, future in futures.items() if future in done]
            return [self._finished(ticket, *self._open.pop(ticket), seconds) for ticket in ready]
        except BaseException:
            for ticket in list(self._open):
                self.cancel(ticket)
            raise

    # what an engine has to say

    @abstractmethod
    def _send(self, request: GenerationRequest) -> Future[Any]: ...

    @abstractmethod
    def _finished(self, ticket: int, request: GenerationRequest, answer: Future[Any], seconds: float) -> Finished:
        """What became of a request. Raises `TurntreeError` where no request can be answered any more."""

    def _silence(self) -> TurntreeError:
        """Nothing was answered in `patience` seconds."""
        return TurntreeError("the server does not answer")
