"""The samples of a profile: numbered actions at a state, from an engine or from an earlier profile."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from turntree.core.completion import Finished, GenerationRequest, Sampling
from turntree.core.cost import NO_COST, Cost
from turntree.core.errors import TurntreeError
from turntree.core.messages import Message
from turntree.core.protocols import Engine, Renderer, StreamingEngine, TurnState
from turntree.engine.requests import polled
from turntree.rollout.live import RendererFault, sampled_turn
from turntree.rollout.local import Prompted, local_request

if TYPE_CHECKING:
    from turntree.pivots.rows import StoredProfile

_AN_OUTAGE = 8  # this many failures in a row mean an outage; fewer may be one state that the engine refuses

Answer = Callable[[Sequence[GenerationRequest]], Sequence[Finished]]


@dataclass(frozen=True)
class Sample:
    """One local rollout of a profile. `action` is None where the engine failed: it is censored and never gets a
    reward."""

    action: Message | None
    cost: Cost = NO_COST
    fault: str = ""  # why there is no action

    @property
    def truncated(self) -> bool:
        """Cut at max_tokens."""
        return self.action is not None and self.action.cut

    @property
    def key(self) -> str:
        """Equal for equal actions that ended alike (cut or not)."""
        return json.dumps(None if self.action is None else self.action.to_chat(), sort_keys=True)


def together(engine: Engine) -> Answer:
    """Sample requests as one wave; a failure of the engine ends the run."""

    def answer(requests: Sequence[GenerationRequest]) -> list[Finished]:
        completions = engine.generate(requests)
        return [Finished(ticket=ticket, completion=completion) for ticket, completion in enumerate(completions)]

    return answer


def one_by_one(engine: StreamingEngine) -> Answer:
    """Sample requests one by one; a single failure is censored, failure of all requests is an outage."""

    def answer(requests: Sequence[GenerationRequest]) -> list[Finished]:
        tickets = [engine.submit(request) for request in requests]
        finished: dict[int, Finished] = {}
        while waiting := set(tickets) - finished.keys():
            finished.update((done.ticket, done) for done in polled(engine, waiting))
        faults = [done.fault for done in finished.values() if done.fault is not None]
        if len(faults) == len(tickets) >= _AN_OUTAGE:
            raise TurntreeError(f"all {len(faults)} requests failed ({faults[0]}); run the command again to resume")
        return [finished[ticket] for ticket in tickets]

    return answer


class Sampler:
    """Draws samples by number. Sample k of a state does not depend on other draws, so a profile with fewer rollouts
    holds the first samples of one with more."""

    def __init__(
        self, answer: Answer, renderer: Renderer, sampling: Sampling, seed: int, store: StoredProfile | None = None
    ) -> None:
        self._answer, self._renderer, self._sampling, self._seed, self._store = answer, renderer, sampling, seed, store

    def draw(self, wanted: Sequence[tuple[Prompted, range]], *, again: bool = False) -> list[list[Sample]]:
        """The samples for every (state, sample numbers); those that are not in the store go to the engine in one batch.
        `again`: more samples of these states may follow, so one request per state retains its prompt."""
        held = [self._held(item.state) for item, _ in wanted]
        missing = [
            replace(
                local_request(item, self._sampling, seed=self._seed, sample=number),
                retain=again and number == numbers.start == 0,
            )
            for (item, numbers), known in zip(wanted, held, strict=True)
            for number in numbers
            if number not in known
        ]
        fresh = iter(self._answer(missing) if missing else ())
        return [
            [known[number] if number in known else self._read(next(fresh), item.state.tools) for number in numbers]
            for (item, numbers), known in zip(wanted, held, strict=True)
        ]

    def _held(self, state: TurnState) -> dict[int, Sample]:
        if self._store is None:
            return {}
        samples = enumerate(self._store.samples(state))
        return {number: sample for number, sample in samples if sample.action is not None}

    def _read(self, finished: Finished, tools: Sequence[dict[str, Any]]) -> Sample:
        completion = finished.completion
        if completion is None:
            return Sample(None, fault=finished.fault or "")
        try:
            return Sample(sampled_turn(self._renderer, completion.token_ids, completion, tools), completion.cost)
        except RendererFault as fault:
            return Sample(None, completion.cost, str(fault))
