"""Environments in worker processes: slow ones run in parallel, and one that hangs or dies does not affect the others.

A session stays with one worker, because most environments cannot be pickled mid-episode. A worker holds nothing that
is not recorded, so it may be killed at any time (see `pool`). Every worker has its own pipe and makes one call at a
time, so that a time limit is exact, and killing a worker affects only the call that it was making. (The queues of
`concurrent.futures` and `pebble` are shared under a lock that a killed worker never releases; measured: killing an
idle worker of a `pebble.ProcessPool` ends the pool.)
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
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from turntree.core.errors import ConfigError, InputError
from turntree.core.foreign import EnvironmentGone, reason_of
from turntree.core.messages import Message
from turntree.core.protocols import Environment
from turntree.env.pool import Answer, Session
from turntree.env.worker import Call, Rebuild, Reply, serve
from turntree.run.workers import without_interrupts

_START_SECONDS = 120.0  # for a worker to import what it and its environments need
_STOPPED_SECONDS = 5.0  # that a worker may be stopped (SIGSTOP) while it owes an answer
_PIPE_SECONDS = 10  # without progress on a message to or from a worker: it is stopped in the middle of it
_CLOSING_SECONDS = 5.0  # for idle workers to end by themselves, so that environments are closed
_LOOK_SECONDS = 1.0  # between two looks at workers that owe an answer


@dataclass(frozen=True, kw_only=True)
class ProcessPoolConfig:
    """Where tasks are stepped. This does not change results. In this process a call has no time limit."""

    workers: int = 4
    """Processes that step the tasks, replaced where they hang or die; 0 steps tasks in this process."""
    step_seconds: float = 60.0
    """Time limit of one environment call, and of each step of a rebuild."""

    def __post_init__(self) -> None:
        if self.workers < 0 or self.step_seconds <= 0:
            raise ConfigError(f"impossible pool {self}", hint="workers >= 0, step_seconds > 0")


class ProcessPool:
    """`EnvironmentPool` over worker processes (spawned; POSIX). Environments must be picklable before `reset`.

    Use it as a context manager, or `shut_down` it: its workers end, with whatever they started. A script that makes
    one needs the usual `if __name__ == "__main__":`.
    """

    waits = False

    def __init__(self, config: ProcessPoolConfig | None = None) -> None:
        self._config = config if config is not None else ProcessPoolConfig()
        if self._config.workers < 1:
            raise ConfigError("must be at least 1 for a pool of processes", field="workers")
        self._workers = [_Worker() for _ in range(self._config.workers)]
        self._seats: dict[Session, _Seat] = {}
        self._numbers = itertools.count()
        self._answers: list[Answer] = []
        self._unanswered = 0
        self.lost = 0  # workers that died or were killed for a time limit, each replaced

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.shut_down()

    def shut_down(self) -> None:
        """Idle workers have a moment to close their environments."""
        until = time.monotonic() + _CLOSING_SECONDS
        leaving = [worker for worker in self._workers if not worker.owes]
        for worker in leaving:
            worker.pipe.close()
        for worker in leaving:
            worker.wait_until_ended(until - time.monotonic())
        for worker in self._workers:
            worker.kill()

    # calls

    @property
    def in_flight(self) -> int:
        return self._unanswered

    def open(self, environment: Environment) -> Session:
        """Raises `InputError` for an environment that cannot be pickled."""
        return self._seat(Session(environment), _pickled(environment))

    def fork(self, session: Session, steps: int | None = None) -> Session:
        """By replay: the twin may then live in any worker."""
        seat = self._seats.get(session)
        return self._seat(session.twin(steps), seat.source if seat else _pickled(session.environment))

    def reset(self, session: Session) -> None:
        self._ask(_Pending(self._seats[session], None))

    def step(self, session: Session, action: Message) -> None:
        self._ask(_Pending(self._seats[session], action))

    def close(self, session: Session) -> int:
        seat = self._seats.pop(session)
        worker, pending = seat.worker, seat.pending
        worker.sessions -= 1
        seat.closed = True
        if seat.number in worker.held:
            worker.held.remove(seat.number)
            worker.forget.append(seat.number)
        if pending is None:
            return 0
        self._unanswered -= 1
        if pending is worker.current:
            return int(pending.action is not None)
        worker.queue.remove(pending)
        return 0

    def poll(self, timeout: float | None = None) -> list[Answer]:
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if until is None else max(0.0, until - time.monotonic())
            self._collect(0.0 if self._answers or not self._unanswered else left)
            self._enforce_limits()  # only now: what was answered in time may be collected late, by a busy caller
            if self._answers or not self._unanswered or left == 0.0:
                answers, self._answers = self._answers, []
                return answers

    def _seat(self, session: Session, source: bytes) -> Session:
        worker = min(self._workers, key=lambda worker: worker.sessions)
        worker.sessions += 1
        self._seats[session] = _Seat(session, source, next(self._numbers), worker)
        return session

    def _ask(self, pending: _Pending) -> None:
        self._unanswered += 1
        pending.seat.pending = pending
        pending.seat.worker.queue.append(pending)
        self._send_next(pending.seat.worker)

    # workers

    def _send_next(self, worker: _Worker) -> None:
        if worker.current is not None or not worker.ready or not worker.queue:
            return
        worker.current = pending = worker.queue.popleft()
        rebuild, session = None, pending.seat.session
        worker.limit = self._config.step_seconds
        if pending.seat.number not in worker.held:
            rebuild = Rebuild(pending.seat.source, session.actions, session.answers)
            worker.limit = _START_SECONDS
        call = Call(pending.seat.number, pending.action, rebuild, worker.forget)
        worker.since, worker.forget = time.monotonic(), []
        try:
            worker.pipe.send(call)
        except OSError:  # it died or was stopped since its last call: that call is not to blame
            worker.current = None
            worker.queue.appendleft(pending)
            self._replace(worker)

    def _collect(self, timeout: float | None) -> None:
        """Take in what workers sent, waiting until there is something, a time limit is reached or `timeout` is over."""
        limits = [w.since + w.limit - time.monotonic() for w in self._workers if w.owes]
        nearest = min((max(0.0, min(limit, _LOOK_SECONDS)) for limit in limits), default=None)
        patience = [seconds for seconds in (timeout, nearest) if seconds is not None]
        by_pipe = {worker.pipe: worker for worker in self._workers}
        for pipe in wait(list(by_pipe), min(patience, default=None)):
            worker = by_pipe[pipe]  # pyright: ignore[reportArgumentType]
            try:
                reply: Reply | None = worker.pipe.recv()
            except BaseException as error:  # closed, or cut off in the middle of a reply
                reason_of(error)
                self._lose(worker, f"the worker died{worker.how()}")
                continue
            if reply is None:
                worker.ready, worker.since, worker.limit = True, time.monotonic(), self._config.step_seconds
            else:
                self._take(worker, reply)
            self._send_next(worker)

    def _take(self, worker: _Worker, reply: Reply) -> None:
        pending, worker.current = worker.current, None
        assert pending is not None
        seat, session = pending.seat, pending.seat.session
        worker.held.discard(seat.number)
        if reply.observation is not None:
            (worker.forget.append if seat.closed else worker.held.add)(seat.number)
        if seat.closed:
            return
        if reply.gone:
            seat.pending, self._unanswered = None, self._unanswered - 1
            raise EnvironmentGone(reply.fault or "")
        if reply.observation is not None:
            session.answers.append(reply.observation)
            session.actions += [] if pending.action is None else [pending.action]
        self._answer(pending, reply)

    def _answer(self, pending: _Pending, reply: Reply) -> None:
        pending.seat.pending = None
        self._unanswered -= 1
        self._answers.append(
            Answer(
                session=pending.seat.session,
                observation=reply.observation,
                fault=reply.fault,
                calls=reply.calls,
                seconds=reply.seconds,
            )
        )

    def _enforce_limits(self) -> None:
        for worker in self._workers:
            if worker.owes and time.monotonic() - worker.since >= worker.limit:
                what = "the environment call" if worker.ready else "the start of a worker"
                self._lose(worker, f"{what} took longer than {worker.limit:g} seconds")
            elif worker.stopped_for() >= _STOPPED_SECONDS:
                self._lose(worker, f"the worker was stopped (SIGSTOP) for {_STOPPED_SECONDS:g} seconds")

    def _lose(self, worker: _Worker, why: str) -> None:
        """Remove a worker that died or must be killed; the call that it was making, or could not begin, is a fault."""
        pending, worker.current = worker.current, None
        if pending is None and not worker.ready and worker.queue:
            pending = worker.queue.popleft()
        if pending is not None and not pending.seat.closed:
            seconds, calls = time.monotonic() - worker.since, int(pending.action is not None)
            self._answer(pending, Reply(None, why, calls, seconds))
        self._replace(worker)

    def _replace(self, worker: _Worker) -> None:
        self.lost += 1
        worker.kill()
        worker.start()


@dataclass(eq=False)
class _Pending:
    """A call that is not answered: `action` None is `reset`."""

    seat: _Seat
    action: Message | None


@dataclass(eq=False)
class _Seat:
    """Where a session lives."""

    session: Session
    source: bytes  # its environment before `reset`, pickled
    number: int
    worker: _Worker
    pending: _Pending | None = None
    closed: bool = False


class _Worker:
    """One process after another. It makes one call at a time, `current`, since `since` and for at most `limit`."""

    def __init__(self) -> None:
        self.sessions = 0
        self.queue: deque[_Pending] = deque()
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        _bound(self.pipe)
        self._process = context.Process(target=serve, args=(theirs,), daemon=True)
        with without_interrupts():
            self._process.start()
        theirs.close()  # so that its death closes the pipe
        self._stopped_since: float | None = None
        self.ready, self.since, self.limit = False, time.monotonic(), _START_SECONDS
        self.current: _Pending | None = None
        self.held: set[int] = set()
        self.forget: list[int] = []

    @property
    def owes(self) -> bool:
        """It has not said yet that it is ready, or what a call is answered."""
        return self.current is not None or not self.ready

    def stopped_for(self) -> float:
        """For how many seconds it was seen stopped while it owes an answer; 0 where the system does not tell."""
        if not self.owes or not self._stopped():
            self._stopped_since = None
            return 0.0
        self._stopped_since = self._stopped_since or time.monotonic()
        return time.monotonic() - self._stopped_since

    def _stopped(self) -> bool:
        """By its state alone: the process is not waited for."""
        if self._process.pid is None or not hasattr(os, "waitid"):
            return False
        look = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        with contextlib.suppress(ChildProcessError):
            found = os.waitid(os.P_PID, self._process.pid, look)
            return found is not None and found.si_code == os.CLD_STOPPED
        return False

    def wait_until_ended(self, seconds: float) -> None:
        """Without asking for its exit code, so that its number still names its group in `kill`."""
        wait([self._process.sentinel], max(0.0, seconds))

    def kill(self) -> None:
        """With everything that its environments started."""
        assert self._process.pid is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self.pipe.close()

    def how(self) -> str:
        """How it died, in words."""
        self._process.join(timeout=1.0)
        early = "" if self.ready else " before it was ready (a script needs `if __name__ == '__main__':`)"
        return f"{early}, exit code {self._process.exitcode}"


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
