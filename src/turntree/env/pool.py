"""Sessions, calls and answers: the interface of a pool of environments, whether in this process or in workers.

A *session* is one episode as its pool sees it: its start, its actions and its answers. The environment that a pool
keeps for a session is only a cache of that record. When it is lost (a worker died, a call failed half-way), the next
call rebuilds it from `reset` and the recorded actions, and refuses it when it answers differently than before. So a
fault costs at most a replay, and a retry is the same call again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from turntree.core.foreign import EnvironmentFault
from turntree.core.messages import ROLES, Message
from turntree.core.protocols import Environment, Observation
from turntree.core.scalars import given_number, given_truth


@dataclass(eq=False)
class Session:
    """One episode. `environment` is its start and is never stepped itself; `answers[0]` is the observation of `reset`,
    `answers[t]` that of action t. Only its pool writes to it."""

    environment: Environment
    actions: list[Message] = field(default_factory=list[Message])
    answers: list[Observation] = field(default_factory=list[Observation])

    def twin(self) -> Session:
        """The same episode up to now."""
        return Session(self.environment, self.actions[:], self.answers[:])


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The end of one call: an observation (of a `reset`: the task), or a fault.

    `calls` counts the environment steps that were made for it, replayed ones included; `seconds` is how long they
    took (of a call that was killed: until then).
    """

    observation: Observation | None = None
    fault: str | None = None
    calls: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if (self.observation is None) == (self.fault is None):
            raise ValueError("an answer has either an observation or a fault")


def start(environment: Environment) -> Observation:
    """`reset` as a checked observation."""
    return checked(Observation(environment.reset(), done=False))


def replay(environment: Environment, actions: Sequence[Message], answers: Sequence[Observation]) -> Iterator[int]:
    """Replay the actions of a session on a fresh copy. Raises `EnvironmentFault` when it answers differently: the
    environment is then not a function of its actions, and the conversation so far does not fit it."""
    for turn, answer in enumerate(answers):
        again = start(environment) if turn == 0 else checked(environment.step(actions[turn - 1]))
        if again != answer:
            raise EnvironmentFault(f"a replay was answered differently at turn {turn}")
        yield turn


def checked(observation: Any) -> Observation:
    """`observation` if it is one, its numbers and truths as plain ones; raises `EnvironmentFault` for garbage.

    A scalar of numpy or torch is a number here, and would stop the run later, where it is written as JSON."""
    if not isinstance(observation, Observation):
        raise EnvironmentFault(f"answered {type(observation).__name__} instead of an observation")
    messages: Any = observation.messages
    if not isinstance(messages, tuple) or not all(
        isinstance(each, Message)
        and each.role in ROLES
        and isinstance(each.content, str)
        and isinstance(each.tool_calls, tuple)
        for each in messages
    ):
        raise EnvironmentFault("answered something that is not a tuple of messages")
    done = given_truth("done", observation.done)
    if not messages and not done:
        raise EnvironmentFault("answered no message, and the episode goes on")
    return replace(
        observation,
        done=done,
        success=None if observation.success is None else given_truth("success", observation.success),
        progress=None if observation.progress is None else given_number("progress", observation.progress),
        reward=None if observation.reward is None else given_number("reward", observation.reward),
        metrics={name: given_number(f"metric {name!r}", value) for name, value in observation.metrics.items()},
    )
