"""Environments that keep what they were asked and answered, so that a fork can be a replay on a fresh copy."""

from __future__ import annotations

import copy
import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any, Self

from turntree.core.foreign import EnvironmentFault, reason_of
from turntree.core.messages import Message
from turntree.core.progress import notice
from turntree.core.protocols import Observation, Task
from turntree.env.loop import LOOP, run, start
from turntree.env.pool import replay

_CLOSING_SECONDS = 10.0  # for an asynchronous `close`


class Recorded(Task):
    """Base of environments that make something for each episode, and let it play: `_held` (None before `reset`).

    A subclass gives `_begin` (which makes it and tells the task) and `_do` (an action). A fork is what `_copied` gives;
    otherwise the episode is replayed on another start of the same task, and refused with an `EnvironmentFault` where
    that answers differently.

    `close()` of what is held, where it has one, is called once, when nobody holds the episode any more: the pool forgot
    it, a call failed, or the pool or the program ends. Every fork closes its own. A worker process that is killed (a
    time limit) closes nothing, but what it started dies with it.
    """

    _held: Any = None
    _closing: Callable[[], Any] | None = None

    def __init__(self) -> None:
        self._actions: list[Message] = []
        self._answers: list[Observation] = []

    def _begin(self) -> tuple[Message, ...]:
        raise NotImplementedError

    def _do(self, action: Message) -> Observation:
        raise NotImplementedError

    def _copied(self) -> Any:
        """A copy of what is held, as it stands; None where there is none."""
        return None

    def reset(self) -> tuple[Message, ...]:
        opening = self._begin()
        self._actions, self._answers = [], [Observation(opening, done=False)]
        return opening

    def step(self, action: Message) -> Observation:
        if self._held is None:
            raise EnvironmentFault("step before reset")
        observation = self._do(action)
        self._actions.append(action)
        self._answers.append(observation)
        return observation

    def fork(self) -> Self:
        if (copied := self.copied()) is not None:
            return copied
        twin: Any = self._twin()
        for _ in replay(twin, self._actions, self._answers):
            pass
        return twin

    def copied(self) -> Self | None:
        """A fork without a replay; None where there is none."""
        held = None if self._held is None else self._copied()
        if held is None:
            return None
        twin = self._twin()
        twin._hold(held)
        twin._actions, twin._answers = list(self._actions), list(self._answers)
        return twin

    def _twin(self) -> Self:
        twin = copy.copy(self)
        twin._held = twin._closing = None
        twin._actions, twin._answers = [], []
        return twin

    def _hold(self, held: Any) -> None:
        """What plays from now on, in place of the last, which is closed."""
        if self._closing is not None:
            self._closing()
        close = getattr(held, "close", None)
        self._held, self._closing = held, weakref.finalize(self, _closed, close) if callable(close) else None


def _closed(close: Callable[[], Any]) -> None:
    """Also an asynchronous `close`. The garbage collector may call this in any thread, the loop's own included."""
    try:
        under_way = close()
        if inspect.iscoroutine(under_way):
            run(under_way, _CLOSING_SECONDS) if threading.current_thread().name != LOOP else start(under_way)
    except BaseException as error:  # nothing depends on it any more
        notice(f"warning: an environment was not closed ({reason_of(error)})")
