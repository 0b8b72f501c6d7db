"""Environments stepped in this process: no overhead, but no protection against hangs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from turntree.core.foreign import EnvironmentFault, asked, reason_of
from turntree.core.messages import Message
from turntree.core.protocols import Environment, Observation
from turntree.environments.pool import Answer, Session, checked, replay, start


class InlinePool:
    """`EnvironmentPool` for environments that answer in microseconds and can be trusted to return.

    A call is made at once, and its answer waits for the next `poll`. An exception or exit becomes a fault. An endless
    loop blocks the process (use `ProcessPool`).
    """

    waits = False

    def __init__(self) -> None:
        self._held: dict[Session, Environment] = {}
        self._answers: dict[Session, Answer] = {}

    @property
    def in_flight(self) -> int:
        return len(self._answers)

    def open(self, environment: Environment) -> Session:
        return Session(environment)

    def fork(self, session: Session, steps: int | None = None, *, into: InlinePool | None = None) -> Session:
        """`into`: the twin lives in that pool. Where the environment cannot be forked, the twin is rebuilt by replay at
        its first call, as in worker processes; what is wrong with that is then the fault of this call alone."""
        twin = session.twin(steps)
        if session in self._held and len(twin.answers) == len(session.answers):
            with contextlib.suppress(EnvironmentFault):
                (into or self)._held[twin] = asked(self._held[session].fork)
        return twin

    def reset(self, session: Session) -> None:
        self._call(session, start)

    def step(self, session: Session, action: Message) -> None:
        if self._call(session, lambda environment: checked(environment.step(action))):
            session.actions.append(action)

    def poll(self, timeout: float | None = None) -> list[Answer]:
        answers, self._answers = list(self._answers.values()), {}
        return answers

    def close(self, session: Session) -> int:
        self._held.pop(session, None)
        given_up = self._answers.pop(session, None)
        return given_up.calls if given_up else 0

    def _call(self, session: Session, ask: Callable[[Environment], Observation]) -> bool:
        """Make one call and keep its answer; whether it was an observation."""
        started = time.perf_counter()
        environment = self._held.pop(session, None)
        replayed = 0 if environment is not None else max(0, len(session.answers) - 1)
        try:
            if environment is None:
                environment = session.environment.fork()
                for _ in replay(environment, session):
                    pass
            observation = ask(environment)
        except BaseException as error:  # a bad rollout is data: the boundary to foreign code
            seconds = time.perf_counter() - started
            answer = Answer(
                session=session, fault=reason_of(error), calls=min(1, len(session.answers)), seconds=seconds
            )
        else:
            self._held[session] = environment
            session.answers.append(observation)
            calls = replayed + (len(session.answers) > 1)
            seconds = time.perf_counter() - started
            answer = Answer(session=session, observation=observation, calls=calls, seconds=seconds)
        self._answers[session] = answer
        return answer.observation is not None
