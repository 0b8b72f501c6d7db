"""Worker processes that never outlive their parent, and stay silent when the parent is interrupted."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import wait

_PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Processes that are started inside the block never get the terminal's interrupt, not even while they import: the
    parent gets it and ends them. (A blocked signal is inherited; it reaches this process when the block ends.)"""
    resource_tracker.ensure_running()  # its first start would unblock the signal inside the block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def die_with_parent() -> None:
    """Call it first in a process that `multiprocessing` started: the process is then killed when its parent ends, for
    whatever reason. A process that leads a group takes the group with it.

    A thread watches a pipe that only the parent holds open, so a parent that died before this call is noticed too. On
    Linux the kernel helps where no thread of this process can run: it kills a single process, and wakes a stopped group
    leader, which then kills the group.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError("is not a process that multiprocessing started")
    leads = os.getpgrp() == os.getpid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT if leads else signal.SIGKILL), 0, 0, 0)

    def watch() -> None:
        wait([parent.sentinel])
        if leads:
            os.killpg(os.getpid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="dies with its parent", daemon=True).start()
