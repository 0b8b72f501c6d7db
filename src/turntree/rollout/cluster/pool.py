"""The worker pool of one command, and the units of work that it is given.

A *unit* is what is atomic: a group of an iteration, a wave of candidates. It is a value, and its result depends on it
alone, so a unit whose worker died is given to another one and comes back the same. The laws (tests/rollout):

- every unit that is submitted ends exactly once: with its result, with the error that the code raised, or as lost
  (`UnitLost`) after `attempts` workers died or fell silent over it. What a worker given up sends later is not read.
- a worker is replaced when it dies, does not answer for `silent_seconds`, or takes longer than `unit_seconds`.
- nothing waits for ever: where no worker starts within `start_seconds`, every unit ends with an error that says so.

A thread of the driver hands out the units, so that workers go on while the command trains.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from turntree.core.errors import ConfigError, InputError, TurntreeError
from turntree.core.progress import notice
from turntree.rollout.cluster.config import WorkersConfig
from turntree.rollout.cluster.worker import Reply, Worker, end_process

_PULSE_SECONDS = 2.0  # between two signs of life of a worker
_POLL_SECONDS = 0.5  # the longest that the thread waits for news before it looks at the clock
_GAP_SECONDS = 10.0  # between two such looks, above which the silence of others proves nothing
_FETCH_SECONDS = 60.0  # for a result that is ready to come here

Unit = dict[str, Any]


class UnitLost(TurntreeError):
    """A unit that several workers died over, one after the other."""


@dataclass(eq=False)
class _Job:
    unit: Unit
    future: Future[Any]
    urgent: bool
    deaths: list[str] = field(default_factory=list[str])  # why workers were lost over it


@dataclass(eq=False)
class _Handle:
    """A worker, and the calls that it owes an answer."""

    actor: Any
    starting: Any  # the reference of `start`, None once it has started
    pulse: Any = None
    heard: float = 0.0
    job: _Job | None = None
    playing: Any = None
    since: float = 0.0
    process: tuple[str, int] | None = None  # its node and process id, once it has started

    def waits_for(self) -> list[Any]:
        return [ref for ref in (self.starting, self.pulse, self.playing) if ref is not None]


class WorkerPool:
    """`config.workers` workers that build `factory(settings)` (`worker.Worker`). Use it as a context manager."""

    def __init__(self, factory: str, settings: dict[str, Any], config: WorkersConfig, *, gpus: float = 0.0) -> None:
        self.config = config
        self._factory, self._settings = factory, settings
        self._gpus = gpus if config.gpus is None else config.gpus
        self._lock = threading.RLock()
        self._queue: deque[_Job] = deque()
        self._workers: list[_Handle] = []
        self._broken: TurntreeError | None = None
        self._failed_starts = 0
        self._closing = False
        self.lost = 0  # workers that died or were given up, each replaced

    def __enter__(self) -> WorkerPool:
        self._ray = _ray()
        self._ours = _connect(self._ray, self.config)
        self._kind = self._ray.remote(concurrency_groups={"pulse": 1})(Worker)
        self._idle_since = self._looked = time.monotonic()  # since when no worker has started
        self._thread = threading.Thread(target=self._serve, name="turntree worker pool", daemon=True)
        self._start_missing()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        self._thread.join()
        for worker in self._workers:
            self._kill(worker)
        self._fail(TurntreeError("the workers were dismissed"))
        if self._ours:
            self._ray.shutdown()

    def submit(self, unit: Unit, *, urgent: bool = False) -> Future[Any]:
        """Queue a unit: first in, first out, but `urgent` ones before all others. Raises what ended the pool."""
        job = _Job(unit, Future(), urgent)
        with self._lock:
            if self._broken is not None:
                raise self._broken
            place = sum(each.urgent for each in self._queue) if urgent else len(self._queue)
            self._queue.insert(place, job)
            self._assign()
        return job.future

    def share(self, value: Any) -> Any:
        """A reference to put into units for a large value that many of them need; it is sent to a node once."""
        return self._ray.put(value)

    # the thread

    def _serve(self) -> None:
        try:
            while not self._closing:
                with self._lock:
                    waiting = [ref for worker in self._workers for ref in worker.waits_for()]
                ready: set[Any] = set()
                if waiting:
                    self._ray.wait(waiting, num_returns=1, timeout=_POLL_SECONDS)
                    ready = set(self._ray.wait(waiting, num_returns=len(waiting), timeout=0)[0])
                else:
                    time.sleep(_POLL_SECONDS)
                with self._lock:
                    for worker in [*self._workers]:
                        self._receive(worker, ready)
                    self._check_clock()
                    self._start_missing()
                    self._assign()
        except BaseException as error:  # the command waits for its units: it must learn of this
            self._fail(error if isinstance(error, TurntreeError) else TurntreeError(f"the cluster is lost: {error}"))

    def _receive(self, worker: _Handle, ready: set[Any]) -> None:
        """Process what a worker replies, or that it cannot speak any more."""
        replies: dict[str, Any] = {}
        try:
            for name in ("starting", "pulse", "playing"):
                ref = getattr(worker, name)
                if ref is not None and ref in ready:
                    replies[name] = self._ray.get(ref, timeout=_FETCH_SECONDS)
        except self._ray.exceptions.RayError as error:
            unsent = isinstance(error, self._ray.exceptions.RayTaskError) and worker.starting is None
            if not unsent:
                return self._replace(worker, _first_line(error))
            replies["playing"] = {"error": TurntreeError(f"a worker failed: {_first_line(error)}")}
        if replies:
            worker.heard = time.monotonic()
        if "starting" in replies:
            self._started(worker, replies["starting"])
        if "pulse" in replies:
            self._ask_pulse(worker)
        if "playing" in replies:
            self._end(worker, replies["playing"])

    def _started(self, worker: _Handle, reply: Reply) -> None:
        if "error" in reply:
            return self._fail(reply["error"])
        worker.starting, self._failed_starts = None, 0
        worker.process = reply["result"]
        self._idle_since = time.monotonic()
        self._ask_pulse(worker)

    def _ask_pulse(self, worker: _Handle) -> None:
        worker.pulse = worker.actor.pulse.options(concurrency_group="pulse").remote(_PULSE_SECONDS)

    def _end(self, worker: _Handle, reply: Reply) -> None:
        job, worker.job, worker.playing = worker.job, None, None
        if job is None:
            return
        if "error" in reply:
            job.future.set_exception(reply["error"])
        else:
            job.future.set_result(reply["result"])

    def _replace(self, worker: _Handle, why: str, *, stuck: bool = False) -> None:
        """Give up a worker and give its unit to the next one."""
        self._kill(worker, stuck=stuck)
        self._workers.remove(worker)
        self.lost += 1
        if worker.starting is not None:
            self._failed_starts += 1
        job = worker.job
        notice(f"a rollout worker is lost ({why}); {'its work is given to another one' if job else 'it had no work'}")
        if self._failed_starts > self.config.attempts * self.config.workers:
            return self._fail(TurntreeError(f"{self._failed_starts} workers died while they started; the last: {why}"))
        if job is None:
            return
        job.deaths.append(why)
        if len(job.deaths) < self.config.attempts:
            job.urgent = True  # it is the oldest
            self._queue.appendleft(job)
            return
        job.future.set_exception(
            UnitLost(f"{len(job.deaths)} workers were lost over one unit of work; the last: {why}")
        )

    def _kill(self, worker: _Handle, *, stuck: bool = False) -> None:
        """Kill a worker. Ray asks it to end, which a `stuck` one may not hear: its CPUs would stay taken."""
        with contextlib.suppress(Exception):
            self._ray.kill(worker.actor)
            if stuck and worker.process is not None:
                node, pid = worker.process
                near = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
                kill = self._ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=near)(end_process)
                kill.remote(pid)

    def _check_clock(self) -> None:
        now, config = time.monotonic(), self.config
        if now - self._looked > _GAP_SECONDS:  # this process was stopped or busy: it may not have heard
            for worker in self._workers:
                worker.heard = now
        self._looked = now
        for worker in [*self._workers]:
            if worker.starting is None and now - worker.heard > config.silent_seconds:
                self._replace(worker, f"silent for {config.silent_seconds:g} s", stuck=True)
            elif worker.job is not None and now - worker.since > config.unit_seconds:
                self._replace(worker, f"longer than {config.unit_seconds:g} s over one unit", stuck=True)
        if any(worker.starting is None for worker in self._workers):
            self._idle_since = now
        elif now - self._idle_since > config.start_seconds:
            has = self._ray.available_resources()
            wants = f"{config.cpus:g} CPU" + (f" and {self._gpus:g} GPU" if self._gpus else "")
            free = f"{has.get('CPU', 0):g} CPU and {has.get('GPU', 0):g} GPU"
            problem = f"no worker started in {config.start_seconds:g} s: one needs {wants}, and the cluster has {free}"
            self._fail(ConfigError(f"{problem} free", field="cluster", hint="see `ray status`"))

    def _start_missing(self) -> None:
        wanted = 0 if self._broken else self.config.workers
        while len(self._workers) < wanted:
            asked = self._kind.options(num_cpus=self.config.cpus, num_gpus=self._gpus, scheduling_strategy="SPREAD")
            actor = asked.remote(self._factory, self._settings, _places(self._ray))
            self._workers.append(_Handle(actor, actor.start.remote()))

    def _assign(self) -> None:
        for worker in self._workers:
            if worker.starting is None and worker.job is None:
                job = self._next()
                if job is None:
                    return
                worker.job, worker.since = job, time.monotonic()
                worker.playing = worker.actor.play.remote(job.unit)

    def _next(self) -> _Job | None:
        """The next unit that is still wanted."""
        while self._queue:
            job = self._queue.popleft()
            if job.deaths or job.future.set_running_or_notify_cancel():
                return job
        return None

    def _fail(self, error: TurntreeError) -> None:
        """Nothing more is played: every unit ends with `error`."""
        with self._lock:
            self._broken = self._broken or error
            jobs = [*self._queue, *(worker.job for worker in self._workers if worker.job)]
            self._queue.clear()
            for job in jobs:
                if not job.future.done():
                    job.future.set_exception(error)
            for worker in self._workers:
                worker.job = None


def _ray() -> Any:
    try:
        import ray
        import ray.exceptions
        import ray.util.scheduling_strategies
    except ModuleNotFoundError as error:
        hint = "pip install 'turntree[ray]', or leave cluster.workers at 0"
        raise InputError("rollout workers need Ray, which is not installed", field="cluster", hint=hint) from error
    return ray


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
        raise InputError(f"{address!r}: {_first_line(error)}", field="cluster.address", hint=hint) from error
    return True


def _places(ray: Any) -> list[str]:
    """The folder of the command and its module path, for workers that see the same files; nothing where Ray brings a
    folder of its own."""
    brought = ray.get_runtime_context().runtime_env.get("working_dir")
    return [] if brought else [os.getcwd(), *(place for place in sys.path if place)]


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
