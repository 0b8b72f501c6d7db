"""One box: bubblewrap around an interpreter that waits for its program (`runner`). A box runs one program and ends."""

from __future__ import annotations

import contextlib
import functools
import json
import marshal
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turntree.core.errors import InputError, TurntreeError
from turntree_worlds.sandboxes import folder as scratch
from turntree_worlds.sandboxes.calls import compiled
from turntree_worlds.sandboxes.limits import Execution, Files, Language, SandboxConfig

FLOOD_BYTES = 16 * 2**20  # a program that writes more than this is ended
_START_SECONDS = 30.0
_GRACE_SECONDS = 5.0  # for the processes of a box to end
_CHUNK = 65536
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "PYTHONHASHSEED": "0",  # what a program answers depends on its source only
    "PYTHONUTF8": "1",
    "PYTHONSAFEPATH": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SYSTEM_FILES = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime")
# lists that name what is outside
_LISTS = ("/proc/locks", "/proc/keys", "/proc/key-users", "/proc/timer_list", "/proc/interrupts")
_RUNNER = "/run/runner.py"


class SandboxLost(TurntreeError):
    """No box works: none starts, or boxes die. The rollout is censored, not punished."""


@dataclass(frozen=True)
class Interpreter:
    """`program` needs the files under `prefix`."""

    program: str
    prefix: str

    @classmethod
    def candidates(cls) -> list[Interpreter]:
        """The running interpreter (the base of a virtual environment), then the system's."""
        own, system = cls(os.path.realpath(sys.executable), sys.base_prefix), cls("/usr/bin/python3", "/usr")
        return [own, system] if own.prefix != "/usr" and os.path.exists(system.program) else [own]


def confinement(config: SandboxConfig, interpreter: Interpreter) -> list[str]:
    """Bubblewrap's options: separate namespaces for everything (no network, no other process), a file system with /usr
    read-only, and the scratch folder in memory.

    As root no user namespace is made, in which programs would still be the host's root to the kernel: it exempts root
    from the limit on processes. `runner` takes an unused user id instead. Others get a user namespace.
    """
    as_root = os.geteuid() == 0
    identity = ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    return [
        "--new-session", "--die-with-parent", "--hostname", "box",
        *(f"--unshare-{kind}" for kind in ("ipc", "pid", "net", "uts", "cgroup-try")),
        "--cap-drop", "ALL", *(identity if as_root else ["--unshare-user", "--uid", "1000", "--gid", "1000"]),
        *_folders("/etc", "/run"), "--ro-bind", "/usr", "/usr", *_system(),
        *_read_only(*([interpreter.prefix] if interpreter.prefix != "/usr" else []), *config.packages),
        "--ro-bind", str(Path(__file__).with_name("runner.py")), _RUNNER,
        "--proc", "/proc",
        *(word for path in _LISTS if os.path.exists(path) for word in ("--ro-bind", "/dev/null", path)),
        "--dev", "/dev",
        "--tmpfs", "/dev/pts", "--remount-ro", "/dev/pts",  # all boxes would share the machine's terminals
        "--remount-ro", "/dev",
        "--perms", "0777", "--size", str(config.limits.disk_bytes), "--tmpfs", "/tmp", "--remount-ro", "/",
        "--chdir", "/",
    ]  # fmt: skip


def _system() -> list[str]:
    """The folders beside /usr (/bin, /lib, ...): links into it, or real folders."""
    options: list[str] = []
    for path in _SYSTEM:
        if os.path.islink(path):
            options += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            options += ["--ro-bind", path, path]
    for path in _SYSTEM_FILES:
        options += ["--ro-bind-try", path, path]
    return options


def _folders(*paths: str) -> list[str]:
    """Folders that anyone may enter."""
    return [option for path in paths for option in ("--perms", "0755", "--dir", path)]


def _read_only(*folders: str) -> list[str]:
    """Bound folders whose parents may be entered by anyone (bubblewrap would copy the mode of the host's)."""
    options: list[str] = []
    for folder in folders:
        for parent in reversed(Path(folder).parents[:-1]):
            if parent != Path("/usr") and Path("/usr") not in parent.parents:
                options += _folders(str(parent))
        options += ["--ro-bind", folder, folder]
    return options


@functools.cache
def bubblewrap() -> str:
    """The program. Raises `InputError` where it is not installed."""
    found = shutil.which("bwrap")
    if found is None:
        raise InputError("bubblewrap is not installed")
    return found


@dataclass
class _Stream:
    """The head of what a program writes, and how much it was."""

    limit: int
    head: bytearray = field(default_factory=bytearray)
    written: int = 0

    def read(self, descriptor: int) -> bool:
        """Read what is available; False at the end."""
        try:
            chunk = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False
        self.written += len(chunk)
        self.head += chunk[: self.limit - len(self.head)]
        return bool(chunk)

    @property
    def text(self) -> str:
        return self.head.decode("utf-8", errors="replace")


