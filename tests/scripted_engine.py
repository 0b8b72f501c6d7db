"""An engine without a model: its answers come from a function. For tests and benchmarks."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from turntree.core.completion import Completion, Finished, GenerationRequest
from turntree.core.cost import NO_COST, Cost
from turntree.core.errors import InputError, TurntreeError
from turntree.engine.requests import check_idle, check_requests, cost_of


@dataclass(frozen=True)
class ScriptedAnswer:
    """Token ids with given statistics; None stands for the uniform distribution over the vocabulary."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    entropies: tuple[float, ...] | None = None


Answer = Callable[[tuple[int, ...], int], Sequence[int] | ScriptedAnswer]
Latency = Callable[[GenerationRequest], int]
Fault = Callable[[GenerationRequest], str | None]


class ScriptedEngine:
    """`core.protocols.StreamingEngine` whose completion of (prompt_ids, seed) is whatever `answer` returns.

    An answer is cut after its first stop token or after `max_tokens`; one that ends before either is an `InputError`,
    because no model does that. Equal prompts of a wave, or in flight together, are charged once, as a real engine
    would.

    Time is counted in steps, of which `poll(0)` takes one: a submitted request takes `latency(request)` of them from
    its admission on (default and least: 1), at most `max_batch_rows` requests are admitted at once (default: any
    number), and a request for which `fault` returns a reason ends with that reason instead of a completion (in
    `generate`: a `TurntreeError`). With these a scheduler is tested under any interleaving, and every run is the same.

    >>> engine = ScriptedEngine(lambda prompt, seed: (7, 0), stop_ids={0}, vocab_size=10)
    """

    def __init__(
        self,
        answer: Answer,
        stop_ids: Collection[int],
        *,
        vocab_size: int,
        max_context: int = 4096,
        latency: Latency = lambda request: 1,
        fault: Fault = lambda request: None,
        max_batch_rows: int | None = None,
    ) -> None:
        self.stop_ids = frozenset(stop_ids)
        self.max_context = max_context
        self._answer, self._vocabulary, self._version = answer, vocab_size, 0
        self._latency, self._fault, self._max_batch_rows = latency, fault, max_batch_rows
        self._flying: dict[int, _Flight] = {}  # in order of submission; the admitted ones come first
        self._submitted = 0

    @property
    def policy_version(self) -> int:
        return self._version

    def update_weights(self, model: Any, policy_version: int) -> None:
        check_idle(self.in_flight)
        self._version = policy_version

    def clear_cache(self) -> None:
        check_idle(self.in_flight)

    # waves

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Answer a wave, in order and at once, whatever is in flight."""
        check_requests(requests, vocab_size=self._vocabulary, max_context=self.max_context)
        charged: set[tuple[int, ...]] = set()
        completions: list[Completion] = []
        for request in requests:
            outcome = self._outcome(request)
            if isinstance(outcome, str):
                raise TurntreeError(outcome)
            completions.append(_charged(outcome, request, _new_tokens(request, charged)))
        return completions

    # one by one

    @property
    def in_flight(self) -> int:
        return len(self._flying)

    def submit(self, request: GenerationRequest) -> int:
        check_requests([request], vocab_size=self._vocabulary, max_context=self.max_context)
        ticket, self._submitted = self._submitted, self._submitted + 1
        self._flying[ticket] = _Flight(request, self._outcome(request), max(1, self._latency(request)))
        return ticket

    def cancel(self, ticket: int) -> Cost:
        """The cost is the prompt, unless another request was charged for it, and the share of tokens of the steps
        taken."""
        flight = self._flying.pop(ticket, None)
        if flight is None or flight.prefilled is None:
            return NO_COST
        total = 0 if isinstance(flight.outcome, str) else len(flight.outcome.token_ids)
        return cost_of(flight.request, decoded=total * flight.taken // flight.steps, prefilled=flight.prefilled)

    def poll(self, timeout: float | None = None) -> list[Finished]:
        """Steps take no time: any `timeout` but 0 is long enough for all of them."""
        finished: list[Finished] = []
        while self._flying and not finished:
            finished = self._step()
            if timeout == 0:
                break
        return finished

    def _step(self) -> list[Finished]:
        """Admit requests while there is room, then advance every admitted request by one step."""
        admitted = dict(list(self._flying.items())[: self._max_batch_rows])
        charged = {flight.request.prompt_ids for flight in admitted.values() if flight.prefilled is not None}
        for flight in admitted.values():
            if flight.prefilled is None:
                flight.prefilled = _new_tokens(flight.request, charged)
            flight.taken += 1
        ended = {ticket: flight for ticket, flight in admitted.items() if flight.taken == flight.steps}
        for ticket in ended:
            del self._flying[ticket]
        return [flight.finished(ticket) for ticket, flight in ended.items()]

    def _outcome(self, request: GenerationRequest) -> Completion | str:
        """The completion or fault of the request, before costs are charged."""
        if (fault := self._fault(request)) is not None:
            return fault
        answer = self._answer(request.prompt_ids, request.seed)
        if not isinstance(answer, ScriptedAnswer):
            answer = ScriptedAnswer(tuple(answer))
        stop = next((k for k, token in enumerate(answer.token_ids) if token in self.stop_ids), None)
        room = min(request.sampling.max_tokens, self.max_context - len(request.prompt_ids))
        count = room if stop is None else min(stop + 1, room)
        text = None
        if (guide := request.guide) is not None:  # a script that says what is forbidden raises here
            text = next((k for k, token in enumerate(answer.token_ids[:count]) if guide.take(token)), None)
        count = count if text is None else text + 1
        if len(answer.token_ids) < count:
            raise InputError(
                f"the script answers {len(answer.token_ids)} tokens without a stop token, {room} were to be sampled",
                hint="end it with a stop token",
            )
        uniform = math.log(self._vocabulary)
        return Completion(
            token_ids=answer.token_ids[:count],
            logprobs=(answer.logprobs or (-uniform,) * count)[:count],
            entropies=(answer.entropies or (uniform,) * count)[:count],
            finish="stop" if stop is not None and stop < count else "length" if text is None else "text",
            policy_version=self._version,
        )


@dataclass
class _Flight:
    """A submitted request: `taken` of its `steps`; `prefilled` is None until it is admitted."""

    request: GenerationRequest
    outcome: Completion | str
    steps: int
    taken: int = 0
    prefilled: int | None = None

    def finished(self, ticket: int) -> Finished:
        if isinstance(self.outcome, str):
            return Finished(ticket=ticket, fault=self.outcome)
        return Finished(ticket=ticket, completion=_charged(self.outcome, self.request, self.prefilled or 0))


def _charged(completion: Completion, request: GenerationRequest, prefilled: int) -> Completion:
    return replace(completion, cost=cost_of(request, decoded=len(completion.token_ids), prefilled=prefilled))


def _new_tokens(request: GenerationRequest, charged: set[tuple[int, ...]]) -> int:
    """The cost of the request's prompt; zero for prompts in `charged`, to which it is then added."""
    new = 0 if request.prompt_ids in charged else len(request.prompt_ids)
    charged.add(request.prompt_ids)
    return new
