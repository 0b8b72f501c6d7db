"""The processes of a run: ranks that this process starts on its machine, or that a launcher started before.

A launcher (torchrun, Ray Train, a batch system) is known by its environment only: RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR and MASTER_PORT, as torch defines them; every rank then runs the same command. Without one, this process is
rank 0 and starts the others, which end when it does, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import PrefixStore, Store

from turntree.core.errors import ConfigError, TurntreeError
from turntree.training.sharded import Alone, Ranks
from turntree.training.trainer import follow

_START = timedelta(minutes=5)  # for all ranks to be there
_WAIT = timedelta(minutes=30)  # of a rank for the others, within an update
_LOOK = 0.2  # seconds between two looks at the other ranks
_BREAK = 2.0  # seconds from a collective that breaks off to the end of the rank that broke it
_GRACE = 10.0  # seconds that a rank has to end
_HANG = 30.0  # seconds that this process has to end once a rank is lost


@contextlib.contextmanager
def open_ranks(trainers: int, device: str = "cpu") -> Iterator[Alone]:
    """The group of this run, on every rank. Raises `TurntreeError`
    on rank 0 within seconds when another rank dies."""
    launched = _launched()
    if max(trainers, launched) > 1:
        _check_device(device, trainers if launched == 1 else _local() + 1)
    if launched > 1 and trainers not in (1, launched):
        problem = f"is {trainers}, and {launched} ranks were launched"
        raise ConfigError(problem, field="cluster.trainers", hint="leave it out: the launcher decides")
    if launched > 1:
        with _joined(device, None) as group:
            yield group
    elif trainers > 1:
        store = TCPStore("127.0.0.1", 0, trainers, is_master=True, timeout=_START, wait_for_workers=False)
        followers = _Followers(trainers, store.port, device)
        with followers.watched():
            followers.wait()
            with _joined(device, store, trainers) as group:
                yield group
    else:
        yield Alone()


def _check_device(device: str, ranks: int) -> None:
    """Raise `ConfigError` unless so many ranks of this machine can have a device each."""
    kind, one, _ = device.partition(":")
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"is {device!r}, which ranks cannot use", field="device.name", hint="use cpu or cuda")
    if one:
        raise ConfigError(f"{device!r} is one device", field="device.name", hint="use cuda: each rank takes its own")
    if kind == "cuda" and ranks > (seen := torch.cuda.device_count()):
        problem = f"is cuda, and {ranks} ranks of this machine see {seen} GPUs"
        raise ConfigError(problem, field="device.name", hint="start one a GPU, and let each see all GPUs")


def _local() -> int:
    """The number of this rank among those of its machine."""
    return int(os.environ.get("LOCAL_RANK") or 0)


def _launched() -> int:
    """How many ranks the launcher started; 1 without a launcher."""
    said = {name: os.environ.get(name, "") for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")}
    size = said["WORLD_SIZE"] or "1"
    numbers = size.isdecimal() and said["RANK"].isdecimal()
    reachable = dist.is_initialized() or (said["MASTER_ADDR"] and said["MASTER_PORT"].isdecimal())
    if size != "1" and not (numbers and reachable):
        problem = "the environment says " + ", ".join(f"{name}={value!r}" for name, value in said.items())
        hint = "a launcher such as torchrun sets all of them: unset WORLD_SIZE to run without one"
        raise ConfigError(problem, field="cluster.trainers", hint=hint)
    return int(size)


@contextlib.contextmanager
def _joined(device: str, store: Store | None, size: int = -1) -> Iterator[Ranks]:
    """The process group: as rank 0 of `size` around `store`, or as the environment says. One that is there already
    (Ray Train makes one) is used and left as it is."""
    own = not dist.is_initialized()
    cuda = torch.device(device).type == "cuda"
    if cuda:
        torch.cuda.set_device(_local())
    if own:
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        placed: dict[str, Any] = {} if store is None else {"store": PrefixStore("default_pg", store), "rank": 0}
        dist.init_process_group(backend, world_size=size, timeout=_WAIT, **placed)
    try:
        yield Ranks(device)
    finally:
        if own:
            dist.destroy_process_group()


class _Followers:
    """The ranks that this process started."""

    def __init__(self, size: int, port: int, device: str) -> None:
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
        command = [sys.executable, "-m", "turntree.training.launch", device]
        self._processes = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # closed by the kernel when this process dies: the followers read it to know
                stdout=sys.stderr.fileno() if _has_file(sys.stderr) else subprocess.DEVNULL,
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(1, size)
        ]
        self._store = TCPStore("127.0.0.1", port, is_master=False)  # one's own: a client that waits is locked
        self._ended = threading.Event()
        self._lock, self._inside = threading.Lock(), False
        self._lost = ""

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """While the block lasts, a rank that dies ends it with a `TurntreeError` that says how."""
        threading.Thread(target=self._watch, args=(threading.get_ident(),), daemon=True).start()
        try:
            try:
                self._inside = True
                yield
            finally:
                with self._lock:  # from here on the watch interrupts nothing
                    self._inside = False
        except (RuntimeError, KeyboardInterrupt) as error:  # of a collective that broke off, or from the watch
            if self._lost or (isinstance(error, RuntimeError) and self._look(_BREAK)):
                raise TurntreeError(self._lost) from error
            raise
        else:
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE)
        finally:
            self._ended.set()
            for process in self._processes:
                process.kill()
                process.communicate()  # which also closes the pipe

    def wait(self) -> None:
        """Until all are there. In Python, because joining a group cannot be interrupted."""
        while not self._store.check([_here(rank) for rank in range(1, len(self._processes) + 1)]):
            if self._lost:
                raise RuntimeError(self._lost)
            time.sleep(_LOOK / 10)

    def _look(self, seconds: float) -> str:
        """How a rank died, where one does within `seconds`."""
        until = time.monotonic() + seconds
        while not self._lost:
            for rank, process in enumerate(self._processes, start=1):
                if process.poll() not in (None, 0):
                    self._lost = _described(rank, process, self._store)
            if time.monotonic() >= until:
                break
            time.sleep(_LOOK / 10)
        return self._lost

    def _watch(self, thread: int) -> None:
        """Interrupt the block when a rank has died: at once where it runs Python, else a collective breaks off. One
        that never does (NCCL may wait for a dead rank for minutes) ends with the process."""
        while not self._ended.wait(_LOOK):
            if self._look(0):
                with self._lock:
                    if self._inside and thread == threading.main_thread().ident:
                        signal.pthread_kill(thread, signal.SIGINT)
                if not self._ended.wait(_HANG):
                    print(f"turntree: {self._lost}", file=sys.stderr, flush=True)
                    os._exit(1)
                return


def _described(rank: int, process: subprocess.Popen[bytes], store: TCPStore) -> str:
    code = process.returncode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    said = f": {store.get(_error(rank)).decode()}" if store.check([_error(rank)]) else ""
    return f"rank {rank} (process {process.pid}) {how}{said}; run the same command to resume from the last checkpoint"


def _here(rank: int) -> str:
    return f"turntree/here/{rank}"


def _error(rank: int) -> str:
    return f"turntree/error/{rank}"


def _has_file(stream: Any) -> bool:
    try:
        return stream.fileno() >= 0
    except (AttributeError, OSError, ValueError):
        return False


def main(arguments: Sequence[str]) -> None:
    """A rank that rank 0 of this machine started. Its errors go to rank 0, which says them."""
    for number in (signal.SIGINT, signal.SIGTERM):  # of the terminal, of a cluster: rank 0 decides
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    rank = int(os.environ["RANK"])
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store.set(_here(rank), "")
    try:
        with _joined(arguments[0], None) as group:
            follow(group)
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        with contextlib.suppress(RuntimeError):
            store.set(_error(rank), text)
        os._exit(1)


def _end_with_parent() -> None:
    while os.read(0, 1):  # not sys.stdin, whose lock would be held when this process ends
        pass
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
