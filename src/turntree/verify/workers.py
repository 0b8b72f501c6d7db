"""Work that may never end, in processes that are killed when it takes too long.

Computer algebra and regular expressions have no time limit, and a limit by signals works in main threads only, while
environments step in threads. The limit is CPU time (so that a loaded machine decides as an idle one), with a longer
wall-clock limit as a fallback.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from turntree.core.errors import TurntreeError

_START_SECONDS = 120.0
_WALL_PER_CPU = 4.0  # how much longer than its CPU limit an answer may take on a machine that is busy
_MOST_BYTES = 2 << 30
_PACKAGES = Path(__file__).parents[2]  # where `turntree` is imported from, for the processes


class Workers:
    """Up to `count` processes that run `program` (a script beside this file that calls `serve`); safe to ask from any
    thread. A process answers one question at a time, so a slow one keeps one process busy and no other question waits.
    Processes start when they are first needed, and again after they were killed.

    `needs` is (module, extra): what has to be installed, and with what.
    """

    def __init__(self, program: str, *, count: int = 4, needs: tuple[str, str] | None = None) -> None:
        self._program, self._count, self._needs = Path(__file__).with_name(program), count, needs
        self._forget()
        _all.add(self)

    def ask(self, question: Any, seconds: float) -> Any:
        """The answer of a process to a question (JSON values both); None where there was none within `seconds` of CPU
        time. Raises `TurntreeError` where the processes cannot start."""
        line = json.dumps([seconds, question]).encode() + b"\n"
        with self._places:
            process, answered = self._free(), b""
            try:
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError):  # it ended: so does the answer
                    process.stdin.write(line)
                    process.stdin.flush()
                answered = _line(process, _WALL_PER_CPU * seconds)
            finally:
                if answered.endswith(b"\n"):
                    self._idle.append(process)
                else:
                    self._running.discard(process)
                    _end(process)
            return json.loads(answered) if answered.endswith(b"\n") else None

    def end(self) -> None:
        """Kill all processes; another question starts new ones."""
        with contextlib.suppress(IndexError):
            while True:
                process = self._idle.pop()
                self._running.discard(process)
                _end(process)
        for process in list(self._running):  # the thread that waits for it clears away
            process.kill()

    def _forget(self) -> None:
        """Begin without processes. After a fork, existing ones belong to the parent."""
        self._places = threading.BoundedSemaphore(self._count)
        self._idle: list[subprocess.Popen[bytes]] = []
        self._running: set[subprocess.Popen[bytes]] = set()

    def _free(self) -> subprocess.Popen[bytes]:
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        return self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._needs is not None and importlib.util.find_spec(self._needs[0]) is None:
            raise TurntreeError(f"needs an extra: pip install '{self._needs[1]}'")
        path = os.pathsep.join(filter(None, (str(_PACKAGES), os.environ.get("PYTHONPATH"))))
        process = subprocess.Popen(
            [sys.executable, "-P", str(self._program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._running.add(process)
        if _line(process, _START_SECONDS) != b"ready\n":
            self._running.discard(process)
            _end(process)
            raise TurntreeError(f"a process does not start; see: {sys.executable} {self._program}")
        return process


_all: weakref.WeakSet[Workers] = weakref.WeakSet()


def serve(answer: Callable[[Any], Any]) -> None:
    """The loop of such a process: `answer` gets a question and returns a JSON value. Too much CPU time ends the process
    (the default of the signal), and so may too much memory."""
    import resource

    if sys.platform == "linux":  # elsewhere address space is not limited
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the parent, whose end ends the input
    print("ready", flush=True)
    for line in sys.stdin:
        seconds, question = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answered = json.dumps(answer(question))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answered, flush=True)


def _line(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """The next line, which is written at once; empty after `seconds`, or when the process ended."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], seconds)
    return process.stdout.readline() if ready else b""


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _end_all() -> None:
    for workers in list(_all):
        workers.end()


def _forget_all() -> None:
    for workers in list(_all):
        workers._forget()  # pyright: ignore[reportPrivateUsage]


atexit.register(_end_all)
os.register_at_fork(after_in_child=_forget_all)
