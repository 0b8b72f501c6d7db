"""Work that may never end, in processes that are killed when it takes too long.

Computer algebra and regular expressions have no time limit, and a limit by signals works in main threads only, while
environments step in threads. The limit is CPU time (so that a loaded machine decides as an idle one), with a longer
wall-clock limit as a fallback. The processes are started by `subprocess`: `multiprocessing` (and pebble on it) would
run the user's script again in each, and starts none inside a daemon process.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from turntree.core.errors import TurntreeError

_START_SECONDS = 120.0
_WALL_PER_CPU = 4.0  # how much longer than its CPU limit an answer may take on a machine that is busy
_MOST_BYTES = 2 << 30
_PACKAGES = Path(__file__).parents[2]  # where `turntree` is imported from, for the processes


class Workers:
    """Up to `count` processes that answer questions by a function ("module:name" of JSON values); safe to ask from any
    thread. A process answers one question at a time, so a slow one keeps one process busy and no other question waits.
    Processes start when they are first needed, and again after they were killed; they end with this one.
    """

    def __init__(self, function: str, *, count: int = 4) -> None:
        self._function, self._count = function, count
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Begin without processes: after a fork, existing ones belong to the parent."""
        self._places = threading.BoundedSemaphore(self._count)
        self._idle: list[subprocess.Popen[bytes]] = []

    def ask(self, question: Any, seconds: float) -> Any:
        """The answer of a process to a question (JSON values both); None where there was none within `seconds` of CPU
        time. A process that something else ended is replaced, once. Raises `TurntreeError` where none can start."""
        line = json.dumps([seconds, question]).encode() + b"\n"
        answer, lost = self._answer(line, seconds)
        if lost:
            answer, _ = self._answer(line, seconds)
        return json.loads(answer) if answer else None

    def _answer(self, line: bytes, seconds: float) -> tuple[bytes, bool]:
        """The answer, empty where there is none, and whether its process ended otherwise than by a limit."""
        with self._places:
            try:
                process = self._idle.pop()
            except IndexError:
                process = self._start()
            answer, code = b"", None
            try:
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError):  # it ended: so does the answer
                    process.stdin.write(line)
                    process.stdin.flush()
                answer = _line(process, _WALL_PER_CPU * seconds)
            finally:
                if whole := answer.endswith(b"\n"):
                    self._idle.append(process)
                else:
                    code = _end(process)
            return (answer, False) if whole else (b"", code not in (None, -signal.SIGPROF))

    def _start(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(filter(None, (str(_PACKAGES), os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-P", "-m", __name__, self._function]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
        )
        if _line(process, _START_SECONDS) != b"ready\n":
            _end(process)
            raise TurntreeError(f"a process does not start; see: {' '.join(command)}")
        return process


def _line(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """The next line, which is written at once; empty after `seconds`, or when the process ended."""
    assert process.stdout is not None
    ready = select.poll()  # `select` refuses descriptors above 1,023
    ready.register(process.stdout, select.POLLIN | select.POLLHUP)
    return process.stdout.readline() if ready.poll(1000 * seconds) else b""


def _end(process: subprocess.Popen[bytes]) -> int | None:
    """Returns the code with which it had ended by itself."""
    code = None
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = process.wait(0.1)
    process.kill()
    with contextlib.suppress(BrokenPipeError):
        process.communicate()
    return code


def _serve(function: str) -> None:
    """The loop of such a process. Too much CPU time ends it (the default of the signal), and so may too much memory."""
    import resource

    module, _, name = function.partition(":")
    answer = getattr(importlib.import_module(module), name)
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


if __name__ == "__main__":
    _serve(sys.argv[1])
