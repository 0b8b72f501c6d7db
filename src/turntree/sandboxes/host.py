"""The side outside the box: start a guest, send it programs, and end it in any state."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import PurePosixPath
from typing import Any, Protocol

from turntree.core.errors import TurntreeError
from turntree.sandboxes.limits import EPOCH, Execution, File, Files, Language, SandboxConfig

_START_SECONDS = 30.0
_GRACE_SECONDS = 2.0  # beyond a program's time limit, for the guest to notice, clean up and answer
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "PYTHONHASHSEED": "0",  # an answer depends on the program only, so it can be cached
    "PYTHONUTF8": "1",
    "PYTHONSAFEPATH": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_MAIN = "import sys; sys.path.insert(0, {root!r}); import json; from turntree.sandboxes.guest.serve import main; "
_MAIN += "sys.path.pop(0); main({channel}, json.loads({settings!r}))"


class SandboxLost(TurntreeError):
    """No box works: none starts, or boxes die under a harmless program too. The rollout is censored, not punished."""


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    """`program` needs the files under `prefix`."""

    program: str
    prefix: str

    @classmethod
    def candidates(cls) -> list[Interpreter]:
        """The running interpreter (the base of a virtual environment), then the system's."""
        own = cls(program=os.path.realpath(sys.executable), prefix=sys.base_prefix)
        system = cls(program="/usr/bin/python3", prefix="/usr")
        return [own, system] if own.prefix != "/usr" and os.path.exists(system.program) else [own]


class Enclosure(Protocol):
    """A way to confine the guest (`bubblewrap`, `landlock`)."""

    @property
    def name(self) -> str: ...

    @property
    def languages(self) -> frozenset[Language]: ...

    def settings(self, config: SandboxConfig, interpreter: Interpreter) -> dict[str, Any]:
        """What the guest must do to itself: `uid`, `landlock`, `alone`, the `folder` where programs start."""
        ...

    def command(self, config: SandboxConfig, interpreter: Interpreter) -> list[str]:
        """What comes before the interpreter's own command line."""
        ...

    def package_root(self) -> str:
        """The folder that holds `turntree`, as the guest sees it."""
        ...


class Box:
    """One guest in one enclosure. Runs one program at a time."""

    def __init__(self, enclosure: Enclosure, interpreter: Interpreter, config: SandboxConfig) -> None:
        """Raises `SandboxLost` with what the guest said when it does not come up."""
        self._limits = config.limits
        self._link, theirs = socket.socketpair()
        with theirs:
            command = _command(enclosure, interpreter, config, theirs.fileno())
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=_ENVIRONMENT,
                cwd="/",
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._unread = bytearray()
        if self._line(time.monotonic() + _START_SECONDS) is None:
            words = self._last_words()
            self.close()
            raise SandboxLost(words)

    def run(
        self, language: Language, source: str, seconds: float, files: Files | None = None, clock: int = EPOCH
    ) -> tuple[Execution, bool]:
        """The execution, and whether the box may be used again. Raises `SandboxLost` when the box died under it."""
        started = time.monotonic()
        request: dict[str, Any] = {"language": language, "source": source, "seconds": seconds}
        if files is not None:
            request |= {"files": _entries(files), "clock": clock}
        deadline = started + seconds + _GRACE_SECONDS
        try:
            self._link.settimeout(seconds + _GRACE_SECONDS)
            self._link.sendall(json.dumps(request).encode() + b"\n")
            reply = self._line(deadline)
        except OSError as error:
            raise SandboxLost(f"the box died: {error}") from error
        if reply is not None:
            again = not reply.pop("dirty")
            if reply.get("files") is not None:
                reply["files"] = _files(reply["files"], files or {})
            return Execution(**reply), again
        if time.monotonic() < deadline:
            raise SandboxLost(f"the box died: {self._last_words()}")
        silent = Execution(
            stdout="", stderr="", value=None, truncated=False, timed_out=True, exit_code=None,
            seconds=time.monotonic() - started,
        )  # fmt: skip
        return silent, False

    @property
    def dead(self) -> bool:
        """Whether an idle box died: its guest says nothing unasked, so the link has news only when it is hung up."""
        return bool(wait([self._link], 0))

    def close(self) -> None:
        """End all that is in it. Safe to call twice.

        By hanging up: bubblewrap may not signal the guest of another user, so that killing it would not do.
        """
        self._hang_up()
        self._link.close()
        try:
            self._process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stderr is not None
        self._process.stderr.close()

    def _hang_up(self) -> None:
        """Even where a process that was forked from this one holds the link too."""
        with contextlib.suppress(OSError):  # it is closed already
            self._link.shutdown(socket.SHUT_RDWR)

    def _line(self, deadline: float) -> dict[str, Any] | None:
        """The next line of the guest; None when it ended or the deadline passed."""
        most = 64 * 2**10 + 18 * self._limits.output_bytes  # JSON may need six characters for one
        most += 2 * self._limits.disk_bytes + 32 * 2**10 * self._limits.files  # the longest path has 4096 bytes
        while b"\n" not in self._unread and len(self._unread) < most:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._link.settimeout(left)
            try:
                chunk = self._link.recv(65536)
            except TimeoutError:
                return None
            if not chunk:
                return None
            self._unread += chunk
        line, _, rest = bytes(self._unread).partition(b"\n")
        self._unread = bytearray(rest)
        return json.loads(line)

    def _last_words(self) -> str:
        """Its last output, which may arrive after it hung up."""
        try:
            _, said = self._process.communicate(timeout=_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._hang_up()
            self._process.kill()
            _, said = self._process.communicate()
        lines = said.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self._process.returncode}, no message"


def _entries(files: Files) -> list[list[Any]]:
    """The files as the guest takes them, with every folder that they are in."""
    above = {
        str(parent): File(kind="folder", mode=0o755) for path in files for parent in PurePosixPath(path).parents[:-1]
    }
    return [
        [path, file.kind, file.mode, file.time, base64.b64encode(file.data).decode()]
        for path, file in {**above, **files}.items()
    ]


def _files(entries: list[list[Any]], before: Files) -> Files:
    """What the guest said is there. Entries that did not change are those of `before`, so that states share them."""
    now: dict[str, File] = {}
    for path, kind, mode, when, data in entries:
        found, old = File(base64.b64decode(data), kind, mode, when), before.get(path)
        now[path] = old if old is not None and (old, old.time) == (found, when) else found
    return now


def _command(enclosure: Enclosure, interpreter: Interpreter, config: SandboxConfig, channel: int) -> list[str]:
    limits = config.limits
    settings = enclosure.settings(config, interpreter)
    settings["bounds"] = {
        "memory_bytes": limits.memory_bytes,
        "file_bytes": limits.disk_bytes,
        "open_files": limits.open_files,
        "output_bytes": limits.output_bytes,
        "alone": settings.pop("alone"),
    }
    settings |= {"processes": limits.processes, "files": limits.files}
    settings |= {"packages": list(config.packages), "preload": list(config.preload)}
    main = _MAIN.format(root=enclosure.package_root(), channel=channel, settings=json.dumps(settings))
    return [*enclosure.command(config, interpreter), interpreter.program, "-s", "-S", "-B", "-c", main]
