"""The verifier `executed`: play the demonstrated and the sampled action in copies, and compare what they did.

It serves every environment that forks. The state is rebuilt by replaying the trace's actions on a fresh task, and the
trace is refused where the environment answers differently from it. What it cannot see is in docs/design/executed.md.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from turntree.core import parts
from turntree.core.config import Part, to_value
from turntree.core.cost import Cost
from turntree.core.errors import ConfigError
from turntree.core.foreign import EnvironmentFault, call_foreign
from turntree.core.messages import Message, action_kind
from turntree.core.protocols import Environment, Observation, TurnState, TurnVerifier, task_of
from turntree.core.verdict import Verdict
from turntree.env.pool import checked
from turntree.rollout.rebuild import Rebuilder, Said, said
from turntree.run.identity import fingerprint
from turntree.verify.arguments import Remembered
from turntree.verify.strict import StrictMatch

Compare = Literal["observation", "progress", "either"]

_REMEMBERED_TURNS = 256
_NOTHING = Message("assistant", "")


@dataclass(frozen=True)
class Effect:
    """The effect of an action: the answer, and the environment's `state()` afterwards (None where it has none)."""

    answer: Observation
    state: Any


@dataclass(frozen=True)
class _Rebuilt:
    """A state inside a trace. `progress` is the environment's value before the state, `shown` the effect of the
    demonstration, `nothing` that of an empty message (None: the environment does not accept one)."""

    environment: Environment
    progress: float | None
    shown: Effect
    nothing: Effect | None


class Executed(TurnVerifier):
    """1 for an action that has the effect of the demonstration (protocol `TurnVerifier`); the demonstration itself is
    accepted without playing it. `environment` is the one that the traces were played in. Its code runs because the user
    names it, never because a trace does. Its options replace those of the trace. Where it is stepped in threads, as
    many states are judged at the same time. What playing cost is in the verdict (`Verdict.cost`).

    A result that an empty message also produces does not count as an effect: such a demonstration is matched only by
    itself. An environment that fails, or that answers the demonstration differently the second time, gives no reward.

    Args:
        compare: "observation" wants the same answer (messages, end, success, reward, progress) and, where the
            environment has a method `state()`, an equal value of it. "progress" wants the task's progress to
            rise, at least as high as the demonstration brings it. "either" takes one of the two.
        ignore_whitespace: Compare texts word by word.
    """

    def __init__(
        self, environment: Part | None = None, *, compare: Compare = "either", ignore_whitespace: bool = False
    ) -> None:
        if environment is None:
            hint = "name that of the traces: --environment NAME (an exported reward has none: name another verifier)"
            raise ConfigError("`executed` plays actions and needs one", field="environment", hint=hint)
        options = {"compare": compare, "ignore_whitespace": ignore_whitespace}
        deciding = [parts.identity("environments", environment), to_value(environment.options), options]
        self.name = f"executed/1+compare={compare}+environment={environment.name}@{fingerprint(deciding, 4)}"
        self._compare, self._said = compare, _word_by_word if ignore_whitespace else said
        self._rebuilder = Rebuilder(environment, self._said)
        self._states: Remembered[tuple[threading.Lock, list[_Rebuilt | str]]] = Remembered(_REMEMBERED_TURNS)
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the environments' tasks."""
        self._rebuilder.close()

    def judge(self, state: TurnState, action: Message) -> Verdict:
        """Raises `InputError` where the trace does not say how to build its environment, or does not fit it."""
        kind = action_kind(action)
        if action.content == state.demonstration.content and StrictMatch().judge(state, action).reward == 1.0:
            return Verdict(1.0, "demonstrated", kind)
        with self._lock:
            one_by_one, held = self._states.of(state, lambda: (threading.Lock(), []))
        with one_by_one:
            began, played = time.perf_counter(), 0
            if not held:
                try:
                    held.append(self._rebuilt(state))
                    played = state.turn + 3  # its history, the demonstration twice, and nothing
                except EnvironmentFault as fault:  # at the demonstration at the latest
                    held.append(str(fault))
                    played = state.turn + 1
            reward, reason = self._tried(held[0], action)
            played += not isinstance(held[0], str)
            cost = Cost(tool_calls=played, environment_seconds=time.perf_counter() - began)
        self.concurrency = max(1, self._rebuilder.concurrency)
        return Verdict(reward, reason, kind, cost=cost)

    # comparing

    def _tried(self, at: _Rebuilt | str, action: Message) -> tuple[float | None, str]:
        """The reward (None: there is none), and why."""
        if isinstance(at, str):
            return None, at
        try:
            return self._compared(at, call_foreign(lambda: _play(at.environment, action)))
        except EnvironmentFault as fault:
            return None, str(fault)

    def _compared(self, at: _Rebuilt, tried: Effect) -> tuple[float, str]:
        same = self._compare != "progress" and self._same(at.shown, tried)
        if same and not at.shown.answer.done and at.nothing is not None and self._same(at.shown, at.nothing):
            return 0.0, "the demonstration does what an empty message does"
        if same:
            return 1.0, "same effect as the demonstration"
        if self._compare != "observation" and _as_near(at, tried.answer):
            return 1.0, "as near to the goal as the demonstration"
        if self._compare == "progress" and (at.shown.answer.progress, at.shown.answer.success) == (None, None):
            raise EnvironmentFault("the environment reports no progress to compare")
        return 0.0, "another effect"

    def _same(self, one: Effect, other: Effect) -> bool:
        a, b = one.answer, other.answer
        outcome = (a.done, a.success, a.reward, a.progress) == (b.done, b.success, b.reward, b.progress)
        return outcome and self._said(a.messages) == self._said(b.messages) and _equal(one.state, other.state)

    # rebuilding

    def _rebuilt(self, turn: TurnState) -> _Rebuilt:
        environment, last = self._rebuilder.at(turn)
        shown, again = (call_foreign(lambda: _play(environment, turn.demonstration)) for _ in range(2))
        if not call_foreign(lambda: self._same(shown, again)):
            raise EnvironmentFault("the environment answers the demonstration differently when it is played again")
        try:
            nothing = call_foreign(lambda: _play(environment, _NOTHING))
        except EnvironmentFault:
            nothing = None
        return _Rebuilt(environment, last.progress, shown, nothing)


def _as_near(at: _Rebuilt, tried: Observation) -> bool:
    """Whether the task is solved, or its progress rose at least as high as after the demonstration. What it was before
    the first action is not known, so an action there has to do better than the demonstration."""
    shown = at.shown.answer
    if tried.success:
        return True
    if tried.done and not shown.done:
        return False
    if tried.progress is None or shown.progress is None:
        return False
    before = shown.progress if at.progress is None else at.progress
    return tried.progress >= shown.progress and tried.progress > before


def _play(environment: Environment, action: Message) -> Effect:
    """What `action` does in a copy of the environment."""
    copy = environment.fork()
    answer = checked(copy.step(action))
    return Effect(answer, task_of(copy).state())


def _equal(one: Any, other: Any) -> bool:
    try:
        return call_foreign(lambda: bool(one == other))
    except EnvironmentFault as fault:
        raise EnvironmentFault(f"its states cannot be compared: {fault}") from fault


def _word_by_word(messages: Sequence[Message]) -> Said:
    return [(role, " ".join(text.split())) for role, text in said(messages)]
