"""The ranks of a run: processes that this one starts on its machine, or that a launcher started before.

A launcher (torchrun, Ray Train, a batch system) is known by its environment only: RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR and MASTER_PORT, as torch defines them; every rank then runs the same command. Without one, this process is
rank 0 and starts the others by `torch.multiprocessing`; they end when it does, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.multiprocessing.spawn import (
    ProcessContext,
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from turntree.core.errors import ConfigError, TurntreeError
from turntree.run.workers import die_with_parent, without_interrupts
from turntree.train.group import SINGLE, DistributedGroup, ProcessGroup
from turntree.train.trainer import follow

_START = timedelta(minutes=5)  # for all ranks to be there
_WAIT = timedelta(minutes=30)  # of a rank for the others, within an update
_POLL = 0.2  # seconds between two looks at the other ranks
_BREAK = 2.0  # seconds from a collective that breaks off to the end of the rank that broke it
_GRACE = 10.0  # seconds that a rank has to end
_HANG = 30.0  # seconds that this process has to end once a rank is lost


@contextlib.contextmanager
def open_ranks(trainers: int, device: str = "cpu") -> Iterator[ProcessGroup]:
    """The group of this run, on every rank. Raises `TurntreeError` on rank 0 within seconds when another rank dies."""
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
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(trainers)}
        with without_interrupts():
            others = start_processes(_rank, (device, place), nprocs=trainers - 1, join=False, daemon=True)
        assert others is not None  # as they are not joined
        with _watched(others), _joined(device, store, trainers) as group:
            yield group
    else:
        yield SINGLE


def _check_device(device: str, ranks: int) -> None:
    """Raise `ConfigError` unless so many ranks of this machine can have a device each."""
    kind, number, _ = device.partition(":")
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"is {device!r}, which ranks cannot use", field="device.name", hint="use cpu or cuda")
    if number:
        raise ConfigError(f"{device!r} is one device", field="device.name", hint="use cuda: each rank takes its own")
    if kind == "cuda" and ranks > (seen := torch.cuda.device_count()):
        problem = f"is cuda, and {ranks} ranks of this machine see {seen} GPUs"
        raise ConfigError(problem, field="device.name", hint="start one a GPU, and let each see all GPUs")


def _local() -> int:
    """The number of this rank among those of its machine."""
    return int(os.environ.get("LOCAL_RANK") or 0)


def _launched() -> int:
    """How many ranks the launcher started; 1 without a launcher."""
    names = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")
    size, rank, address, port = (os.environ.get(name, "") for name in names)
    reachable = dist.is_initialized() or (address and port.isdecimal())
    if size not in ("", "1") and not (size.isdecimal() and rank.isdecimal() and reachable):
        problem = "the environment says " + ", ".join(f"{name}={os.environ.get(name, '')!r}" for name in names)
        hint = "a launcher such as torchrun sets all of them: unset WORLD_SIZE to run without one"
        raise ConfigError(problem, field="cluster.trainers", hint=hint)
    return int(size or 1)


@contextlib.contextmanager
def _joined(device: str, store: Store | None, size: int = -1) -> Iterator[DistributedGroup]:
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
        yield DistributedGroup(device)
    finally:
        if own:
            dist.destroy_process_group()


@contextlib.contextmanager
def _watched(others: ProcessContext) -> Iterator[None]:
    """While the block lasts, a rank that dies ends it with a `TurntreeError` that says how: by an interrupt where it
    runs Python, else because a collective breaks off. One that never does (NCCL may wait for a dead rank for minutes)
    ends with the process."""
    lost: list[str] = []
    ended = threading.Event()
    interruptible = threading.current_thread() is threading.main_thread()

    def watch() -> None:
        try:
            while not ended.is_set() and not others.join(_POLL, grace_period=0):
                pass
        except (ProcessExitedException, ProcessRaisedException) as error:
            lost.append(_described(error))
            if interruptible and not ended.is_set():
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            if not ended.wait(_HANG):
                print(f"turntree: {lost[0]}", file=sys.stderr, flush=True)
                os._exit(1)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        try:
            yield
        except RuntimeError:  # a collective broke off: the watch says which rank did it
            watcher.join(_BREAK)
            raise
        finally:
            ended.set()
            watcher.join()  # an interrupt of the watch arrives here at the latest
        for process in others.processes:
            process.join(_GRACE)
    except (RuntimeError, KeyboardInterrupt) as error:
        if lost:
            raise TurntreeError(lost[0]) from error
        raise
    finally:
        for process in others.processes:
            process.kill()
            process.join()


def _described(error: ProcessExitedException | ProcessRaisedException) -> str:
    if isinstance(error, ProcessExitedException):
        how = f"was killed by {error.signal_name}" if error.signal_name else f"ended with code {error.exit_code}"
    else:  # the line after the places of its traceback
        lines = error.msg.strip().splitlines()
        how = f"ended: {lines[max(number for number, line in enumerate(lines) if line[:1] == ' ') + 1][:300]}"
    rank = f"rank {error.error_index + 1} (process {error.error_pid})"
    return f"{rank} {how}; run the same command to resume from the last checkpoint"


def _rank(index: int, device: str, place: dict[str, str]) -> None:
    """A rank that rank 0 of this machine started. torch hands its errors to rank 0, which says them."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):  # of the terminal, of a cluster: rank 0 decides
        signal.signal(number, signal.SIG_IGN)
    os.dup2(2, 1)  # standard output carries the results of rank 0
    os.environ |= {**place, "RANK": str(index + 1), "LOCAL_RANK": str(index + 1)}
    with _joined(device, None) as group:
        follow(group)
