"""The worker pool of one command, and the units of work that it is given.

A *unit* is what is atomic: a group of an iteration, a wave of candidates. It is a value, and its result depends on it
alone, so a unit whose worker died is given to another one and comes back the same. The laws (tests/rollout):

- every unit that is submitted ends exactly once: with its result, with the error that the code raised, or as lost
  (`UnitLost`) after `attempts` workers were lost over it. What a worker given up sends later is not read.
- a worker is replaced when it dies, alone or with its node (which Ray finds out), or takes longer than `unit_seconds`.
- nothing waits for ever: where no worker starts within `start_seconds`, every unit ends with an error that says so.

Every worker has a thread of the driver, which starts it and gives it units from the queue that all share, so that
workers go on while the command trains.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import sys
import threading
import time
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

from turntree.core.errors import ConfigError, InputError, TurntreeError, first_line
from turntree.core.foreign import package
from turntree.core.progress import notice
from turntree.rollout.cluster.config import WorkersConfig
from turntree.rollout.cluster.worker import Reply, Worker

_POLL_SECONDS = 0.5  # between two looks at the clock
_FETCH_SECONDS = 60.0  # for a result that is ready to come here

Unit = dict[str, Any]


class UnitLost(TurntreeError):
    """A unit that several workers were lost over, one after the other."""


class _WorkerLost(Exception):
    """Why."""


@dataclass(order=True)
class _Job:
    place: tuple[int, int]  # in the queue
    unit: Unit = field(compare=False)
    future: Future[Any] = field(compare=False, default_factory=Future[Any])
    deaths: int = field(compare=False, default=0)  # of workers over it


class WorkerPool:
    """`config.workers` workers that build `factory(settings)` (`worker.Worker`). Use it as a context manager."""

    def __init__(self, factory: str, settings: dict[str, Any], config: WorkersConfig, *, gpus: float = 0.0) -> None:
        self.config, self._gpus = config, gpus
        self._factory, self._settings = factory, settings
        self._lock, self._numbers = threading.Lock(), itertools.count()
        self._queue: queue.PriorityQueue[_Job] = queue.PriorityQueue()
        self._open: set[Future[Any]] = set()  # of units that have not ended
        self._broken: TurntreeError | None = None
        self._failed_starts = 0
        self.living: dict[Any, str] = {}  # workers that have started, with their nodes
        self.lost = 0  # workers that died or were given up, each replaced

    def __enter__(self) -> WorkerPool:
        self._ray = package("ray", "ray", "cluster")
        self._ours = _connect(self._ray, self.config)
        self._alone_since = time.monotonic()  # since when no worker lives
        settings: dict[str, Any] = {"target": self._serve, "name": "turntree worker", "daemon": True}
        self._threads = [threading.Thread(**settings) for _ in range(self.config.workers)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._fail(TurntreeError("the workers were dismissed"))
        for thread in self._threads:
            thread.join()
        if self._ours:
            self._ray.shutdown()

    def submit(self, unit: Unit, *, urgent: bool = False) -> Future[Any]:
        """Queue a unit: first in, first out, but `urgent` ones before all others. Raises what ended the pool."""
        job = _Job((0 if urgent else 1, next(self._numbers)), unit)
        with self._lock:
            if self._broken is not None:
                raise self._broken
            self._open.add(job.future)
        self._queue.put(job)
        return job.future

    def share(self, value: Any) -> Any:
        """A reference to put into units for a large value that many of them need; it is sent to a node once."""
        return self._ray.put(value)

    # the thread of a worker

    def _serve(self) -> None:
        worker: Any = None
        try:
            while self._broken is None:
                if worker is None:
                    worker = self._started()
                    continue
                with contextlib.suppress(queue.Empty):
                    job = self._queue.get(timeout=_POLL_SECONDS)
                    if job.deaths == 0 and not job.future.set_running_or_notify_cancel():
                        continue
                    try:
                        self._end(job, self._reply(worker.play.remote(job.unit), self.config.unit_seconds))
                    except _WorkerLost as lost:
                        notice(f"a rollout worker is lost ({lost}); its work is given to another one")
                        self._lose(worker)
                        worker = None
                        self._again(job, str(lost))
        except BaseException as error:  # the command waits for its units: it must learn of this
            self._fail(error if isinstance(error, TurntreeError) else TurntreeError(f"the cluster is lost: {error}"))
        finally:
            self._kill(worker)

    def _started(self) -> Any:
        """A new worker; None where it died. Raises what ended the pool, and where none starts."""
        placed: dict[str, Any] = {"num_cpus": self.config.cpus, "num_gpus": self._gpus, "scheduling_strategy": "SPREAD"}
        worker = self._ray.remote(**placed)(Worker).remote(self._factory, self._settings, _places(self._ray))
        try:
            reply = self._reply(worker.start.remote(), None)
            if "error" in reply:
                raise reply["error"]
        except _WorkerLost as lost:
            notice(f"a rollout worker is lost ({lost}); it had no work")
            self._failed_starts += 1
            if self._failed_starts > self.config.attempts * self.config.workers:
                problem = f"{self._failed_starts} workers died while they started; the last: {lost}"
                raise TurntreeError(problem) from lost
            self._lose(worker)
            return None
        except BaseException:
            self._kill(worker)
            raise
        self.living[worker], self._failed_starts = reply["result"], 0
        return worker

    def _reply(self, waiting: Any, seconds: float | None) -> Reply:
        """What a worker replies within `seconds` (None: that it has started). Raises `_WorkerLost`, what ended the
        pool, and where no worker lives and none has started for too long."""
        begun = time.monotonic()
        while not self._ray.wait([waiting], timeout=_POLL_SECONDS)[0]:
            now = time.monotonic()
            self._alone_since = now if self.living else self._alone_since
            if self._broken is not None:
                raise self._broken
            if seconds is not None and now - begun > seconds:
                raise _WorkerLost(f"longer than {seconds:g} s over one unit")
            if now - self._alone_since > self.config.start_seconds:
                raise self._no_room()
        try:
            return self._ray.get(waiting, timeout=_FETCH_SECONDS)
        except self._ray.exceptions.RayTaskError as error:  # its result could not be sent
            return {"error": TurntreeError(f"a worker failed: {first_line(error)}")}
        except self._ray.exceptions.RayError as error:
            raise _WorkerLost(first_line(error)) from error

    def _no_room(self) -> ConfigError:
        has, config = self._ray.available_resources(), self.config
        wants = f"{config.cpus:g} CPU" + (f" and {self._gpus:g} GPU" if self._gpus else "")
        free = f"{has.get('CPU', 0):g} CPU and {has.get('GPU', 0):g} GPU"
        problem = f"no worker started in {config.start_seconds:g} s: one needs {wants}, and the cluster has {free} free"
        return ConfigError(problem, field="cluster", hint="see `ray status`")

    def _lose(self, worker: Any) -> None:
        self.living.pop(worker, None)
        with self._lock:
            self.lost += 1
        self._kill(worker)

    def _again(self, job: _Job, why: str) -> None:
        """Give the unit to the next worker, before all others: it is the oldest."""
        job.deaths += 1
        if job.deaths < self.config.attempts:
            job.place = (-1, next(self._numbers))
            self._queue.put(job)
            return
        self._end(job, {"error": UnitLost(f"{job.deaths} workers were lost over one unit of work; the last: {why}")})

    def _end(self, job: _Job, reply: Reply) -> None:
        with self._lock:
            if job.future not in self._open:
                return
            self._open.remove(job.future)
        if "error" in reply:
            job.future.set_exception(reply["error"])
        else:
            job.future.set_result(reply["result"])

    def _kill(self, worker: Any) -> None:
        if worker is not None:
            with contextlib.suppress(Exception):
                self._ray.kill(worker)

    def _fail(self, error: TurntreeError) -> None:
        """Nothing more is played: every unit ends with `error`."""
        with self._lock:
            self._broken = self._broken or error
            ended, self._open = self._open, set()
        for future in ended:
            with contextlib.suppress(InvalidStateError):  # the command has cancelled it
                future.set_exception(error)


def _connect(ray: Any, config: WorkersConfig) -> bool:
    """Connect this process to the cluster; whether it was not before."""
    if ray.is_initialized():
        return False
    address = config.address or "local"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning"}
    try:
        if address == "local":
            most = max(os.cpu_count() or 1, round(config.workers * config.cpus + 0.5))
            ray.init(address="local", num_cpus=most, include_dashboard=False, **quiet)
        else:
            ray.init(address=address, **quiet)
    except (ConnectionError, ValueError, RuntimeError, ImportError, TimeoutError) as error:
        hint = "start one with `ray start --head`, or use --cluster local"
        raise InputError(f"{address!r}: {first_line(error)}", field="cluster.address", hint=hint) from error
    return True


def _places(ray: Any) -> list[str]:
    """The folder of the command and its module path, for workers that see the same files; nothing where Ray brings a
    folder of its own."""
    brought = ray.get_runtime_context().runtime_env.get("working_dir")
    return [] if brought else [os.getcwd(), *(place for place in sys.path if place)]
