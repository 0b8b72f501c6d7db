"""The sandbox that callers use: probed before use, with several boxes, of which lost ones are replaced."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from turntree.core.errors import InputError
from turntree_worlds.sandboxes.enclosure import Bubblewrap, Interpreter
from turntree_worlds.sandboxes.host import Box, SandboxLost
from turntree_worlds.sandboxes.limits import EPOCH, Execution, Files, Language, Limits, SandboxConfig

_LOSSES = 2  # boxes that a program may end before that counts as its outcome
_HARMLESS = "20 + 22"
_PROBE = """
import os, resource, socket
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
attempt("trace the guest", lambda: os.open("/proc/%d/mem" % os.getppid(), os.O_RDONLY))
attempt("limit the guest", lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CORE, (0, 0)))
attempt("slow the guest down", lambda: os.setpriority(os.PRIO_PROCESS, os.getppid(), 19))
if {host} > 64:  # a number that cannot be one of the box's own processes
    attempt("signal the host", lambda: os.kill({host}, 0))
attempt("exceed the memory limit", lambda: bytearray({memory}))
allowed
"""


class Sandbox:
    """Runs model-written programs, `config.boxes` at once; any number of threads may call `run`.

    Every program has a process of its own, forked from a warm interpreter: nothing that it defines, patches, writes
    or leaves running is seen by another one, and the same program is answered the same (hash and random seeds are
    fixed). Use it as a context manager, or `close` it.
    """

    def __init__(self, config: SandboxConfig | None = None, *, enclosure: Bubblewrap | None = None) -> None:
        """Probes bubblewrap (or a variant of it: `enclosure`). Raises `InputError` when nothing here contains a
        program: there is no way to run one unsandboxed."""
        self.config = config if config is not None else SandboxConfig()
        self._enclosure, self._interpreter, first = _chosen(self.config, enclosure)
        self.lost = 0  # boxes that died, under a program or idle, each replaced
        self._lock = threading.Lock()
        self._running: list[_Held] = []
        self._boxes: queue.LifoQueue[Box | None] = queue.LifoQueue()
        for box in (*(None,) * (self.config.boxes - 1), first):
            self._boxes.put(box)

    def __enter__(self) -> Sandbox:
        return self

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
        `clock`. Like its answer, they are a value: nothing of them stays in the box.

        If a second, fresh box dies under a program while a harmless program is answered, the program has ended its
        boxes: that is its outcome (`Execution.lost`). Raises `SandboxLost` when the harmless program is not answered
        either.
        """
        if files is not None:
            _check_files(files, self.config.limits)
        limit = self.config.limits.seconds if seconds is None else seconds
        started = time.monotonic()
        with self._box() as held:
            for _ in range(_LOSSES):
                self.lost += held.fill()
                try:
                    return replace(held.run(language, source, limit, files, clock), alone=held.alone)
                except SandboxLost:
                    self.lost += 1
            held.fill()
            held.run("python", _HARMLESS, limit)
        return Execution(
            stdout="", stderr="", value=None, truncated=False, timed_out=False, exit_code=None,
            seconds=time.monotonic() - started, lost=True,
        )  # fmt: skip

    def close(self) -> None:
        """Kill every box. Programs must not be running."""
        for _ in range(self.config.boxes):
            box = self._boxes.get()
            if box is not None:
                box.close()

    @contextlib.contextmanager
    def _box(self) -> Iterator[_Held]:
        held = _Held(self._boxes.get(), lambda: Box(self._enclosure, self._interpreter, self.config))
        with self._lock:
            self._running.append(held)
            for each in self._running if len(self._running) > 1 else ():
                each.alone = False
        try:
            yield held
        finally:
            with self._lock:
                self._running.remove(held)
            self._boxes.put(held.box)


class _Held:
    """The place of one box, which may be empty."""

    def __init__(self, box: Box | None, start: Callable[[], Box]) -> None:
        self.box, self._start = box, start
        self.alone = True  # no other box of the sandbox ran a program meanwhile

    def fill(self) -> bool:
        """Start a box if there is none that lives. Returns whether one had died while it was idle: the next program is
        not to blame for it. Raises `SandboxLost`, which no program caused."""
        dead = self.box if self.box is not None and self.box.dead else None
        if dead is not None:
            dead.close()
            self.box = None
        if self.box is None:
            self.box = self._start()
        return dead is not None

    def run(
        self, language: Language, source: str, seconds: float, files: Files | None = None, clock: int = EPOCH
    ) -> Execution:
        box, self.box = self.box, None
        assert box is not None
        try:
            execution = box.run(language, source, seconds, files, clock)
        except BaseException:
            box.close()
            raise
        self.box = box
        return execution


def _check_files(files: Files, limits: Limits) -> None:
    for path in files:
        if not path or os.path.isabs(path) or os.path.normpath(path) != path or path.split("/")[0] == "..":
            raise InputError(f"{path!r} is not a path below the scratch folder", field="files", hint="like a/b.txt")
    held = sum(len(file.data) for file in files.values())
    if held > limits.disk_bytes // 2 or len(files) > limits.files // 2:
        problem = f"{len(files)} files of {held} bytes leave too little room in the sandbox"
        raise InputError(problem, field="files", hint="raise sandbox.limits.disk_bytes or sandbox.limits.files")


def _chosen(config: SandboxConfig, enclosure: Bubblewrap | None) -> tuple[Bubblewrap, Interpreter, Box]:
    """Bubblewrap and the first interpreter that pass the probe, with the box that did."""
    reasons: list[str] = []
    try:
        found = Bubblewrap() if enclosure is None else enclosure
        for interpreter in Interpreter.candidates():
            try:
                return found, interpreter, probed(found, interpreter, config)
            except (SandboxLost, OSError) as error:
                reasons.append(f"with {interpreter.program}: {error}")
    except InputError as error:
        reasons.append(error.problem)
    raise InputError(
        f"this machine offers no sandbox for model-written programs ({'; '.join(reasons)})",
        hint="install bubblewrap (bwrap) and libseccomp, and allow namespaces and overlays to be made: "
        "docs/design/sandbox.md",
    )


def probed(enclosure: Bubblewrap, interpreter: Interpreter, config: SandboxConfig) -> Box:
    """A box that passed the probe. Raises `SandboxLost` with what it let through."""
    box = Box(enclosure, interpreter, config)
    try:
        _attack(box, config)
    except BaseException:
        box.close()
        raise
    return box


def _attack(box: Box, config: SandboxConfig) -> None:
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        os.chmod(folder, 0o777)  # readable by all users: only the enclosure keeps a program out
        secret = Path(folder, "secret")
        secret.write_text("secret")
        outside = Path(folder, "outside")
        program = _PROBE.format(
            secret=str(secret),
            outside=str(outside),
            port=server.getsockname()[1],
            host=os.getpid(),
            memory=config.limits.memory_bytes,
        )
        execution = box.run("python", program, min(10.0, config.limits.seconds))
        if execution.value != "[]" or outside.exists():
            raise SandboxLost(f"the probe was not contained: {execution.value or execution.stderr.strip()[-200:]}")
