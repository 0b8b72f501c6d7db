"""Environments in worker processes: slow ones run in parallel, and one that hangs or dies does not affect the others.

A session stays with one worker, because most environments cannot be pickled mid-episode. A worker holds nothing that
is not recorded, so it may be killed at any time (see `pool`). A thread speaks to each worker through a pipe of its own,
one call at a time, so that a time limit is exact, and killing a worker affects only the call that it was making. (The
queues of `concurrent.futures` and `pebble` are shared under a lock that a killed worker never releases; measured:
killing an idle worker of a `pebble.ProcessPool` ends the pool.)
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from turntree.core.config import Above0, Bounded, Count
from turntree.core.errors import ConfigError, InputError
from turntree.core.foreign import EnvironmentGone, reason_of
from turntree.core.messages import Message
from turntree.core.protocols import Environment
from turntree.env.local import LocalPool
from turntree.env.pool import Answer, Session
from turntree.env.worker import Call, serve
from turntree.run.workers import without_interrupts

_START_SECONDS = 120.0  # for a worker to import what it and its environments need
_PIPE_SECONDS = 10  # without progress on a message to or from a worker: it is stopped in the middle of it
_CLOSING_SECONDS = 5.0  # for idle workers to end by themselves, so that environments are closed


@dataclass(frozen=True, kw_only=True)
class ProcessPoolConfig(Bounded):
    """Where tasks are stepped. This does not change results. In this process a call has no time limit."""

    workers: Count = 4
    """Processes that step the tasks, replaced where they hang or die; 0 steps tasks in this process."""
    step_seconds: Above0 = 60.0
    """Time limit of one environment call, and of each step of a rebuild."""


class ProcessPool(LocalPool):
    """`LocalPool` over worker processes (spawned; POSIX). Environments must be picklable before `reset`.

    Use it as a context manager, or `shut_down` it: its workers end, with whatever they started. A script that makes
    one needs the usual `if __name__ == "__main__":`.
    """

    def __init__(self, config: ProcessPoolConfig | None = None) -> None:
        super().__init__()
        config = config if config is not None else ProcessPoolConfig()
        if config.workers < 1:
            raise ConfigError("must be at least 1 for a pool of processes", field="workers")
        self._workers = [_Worker(config.step_seconds) for _ in range(config.workers)]
        self._seats: dict[Session, _Seat] = {}
        self._numbers = itertools.count()

    @property
    def lost(self) -> int:
        """Workers that died or were killed for a time limit, each replaced."""
        return sum(worker.lost for worker in self._workers)

    def shut_down(self) -> None:
        """Idle workers have a moment to close their environments. Threads start nothing here: this also runs while the
        interpreter ends, when they no longer can."""
        for _, call in self._unanswered.values():
            call.cancel()
        super().shut_down()
        for worker in self._workers:
            if worker.busy:
                worker.kill()
        for worker in self._workers:
            worker.thread.shutdown()
            worker.ask_to_stop()
        for worker in self._workers:
            worker.stop()

    def open(self, environment: Environment) -> Session:
        """Raises `InputError` for an environment that cannot be pickled."""
        return self._seat(Session(environment), _pickled(environment))

    def fork(self, session: Session) -> Session:
        """By replay: the twin may then live in any worker."""
        seat = self._seats.get(session)
        return self._seat(session.twin(), seat.source if seat else _pickled(session.environment))

    def close(self, session: Session) -> int:
        seat = self._seats.pop(session)
        seat.worker.sessions -= 1
        seat.worker.forget.append(seat.number)
        return super().close(session)

    def _seat(self, session: Session, source: bytes) -> Session:
        worker = min(self._workers, key=lambda worker: worker.sessions)
        worker.sessions += 1
        self._seats[session] = _Seat(source, next(self._numbers), worker)
        return session

    def _thread(self, session: Session) -> ThreadPoolExecutor:
        return self._seats[session].worker.thread

    def _called(self, session: Session, action: Message | None) -> Answer:
        if (seat := self._seats.get(session)) is None:  # closed before the call began
            return Answer(fault="the session is closed")
        return seat.worker.ask(seat, session, action)


@dataclass(frozen=True, eq=False)
class _Seat:
    """Where a session lives."""

    source: bytes  # its environment before `reset`, pickled
    number: int
    worker: _Worker


class _Lost(Exception):
    """A worker died or must be killed; the text says why."""


class _Worker:
    """A thread, and the process that it asks, which is started for the first call and for the next after it was lost.
    `sessions`, `forget`, `kill` are for the pool's thread, all else for its own."""

    def __init__(self, step_seconds: float) -> None:
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="environment")
        self.sessions = self.lost = 0
        self.forget: deque[int] = deque()  # the numbers of closed sessions
        self.busy = False
        self._step_seconds = step_seconds
        self._process: BaseProcess | None = None
        self._held: set[int] = set()  # the numbers of the sessions that the process holds

    def ask(self, seat: _Seat, session: Session, action: Message | None) -> Answer:
        """The answer to one call; a worker that is lost over it is a fault of this call. Raises `EnvironmentGone`."""
        self.busy, started = True, time.monotonic()
        try:
            rebuilds = self._send(seat, session, action)
            limit = _START_SECONDS if rebuilds else self._step_seconds
            while (answer := self._receive(limit, "the environment call")) is None:  # a step of the rebuild begins
                limit = self._step_seconds
            if isinstance(answer, EnvironmentGone):
                raise answer
            if answer.observation is not None:
                self._held.add(seat.number)
            return answer
        except _Lost as lost:
            self._end()
            return Answer(fault=str(lost), calls=int(action is not None), seconds=time.monotonic() - started)
        finally:
            self.busy = False

    def ask_to_stop(self) -> None:
        """The process ends once nobody is at the other end of its pipe."""
        if self._process is not None:
            self._pipe.close()

    def stop(self) -> None:
        """Wait until the process that was asked to has ended, its environments closed; kill it where it does not."""
        if self._process is not None:
            wait([self._process.sentinel], _CLOSING_SECONDS)
            self.kill()
            self._process.join()

    def kill(self) -> None:
        """With everything that its environments started."""
        if self._process is not None and self._process.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()

    def _send(self, seat: _Seat, session: Session, action: Message | None) -> bool:
        """Send the call; whether the session must be rebuilt for it. A worker that died or was stopped since its last
        call is replaced first: no call is to blame."""
        for _ in range(2):
            if self._process is None:
                self._start()
            forget = [self.forget.popleft() for _ in range(len(self.forget))]
            self._held.difference_update(forget)
            call = Call(seat.number, action, forget)
            if seat.number not in self._held:
                call = replace(call, source=seat.source, actions=session.actions, answers=session.answers)
            self._held.discard(seat.number)  # until it is answered
            try:
                self._pipe.send(call)
                return call.source is not None
            except OSError:
                self._end()
        raise _Lost("the worker died before it took the call")

    def _receive(self, limit: float, what: str) -> Answer | EnvironmentGone | None:
        try:
            if not self._pipe.poll(limit):
                raise _Lost(f"{what} took longer than {limit:g} seconds")
            return self._pipe.recv()
        except _Lost:
            raise
        except BaseException as error:  # closed, or cut off in the middle of a reply
            reason_of(error)
            assert self._process is not None
            self._process.join(timeout=1.0)
            raise _Lost(f"the worker died, exit code {self._process.exitcode}") from error

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        _bound(self._pipe)
        process = context.Process(target=serve, args=(theirs,), daemon=True)
        with without_interrupts():
            process.start()
        theirs.close()  # so that its death closes the pipe
        self._process = process
        try:
            self._receive(_START_SECONDS, "the start of a worker")
        except _Lost as lost:
            raise _Lost(f"{lost}, before it was ready (a script needs `if __name__ == '__main__':`)") from lost

    def _end(self) -> None:
        """What is left of a process that is lost."""
        self.lost += 1
        self.kill()
        if self._process is not None:
            self._process.join()
        self._pipe.close()
        self._process = None
        self._held.clear()


def _bound(pipe: Connection) -> None:
    """Send and receive without blocking: a worker may be stopped in the middle of a message."""
    seconds = struct.pack("ll", _PIPE_SECONDS, 0)
    with socket.socket(fileno=os.dup(pipe.fileno())) as ours:
        for direction in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, direction, seconds)


def _pickled(environment: Environment) -> bytes:
    try:
        return pickle.dumps(environment)
    except BaseException as error:
        raise InputError(
            f"the environment of {environment.task_id!r} cannot be sent to a worker ({reason_of(error)})",
            hint="make it picklable before reset, or step it in this process (LocalPool)",
        ) from error
