"""The sandbox that callers use: probed before use, with a box in waiting for each program that may run at once."""

from __future__ import annotations

import functools
import os
import queue
import socket
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

from turntree.core.errors import InputError
from turntree_worlds.sandboxes.box import Box, Interpreter, SandboxLost, bubblewrap
from turntree_worlds.sandboxes.calls import compiled
from turntree_worlds.sandboxes.folder import checked
from turntree_worlds.sandboxes.limits import EPOCH, Execution, Files, Language, SandboxConfig

_TRIES = 3  # boxes for one program, of which all but one may be lost
_PROBE = """
import os, socket
allowed = []
def attempt(name, act):
    try:
        act()
    except (OSError, MemoryError):
        return
    allowed.append(name)
attempt("read a file outside", lambda: open({secret!r}).read())
attempt("write a file outside", lambda: open({outside!r}, "w"))
attempt("write to /usr", lambda: open("/usr/probe", "w"))
attempt("reach the network", lambda: socket.create_connection(("127.0.0.1", {port}), timeout=1))
if {host} > 64:  # a number that cannot be one of the box's own processes
    attempt("signal the host", lambda: os.kill({host}, 0))
attempt("exceed the memory limit", lambda: bytearray({memory}))
allowed
"""


class Sandbox(AbstractContextManager["Sandbox"]):
    """Runs model-written programs, `config.boxes` at once; any number of threads may call `run`.

    Every program has a fresh box: nothing that it defines, patches, writes or leaves running is seen by another one,
    and the same program is answered the same (hash and random seeds are fixed). Use it as a context manager, or `close`
    it.
    """

    def __init__(self, config: SandboxConfig | None = None) -> None:
        """Probes bubblewrap. Raises `InputError` when nothing here contains a program: there is no way to run one
        unsandboxed."""
        self.config = config if config is not None else SandboxConfig()
        self.lost = 0  # boxes that died, or did not start, each replaced
        # one thread starts all boxes: a box ends with the thread that started it, and tools run in threads of one call
        self._starter = ThreadPoolExecutor(1, "sandbox")
        try:
            self._start = self._probed()
        except BaseException:
            self._starter.shutdown()
            raise
        self._boxes: queue.LifoQueue[Future[Box]] = queue.LifoQueue()
        for _ in range(self.config.boxes):
            self._boxes.put(self._starter.submit(self._start))

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        source: str,
        *,
        language: Language = "python",
        seconds: float | None = None,
        files: Files | None = None,
        clock: int = EPOCH,
    ) -> Execution:
        """Run a program, for at most `seconds` (default: the limit). Blocks while every box is busy.

        With `files` it runs among them, and `Execution.files` says what became of them; what it changed gets the time
        `clock`. Raises `SandboxLost` when several fresh boxes did not run it to its end.
        """
        if files is not None:
            files = checked(files, self.config.limits)
        limit = self.config.limits.seconds if seconds is None else seconds
        waiting = self._boxes.get()
        try:
            for attempt in range(_TRIES):
                try:
                    box = waiting.result()
                    try:
                        return box.run(language, source, limit, files, clock)
                    finally:
                        box.close()
                except SandboxLost:
                    self.lost += 1
                    if attempt == _TRIES - 1:
                        raise
                finally:
                    waiting = self._starter.submit(self._start)
            raise AssertionError("unreachable")
        finally:
            self._boxes.put(waiting)

    def close(self) -> None:
        """End every box. Programs must not be running."""
        for _ in range(self.config.boxes):
            waiting = self._boxes.get()
            if waiting.exception() is None:
                waiting.result().close()
        self._starter.shutdown()

    def _probed(self) -> Callable[[], Box]:
        """How boxes are started: with the first interpreter that passes the probe."""
        reasons: list[str] = []
        try:
            _ = bubblewrap(), compiled()  # is it there?
            for interpreter in Interpreter.candidates():
                start = functools.partial(Box, interpreter, self.config)
                try:
                    probe(self._starter.submit(start).result(), self.config)
                    return start
                except (SandboxLost, OSError) as error:
                    reasons.append(f"with {interpreter.program}: {error}")
        except InputError as error:
            reasons.append(error.problem)
        raise InputError(
            f"this machine offers no sandbox for model-written programs ({'; '.join(reasons)})",
            hint="install bubblewrap (bwrap) and libseccomp, and allow namespaces to be made: docs/design/sandbox.md",
        )


def probe(box: Box, config: SandboxConfig) -> None:
    """Attack the box, which ends. Raises `SandboxLost` with what it let through."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        os.chmod(folder, 0o777)  # readable by all users: only the box keeps a program out
        secret, outside = Path(folder, "secret"), Path(folder, "outside")
        secret.write_text("secret")
        program = _PROBE.format(
            secret=str(secret), outside=str(outside), port=server.getsockname()[1], host=os.getpid(),
            memory=config.limits.memory_bytes,
        )  # fmt: skip
        try:
            execution = box.run("python", program, min(10.0, config.limits.seconds), None, EPOCH)
        finally:
            box.close()
        if execution.value != "[]" or outside.exists():
            raise SandboxLost(f"the probe was not contained: {execution.value or execution.stderr.strip()[-200:]}")
