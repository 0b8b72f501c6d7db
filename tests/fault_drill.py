"""A fault drill: environments whose calls kill their worker, hang, answer garbage or raise, and an engine whose calls
fail, at random and seeded. Wrap any environment and any engine; whatever drives them has to come through."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turntree.core import seeds
from turntree.core.completion import Completion, Finished, GenerationRequest
from turntree.core.cost import NO_COST, Cost
from turntree.core.messages import Message
from turntree.core.protocols import Environment, Observation, StreamingEngine

FAULTS = ("killed", "hanging", "garbage", "raising")


@dataclass(frozen=True, kw_only=True)
class FaultPlan:
    """The probability that an environment call goes wrong in each way (`reset` is a call too).

    A draw is keyed by (seed, task, actions, attempt). The attempts are counted in files of `tally`, because a killed
    worker remembers nothing; without `tally` a call that fails once fails always.
    """

    seed: int
    killed: float = 0.0
    hanging: float = 0.0
    garbage: float = 0.0
    raising: float = 0.0
    tally: str | None = None

    def draw(self, *key: str) -> str | None:
        """The fault of this call, if it has one."""
        attempt = self._attempt(key)
        number = seeds.generator(self.seed, "drill", *key, attempt).random()
        for name in FAULTS:
            number -= getattr(self, name)
            if number < 0:
                self._note(name)
                return name
        return None

    def _attempt(self, key: Sequence[str]) -> int:
        if self.tally is None:
            return 0
        digest = hashlib.blake2b("\x1f".join(key).encode(), digest_size=8).hexdigest()
        return _append(Path(self.tally) / digest)

    def _note(self, fault: str) -> None:
        if self.tally is not None:
            _append(Path(self.tally) / fault)

    def happened(self) -> Counter[str]:
        """How often each fault was drawn, in whichever process."""
        assert self.tally is not None
        return Counter({name: _size(Path(self.tally) / name) for name in FAULTS})


@dataclass
class Faulty:
    """An environment (protocol `Environment`) around another, with the faults of `plan`."""

    environment: Environment
    plan: FaultPlan
    said: list[str] = field(default_factory=list)

    @property
    def task_id(self) -> str:
        return self.environment.task_id

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        return self.environment.tools

    def reset(self) -> tuple[Message, ...]:
        return self._suffer() or self.environment.reset()

    def step(self, action: Message) -> Observation:
        self.said.append(action.content)
        return self._suffer() or self.environment.step(action)

    def fork(self) -> Faulty:
        return Faulty(self.environment.fork(), self.plan, list(self.said))

    def _suffer(self) -> Any:
        fault = self.plan.draw(self.task_id, *self.said)
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hanging":
            time.sleep(3600)
        if fault == "raising":
            raise RuntimeError("the simulator crashed")
        return ["garbage"] if fault == "garbage" else None


class FailingEngine:
    """A `StreamingEngine` around another: a share `rate` of the requests fail, drawn by (seed, request, attempt)."""

    def __init__(self, engine: StreamingEngine, *, rate: float, seed: int) -> None:
        self._engine, self._rate, self._seed = engine, rate, seed
        self._attempts: Counter[int] = Counter()
        self._failing: dict[int, int] = {}
        self.failed = 0

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    @property
    def max_context(self) -> int:
        return self._engine.max_context

    @property
    def in_flight(self) -> int:
        return self._engine.in_flight + len(self._failing)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        return self._engine.generate(requests)

    def update_weights(self, model: Any, policy_version: int) -> None:
        self._engine.update_weights(model, policy_version)

    def clear_cache(self) -> None:
        self._engine.clear_cache()

    def submit(self, request: GenerationRequest) -> int:
        attempt = self._attempts[request.seed]
        self._attempts[request.seed] += 1
        if seeds.generator(self._seed, "engine drill", request.seed, attempt).random() >= self._rate:
            return self._engine.submit(request)
        self.failed += 1
        self._failing[-self.failed] = -self.failed
        return -self.failed

    def cancel(self, ticket: int) -> Cost:
        return NO_COST if self._failing.pop(ticket, None) else self._engine.cancel(ticket)

    def poll(self, timeout: float | None = None) -> list[Finished]:
        failed = [Finished(ticket=ticket, fault="the engine's call failed") for ticket in self._failing]
        self._failing.clear()
        return failed + self._engine.poll(0 if failed else timeout)


class Corridor:
    """Done after `length` steps, a success when "left" was said an even number of times; says what it was told.

    Pure Python, picklable, forks: the smallest environment whose answers depend on every action before."""

    tools: tuple[dict[str, Any], ...] = ()

    def __init__(self, task_id: str = "corridor", length: int = 3) -> None:
        self.task_id, self.length, self.said = task_id, length, []

    def reset(self) -> tuple[Message, ...]:
        self.said = []
        return (Message("user", f"walk {self.length}"),)

    def step(self, action: Message) -> Observation:
        self.said.append(action.content)
        done = len(self.said) >= self.length
        success = self.said.count("left") % 2 == 0
        return Observation((Message("user", " ".join(self.said)),), done, success if done else None)

    def fork(self) -> Corridor:
        twin = Corridor(self.task_id, self.length)
        twin.said = list(self.said)
        return twin


class Even(Corridor):
    """A success when the number of characters said is even: chance, for a random policy."""

    def step(self, action: Message) -> Observation:
        told = super().step(action)
        success = len("".join(self.said)) % 2 == 0
        return Observation(told.messages, told.done, success if told.done else None)

    def fork(self) -> Even:
        twin = Even(self.task_id, self.length)
        twin.said = list(self.said)
        return twin


class Hopeless(Corridor):
    def step(self, action: Message) -> Observation:
        told = super().step(action)
        return Observation(told.messages, told.done, False if told.done else None)

    def fork(self) -> Hopeless:
        return Hopeless(self.task_id, self.length)


def _append(path: Path) -> int:
    """Add one byte to a file, whichever process does; how many it had before."""
    handle = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    try:
        os.write(handle, b".")
        return os.fstat(handle).st_size - 1
    finally:
        os.close(handle)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
