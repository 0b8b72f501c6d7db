"""Environments stepped in this process: at once, or in threads for those that wait for tools."""

from __future__ import annotations

import contextlib
import queue
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from turntree.core.foreign import EnvironmentFault, EnvironmentGone, call_foreign, reason_of
from turntree.core.messages import Message
from turntree.core.protocols import Environment
from turntree.env.pool import Answer, Session, checked, replay, start
from turntree.env.recorded import Recorded


class LocalPool:
    """Where environments are stepped, many at a time; here in this process, in its subclasses in workers.

    Laws of all (tests/contracts/test_environment_contract.py): every call of a session that is not closed is answered
    by `poll` exactly once; the answers of a session depend on its own actions only; a call that failed may be repeated,
    and the session then continues as if nothing had happened; a fault of one session does not affect another. A session
    has at most one unanswered call. An exception or exit of an environment becomes a fault.

    Without `threads` a call is made at once, and its answer waits for the next `poll`: for environments that answer in
    microseconds and can be trusted to return, because an endless loop blocks the process (`ProcessPool` does not).
    With `threads` a slow tool delays only its own session while the engine works: for environments whose calls return
    by themselves, as those of a `ToolRuntime` do, because a thread cannot be killed.
    """

    def __init__(self, threads: int = 0) -> None:
        self.concurrency = threads  # calls at once that wait for something other than a processor
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="environment") if threads else None
        self._held: dict[Session, Environment] = {}
        self._unanswered: dict[Session, tuple[int, Future[int]]] = {}  # steps, and when it is done: steps made
        self._answers: queue.SimpleQueue[tuple[Session, Answer] | EnvironmentGone] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shut_down()

    def shut_down(self) -> None:
        """Without waiting for calls that are under way. Every session is forgotten."""
        self._unanswered.clear()
        self._held.clear()
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    @property
    def in_flight(self) -> int:
        """Calls made and not yet answered (those of closed sessions do not count)."""
        return len(self._unanswered)

    def open(self, environment: Environment) -> Session:
        """A new episode of `environment`, which must not be used otherwise from now on. Computes nothing yet."""
        return Session(environment)

    def fork(self, session: Session) -> Session:
        """A second session that goes on from where `session` stands.

        Where the environment cannot be forked, the twin is rebuilt by replay at its first call, as in worker
        processes; what is wrong with that is then the fault of this call alone."""
        twin, held = session.twin(), self._held.get(session)
        if held is not None:
            with contextlib.suppress(EnvironmentFault):  # a replay would keep everybody waiting
                forked = call_foreign(held.copied if isinstance(held, Recorded) else held.fork)
                if forked is not None:
                    self._held[twin] = forked
        return twin

    def reset(self, session: Session) -> None:
        """Begin the episode; the answer is the task."""
        self._submit(session, None)

    def step(self, session: Session, action: Message) -> None:
        self._submit(session, action)

    def poll(self, timeout: float | None = None) -> dict[Session, Answer]:
        """The answers there are, waiting for at least one of them for up to `timeout` seconds (None: as long as it
        takes); empty when nothing is in flight. Raises `EnvironmentGone`."""
        until = None if timeout is None else time.monotonic() + timeout
        answers: dict[Session, Answer] = {}
        while self._unanswered and (not answers or not self._answers.empty()):
            left = None if until is None else max(0.0, until - time.monotonic())
            try:
                found = self._answers.get(timeout=left)
            except queue.Empty:
                break
            if isinstance(found, EnvironmentGone):
                raise found
            session, answer = found
            if self._unanswered.pop(session, None) is not None:  # else it was closed meanwhile
                answers[session] = answer
        return answers

    def close(self, session: Session) -> int:
        """Forget a session. Returns how many environment calls are given up with it: a running call cannot be
        cancelled and ends in its thread, and a step is counted whether it has begun or not."""
        steps, call = self._unanswered.pop(session, (0, None))
        if call is None:
            self._held.pop(session, None)
            return 0
        done = call.done()
        call.cancel()  # where no thread has begun it
        call.add_done_callback(lambda _: self._held.pop(session, None))  # now, where it is done
        return call.result() if done else steps

    def _submit(self, session: Session, action: Message | None) -> None:
        """Make a call, now or in a thread; `action` None is `reset`."""

        def work() -> int:
            try:
                answer = self._called(session, action)
            except EnvironmentGone as gone:
                self._answers.put(gone)
                return 0
            except BaseException as error:  # nobody would see it in this thread, and the call must be answered
                answer = Answer(fault=reason_of(error))
            if answer.observation is not None:
                session.answers.append(answer.observation)
                session.actions += [] if action is None else [action]
            self._answers.put((session, answer))
            return answer.calls

        made, steps = Future[int](), int(action is not None)
        self._unanswered[session] = steps, made
        if (thread := self._thread(session)) is not None:
            self._unanswered[session] = steps, thread.submit(work)
            return
        try:
            made.set_result(work())
        except BaseException:  # the user's interrupt
            del self._unanswered[session]
            raise

    def _thread(self, session: Session) -> ThreadPoolExecutor | None:
        """Where the calls of a session are made; None: at once."""
        return self._executor

    def _called(self, session: Session, action: Message | None) -> Answer:
        """The answer to one call."""
        started, calls = time.perf_counter(), 0
        environment = self._held.pop(session, None)
        try:
            if environment is None:
                environment = session.environment.fork()
                for turn in replay(environment, session.actions, session.answers):
                    calls = turn
            calls += action is not None
            observation = start(environment) if action is None else checked(environment.step(action))
        except BaseException as error:  # a bad rollout is data: the boundary to foreign code
            return Answer(fault=reason_of(error), calls=calls, seconds=time.perf_counter() - started)
        self._held[session] = environment
        return Answer(observation=observation, calls=calls, seconds=time.perf_counter() - started)
