"""The rollouts that are played at once, what each is waiting for, and the news about them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from turntree.core.completion import Finished
from turntree.core.cost import Cost
from turntree.core.foreign import call_part
from turntree.core.protocols import StreamingEngine
from turntree.engine.requests import polled
from turntree.env.local import LocalPool
from turntree.env.pool import Answer, Session
from turntree.rollout.accounting import Usage
from turntree.rollout.groups import Group, Key, SchedulerConfig
from turntree.rollout.live import LiveRollout

T = TypeVar("T")

_TICK = 0.005  # seconds that the engine works before the environments are polled again


@dataclass(eq=False)
class Place:
    """One of the rollouts that are played at once, and what it is waiting for: its ticket or its session's answer."""

    group: Group
    key: Key
    session: Session
    started: float  # when it started
    rollout: LiveRollout | None = None  # None until its environment returned the task
    ticket: int | None = None
    call: int = 0  # the number of its last call to its environment, among all of the run
    due: int = 0  # how many generations the run has when the answer to that call is taken
    failures: int = 0


class Places:
    """The places of one run, in order of their start, and the branches that wait for one."""

    def __init__(
        self,
        engine: StreamingEngine,
        pool: LocalPool,
        config: SchedulerConfig,
        usage: Usage,
        clock: Callable[[], float],
    ) -> None:
        self._engine, self._pool, self._config, self._usage, self._clock = engine, pool, config, usage, clock
        # generations between a call and its answer, where runs repeat: more keeps rollouts of fast tools waiting
        self._overlap = config.places // 8 if pool.concurrency else 0
        self._calls = self._generated = 0
        self._early: dict[Session, Answer] = {}  # answers that arrived before they are due
        self._by_ticket: dict[int, Place] = {}
        self._by_session: dict[Session, Place] = {}
        self.playing: dict[Place, None] = {}
        self.branches: dict[Place, None] = {}  # forked off, and not started yet
        self.refilling: dict[Group, None] = {}  # groups that have fresh rollouts to start

    @property
    def free(self) -> bool:
        return len(self.playing) < self._config.places

    def all(self) -> list[Place]:
        return [*self.playing, *self.branches]

    def of(self, group: Group) -> list[Place]:
        return [place for place in self.all() if place.group is group]

    def asking(self, session: Session) -> Place | None:
        return self._by_session.get(session)

    def start(self, place: Place, now: float) -> None:
        place.started = now
        self.playing[place] = None
        self._by_session[place.session] = place

    def queue(self, group: Group, rollout: LiveRollout, session: Session) -> None:
        """Queue a branch for a place."""
        self.branches[Place(group, rollout.key, session, 0.0, rollout)] = None

    def release(self, place: Place) -> None:
        """Free a place and cancel its request or call, whose cost is charged to the rollout."""
        if place in self.branches:
            del self.branches[place]
        else:
            del self.playing[place]
            del self._by_session[place.session]
        owed, key = place.group.owed, place.key
        owed[key] += Cost(tool_calls=self._pool.close(place.session))
        if (early := self._early.pop(place.session, None)) is not None:
            owed[key] += Cost(tool_calls=early.calls, environment_seconds=early.seconds)
        if place.ticket is not None:
            del self._by_ticket[place.ticket]
            owed[key] += self._engine.cancel(place.ticket)

    # asking

    def ask(self, place: Place) -> None:
        """Let the environment begin, or answer what was said last."""
        place.call, self._calls = self._calls, self._calls + 1
        place.due = self._generated + self._overlap
        if place.rollout is None:
            self._pool.reset(place.session)
        else:
            self._pool.step(place.session, place.rollout.messages[-1])

    def submit(self, place: Place, rollout: LiveRollout) -> None:
        request = rollout.request(self._config.episodes, place.group.seed)
        if self._config.greedy_first and place.key == (0,):
            request = replace(request, sampling=replace(request.sampling, temperature=0.0))
        place.ticket = call_part("engine", self._engine.submit, request)
        self._by_ticket[place.ticket] = place

    # news

    def answered(self, patience: Callable[[], float]) -> dict[Session, Answer]:
        """The environments' answers so far; with `deterministic`, the answers that are due, in order of calls."""
        if not self._config.deterministic:
            return self._pool.poll(0)
        asked = [place for place in self.playing if place.ticket is None]
        due = [place for place in asked if place.due <= self._generated or not self._engine.in_flight]
        until = self._clock() + patience() if due else 0.0
        while any(place.session not in self._early for place in due):
            left = until - self._clock()
            if left < 0 or not self._pool.in_flight:
                break
            self._early |= self._timed(self._pool.poll, left)
        taken = sorted((place for place in due if place.session in self._early), key=lambda place: place.call)
        return {place.session: self._early.pop(place.session) for place in taken}

    def news(self, patience: Callable[[], float]) -> tuple[list[tuple[Place, Finished]], dict[Session, Answer]]:
        """Let the engine work until something is finished, or wait for an environment: what is finished, or
        answered."""
        look = self._pool.in_flight and not self._config.deterministic
        if self._engine.in_flight or self._by_ticket:
            poll = functools.partial(polled, self._engine, self._by_ticket)
            batch = self._timed(poll, _TICK if look else patience())
            self._generated += len(batch)
            return [(self._by_ticket[finished.ticket], finished) for finished in batch], {}
        return [], self._timed(self._pool.poll, patience()) if look else {}

    def taken(self, place: Place) -> LiveRollout:
        """The rollout of a place whose generation is over."""
        assert place.ticket is not None and place.rollout is not None
        del self._by_ticket[place.ticket]
        place.ticket = None
        return place.rollout

    def _timed(self, poll: Callable[[float], T], timeout: float) -> T:
        """Wait for one of the two, and account for the time."""
        started = self._clock()
        requests = 0 if poll == self._pool.poll else self._engine.in_flight
        found = poll(timeout)
        self._usage.request_seconds += requests * (self._clock() - started)
        return found