class Box:
    """One box, which waits for its program. `close` it.

    To the kernel its parent is the thread that makes it: when that ends, the box ends too.
    """

    def __init__(self, interpreter: Interpreter, config: SandboxConfig) -> None:
        """Raises `SandboxLost` with what bubblewrap or the interpreter said when it does not come up."""
        # an id of its own for every box: limits on processes are counted by user
        uid = 2**20 + secrets.randbelow(2**30) if os.geteuid() == 0 else None
        self._config, self._owner = config, uid
        self._open = contextlib.ExitStack()
        self._link, theirs = socket.socketpair()
        self._open.callback(self._link.close)
        number = 1000 if uid is None else uid
        with contextlib.ExitStack() as given:
            given.callback(theirs.close)
            told, tell = os.pipe()
            self._open.callback(os.close, told)
            given.callback(os.close, tell)
            rules = _pipe(compiled(), given)
            users = _pipe(b"user:x:%d:%d::/tmp:/bin/sh\n" % (number, number), given)
            groups = _pipe(b"user:x:%d:\n" % number, given)
            self._process = subprocess.Popen(
                [
                    bubblewrap(), "--info-fd", str(tell), "--seccomp", str(rules),
                    "--perms", "0644", "--ro-bind-data", str(users), "/etc/passwd",
                    "--perms", "0644", "--ro-bind-data", str(groups), "/etc/group", *confinement(config, interpreter),
                    interpreter.program, "-s", "-S", "-B", _RUNNER, str(theirs.fileno()),
                ],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=_ENVIRONMENT, cwd="/",
                pass_fds=(tell, rules, users, groups, theirs.fileno()), start_new_session=True,
            )  # fmt: skip
        self._exited = os.pidfd_open(self._process.pid)  # which stays, whoever waits for the process
        self._open.callback(os.close, self._exited)
        try:
            self._begin(told)
        except (OSError, ValueError) as error:
            self._process.kill()
            _, words = self._process.communicate()
            self.close()
            lines = words.decode(errors="replace").strip().splitlines()
            raise SandboxLost(lines[-1] if lines else f"no answer ({error})") from error

    def _begin(self, told: int) -> None:
        """Settings in, the scratch folder out. Raises `OSError` or `ValueError` where that does not happen."""
        limits = self._config.limits
        settings = {
            "uid": self._owner,
            "packages": self._config.packages,
            "processes": limits.processes + (self._owner is None),  # without an id of its own bubblewrap's counts too
            "memory_bytes": limits.memory_bytes,
            "disk_bytes": limits.disk_bytes,
        }
        self._link.settimeout(_START_SECONDS)
        self._send(settings)
        _, (self._folder,), *_ = socket.recv_fds(self._link, 1, 1)
        self._open.callback(os.close, self._folder)
        # of process 1 in the box, whose end is the end of all others in it
        self._first = os.pidfd_open(json.loads(os.read(told, _CHUNK))["child-pid"])
        self._open.callback(os.close, self._first)

    def _send(self, request: dict[str, Any]) -> None:
        data = marshal.dumps(request, 2)  # of any version of Python
        self._link.sendall(len(data).to_bytes(8, "big") + data)

    def run(self, language: Language, source: str, seconds: float, files: Files | None, clock: int) -> Execution:
        """`files` are those of `folder.checked`. Raises `SandboxLost` where the program did not begin, or the box died
        under it."""
        started, wall = time.monotonic(), time.time() - 1  # file systems keep a coarser time
        if files is not None:
            scratch.fill(self._folder, files, self._owner)
        most = self._config.limits.output_bytes
        assert self._process.stdout is not None and self._process.stderr is not None
        out, err, value = _Stream(most), _Stream(most), _Stream(most + 1)
        pipes = {self._process.stdout.fileno(): out, self._process.stderr.fileno(): err, self._link.fileno(): value}
        try:
            self._link.settimeout(seconds + _GRACE_SECONDS)
            self._send({"language": language, "source": source.encode("utf-8", "replace").decode()})
        except OSError as error:
            raise SandboxLost(f"the box died: {error}") from error
        ended = self._watch(pipes, started + seconds)
        code = self._process.wait() if ended == "exited" else None
        self._kill()
        for descriptor, stream in pipes.items():  # what the dead program left
            while (before := stream.written) < FLOOD_BYTES and stream.read(descriptor) and stream.written > before:
                pass
        begun, result = value.text[:1], value.text[1:]
        if begun != "+" or (language == "shell" and result) or (code is not None and code < 0):
            raise SandboxLost(f"the program did not begin, or its box died (exit code {code}): {err.text[-200:]}")
        execution = {
            "stdout": out.text, "stderr": err.text, "value": result or None, "exit_code": code,
            "truncated": any(stream.written > stream.limit for stream in pipes.values()),
            "timed_out": ended == "timed out", "seconds": time.monotonic() - started,
        }  # fmt: skip
        if files is None:
            return Execution(**execution)
        try:
            now = scratch.read(self._folder, files, self._config.limits.disk_bytes // 2, wall, clock)
            return Execution(**execution, files=now)
        except (scratch.NotKept, OSError) as reason:
            return Execution(**execution, not_kept=str(reason)[:200])

    def _watch(self, pipes: dict[int, _Stream], deadline: float) -> str:
        """Read until the program exits, its time is over, or it floods; which of them."""
        with selectors.DefaultSelector() as selector:
            for descriptor in (self._exited, *pipes):
                os.set_blocking(descriptor, False)
                selector.register(descriptor, selectors.EVENT_READ)
            while (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    if key.fd == self._exited:
                        return "exited"
                    if not pipes[key.fd].read(key.fd):
                        selector.unregister(key.fd)
                    elif pipes[key.fd].written > FLOOD_BYTES:
                        return "flooded"
        return "timed out"

    def _kill(self) -> None:
        """End all processes of the box, and wait for their end."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._first, signal.SIGKILL)
        with selectors.DefaultSelector() as selector:
            selector.register(self._first, selectors.EVENT_READ)
            if not selector.select(_GRACE_SECONDS):
                raise SandboxLost("the processes of a box do not end")

    def close(self) -> None:
        """End all that is in it."""
        self._process.kill()  # and with it, all of the box (`--die-with-parent`)
        with self._process:  # waits for its end
            self._open.close()


def _pipe(data: bytes, given: contextlib.ExitStack) -> int:
    """A descriptor from which another process reads `data`, which fits in a pipe."""
    read, write = os.pipe()
    given.callback(os.close, read)
    with open(write, "wb") as file:
        file.write(data)
    return read
