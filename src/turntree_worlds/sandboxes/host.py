"""The side outside the box: start a guest, send it programs, and end it in any state."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import subprocess
import time
from multiprocessing.connection import wait
from pathlib import PurePosixPath
from typing import Any

from turntree.core.errors import TurntreeError
from turntree_worlds.sandboxes.enclosure import GUEST_ROOT, Bubblewrap, Interpreter
from turntree_worlds.sandboxes.limits import EPOCH, Execution, File, Files, Language, SandboxConfig

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
_LINK = 3  # the guest's end: like its command, which programs see, the same in every box
_START = f"import os, sys; sys.path.insert(0, {GUEST_ROOT!r}); from turntree_worlds.sandboxes.guest"
_OWN = f"{_START}.kernel import own; os.dup2({{channel}}, {_LINK}); own({{uid}}); os.execv(sys.argv[1], sys.argv[1:])"
_MAIN = f"{_START}.serve import main; main({_LINK})"


class SandboxLost(TurntreeError):
    """No box works: none starts, or boxes die under a harmless program too. The rollout is censored, not punished."""


class Box:
    """One guest in bubblewrap. Runs one program at a time."""

    def __init__(self, enclosure: Bubblewrap, interpreter: Interpreter, config: SandboxConfig) -> None:
        """Raises `SandboxLost` with what the guest said when it does not come up."""
        self._limits, settings = config.limits, _settings(enclosure, config)
        self._link, theirs = socket.socketpair()
        with theirs:
            own = _OWN.format(channel=theirs.fileno(), uid=settings["uid"])
            self._process = subprocess.Popen(
                _command(enclosure, interpreter, config, own),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=_ENVIRONMENT,
                cwd="/",
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._unread = bytearray()
        with contextlib.suppress(OSError):  # it has ended, and says why
            self._link.sendall(json.dumps(settings).encode() + b"\n")
        if self._line(time.monotonic() + _START_SECONDS) is None:
            words = self._last_words()
            self.close()
            raise SandboxLost(words)

    def run(
        self, language: Language, source: str, seconds: float, files: Files | None = None, clock: int = EPOCH
    ) -> Execution:
        """Raises `SandboxLost` when the box died under the program. A box that does not answer in time is hung up."""
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
            if reply.get("files") is not None:
                reply["files"] = _files(reply["files"], files or {})
            return Execution(**reply)
        if time.monotonic() < deadline:
            raise SandboxLost(f"the box died: {self._last_words()}")
        self._hang_up()
        return Execution(
            stdout="", stderr="", value=None, truncated=False, timed_out=True, exit_code=None,
            seconds=time.monotonic() - started,
        )  # fmt: skip

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
            except (TimeoutError, ConnectionResetError):  # it ended before it read everything
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


def _settings(enclosure: Bubblewrap, config: SandboxConfig) -> dict[str, Any]:
    """What the guest is told first (`guest.serve.main`)."""
    limits = config.limits
    bounds = {
        "memory_bytes": limits.memory_bytes,
        "file_bytes": limits.disk_bytes,
        "open_files": limits.open_files,
        "output_bytes": limits.output_bytes,
        "processes": limits.processes,
    }
    told = {"bounds": bounds, "files": limits.files, "packages": config.packages, "preload": config.preload}
    return {**enclosure.settings(), **told}


def _command(enclosure: Bubblewrap, interpreter: Interpreter, config: SandboxConfig, own: str) -> list[str]:
    bare = [interpreter.program, "-s", "-S", "-B", "-c"]
    return [*enclosure.command(config, interpreter), *bare, own, *bare, _MAIN]
