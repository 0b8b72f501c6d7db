"""Environments stepped in threads: for those that wait for tools, and share one `ToolRuntime`."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from turntree.core.foreign import EnvironmentGone, reason_of
from turntree.core.messages import Message
from turntree.core.protocols import Environment
from turntree.environments.inline import InlinePool
from turntree.environments.pool import Answer, Session


class ThreadPool:
    """`EnvironmentPool` whose calls run in `threads` threads of this process, so that a slow tool delays only its own
    session while the engine works.

    For environments whose calls return by themselves, as those of a `ToolRuntime` do: a thread cannot be killed.
    """

    waits = True

    def __init__(self, threads: int = 64) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="environment")
        self._homes: dict[Session, InlinePool] = {}  # each session alone, so that threads share nothing
        self._calls: dict[Session, int] = {}  # unanswered: how many steps are made for it (0: a `reset`)
        self._answers: queue.SimpleQueue[Answer | EnvironmentGone] = queue.SimpleQueue()

    def __enter__(self) -> ThreadPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.shut_down()

    def shut_down(self) -> None:
        """Without waiting for calls that are under way. Every session is forgotten."""
        self._homes.clear()
        self._executor.shutdown(wait=False, cancel_futures=True)

    @property
    def in_flight(self) -> int:
        return len(self._calls)

    def open(self, environment: Environment) -> Session:
        return self._home(Session(environment))

    def fork(self, session: Session, steps: int | None = None) -> Session:
        home, old = InlinePool(), self._homes.get(session, InlinePool())
        twin = old.fork(session, steps, into=home)
        self._homes[twin] = home
        return twin

    def reset(self, session: Session) -> None:
        self._submit(session, lambda home: home.reset(session), steps=0)

    def step(self, session: Session, action: Message) -> None:
        self._submit(session, lambda home: home.step(session, action), steps=1)

    def poll(self, timeout: float | None = None) -> list[Answer]:
        until = None if timeout is None else time.monotonic() + timeout
        found: list[Answer] = []
        while self._calls and (not found or not self._answers.empty()):
            left = None if until is None else max(0.0, until - time.monotonic())
            try:
                answer = self._answers.get(timeout=left)
            except queue.Empty:
                break
            if isinstance(answer, EnvironmentGone):
                raise answer
            if self._calls.pop(answer.session, None) is not None:  # else it was closed meanwhile
                found.append(answer)
        return found

    def close(self, session: Session) -> int:
        self._homes.pop(session, None)
        return self._calls.pop(session, 0)  # a running call cannot be cancelled: it ends in its thread and is counted

    def _home(self, session: Session) -> Session:
        self._homes[session] = InlinePool()
        return session

    def _submit(self, session: Session, ask: Callable[[InlinePool], None], steps: int) -> None:
        home = self._homes[session]

        def work() -> None:
            try:
                ask(home)
                answers: list[Answer | EnvironmentGone] = [*home.poll()]
            except EnvironmentGone as gone:
                answers = [gone]
            except BaseException as error:  # nobody would see it in this thread, and the call must be answered
                answers = [Answer(session=session, fault=reason_of(error), calls=steps)]
            for answer in answers:
                self._answers.put(answer)

        self._calls[session] = steps
        self._executor.submit(work)
