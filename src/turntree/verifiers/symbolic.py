"""Mathematical expressions compared symbolically, in a process that is killed when it takes too long.

Needs the extra `math` (latex2sympy2_extended and sympy). Computer algebra knows no time limit of its own, and a limit
by signals works in main threads only, while environments step in threads; hence a process (`symbolic_worker`), one for
this process, started when it is first needed and again after it was killed.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import select
import subprocess
import sys
import threading
from functools import lru_cache
from pathlib import Path

from turntree.core.errors import TurntreeError

SECONDS = 3.0
_START_SECONDS = 120.0
_MOST_CHARACTERS = 400


def equal(one: str, two: str) -> bool | None:
    """Whether two LaTeX expressions are equal. False where one cannot be read; None where that could not be decided
    within `SECONDS`, or one has over 400 characters. Symmetric. Raises `TurntreeError` where the extra is missing."""
    if max(len(one), len(two)) > _MOST_CHARACTERS:
        return None
    return _asked(min(one, two), max(one, two))


def readable(text: str) -> bool:
    """Whether a text is an expression that can be compared."""
    return len(text) <= _MOST_CHARACTERS and _asked(text) is True


class Worker:
    """The process and its pipes. One question at a time; safe to ask from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, texts: tuple[str, ...], seconds: float) -> bool | None:
        """None: no answer in time."""
        with self._lock:
            process = self._process = self._process or _started()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it ended, by its memory limit perhaps: so does the answer
                process.stdin.write(json.dumps(texts).encode() + b"\n")
                process.stdin.flush()
            line = _line(process, seconds)
            if not line:
                self._end()
                return None
            return json.loads(line)

    def end(self) -> None:
        with self._lock:
            self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _started() -> subprocess.Popen[bytes]:
    if importlib.util.find_spec("latex2sympy2_extended") is None:
        raise TurntreeError("comparing expressions needs an extra: pip install 'turntree[math]'")
    program = Path(__file__).with_name("symbolic_worker.py")
    process = subprocess.Popen(
        [sys.executable, "-P", str(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    if _line(process, _START_SECONDS) != b"ready\n":
        process.kill()
        process.wait()
        raise TurntreeError(f"the process that compares expressions does not start; see: {sys.executable} {program}")
    return process


def _line(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """The next line, which is written at once; empty after `seconds`, or when the process ended."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], seconds)
    return process.stdout.readline() if ready else b""


_worker = Worker()
atexit.register(lambda: _worker.end())


def _after_fork() -> None:
    global _worker  # the pipes are the parent's
    _worker = Worker()
    _decided.cache_clear()


class _Undecided(Exception):
    """In time, that is: another time it may be, so this is not kept."""


@lru_cache(maxsize=65_536)
def _decided(*texts: str) -> bool:
    if (answer := _worker.ask(texts, SECONDS)) is None:
        raise _Undecided
    return answer


def _asked(*texts: str) -> bool | None:
    try:
        return _decided(*texts)
    except _Undecided:
        return None


os.register_at_fork(after_in_child=_after_fork)
