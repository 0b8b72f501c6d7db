"""How a guest is confined: by bubblewrap, and by what the guest then does to itself."""

from __future__ import annotations

import base64
import os
import secrets
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turntree.core.errors import InputError
from turntree_worlds.sandboxes.calls import compiled
from turntree_worlds.sandboxes.guest.kernel import OWN
from turntree_worlds.sandboxes.limits import SandboxConfig

_PACKAGE = Path(__file__).resolve().parents[1]
GUEST_ROOT = "/run/guest"
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SYSTEM_FILES = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime")


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


class Bubblewrap:
    """Separate namespaces for everything (no network, no other process, a file system with /usr read-only).

    Bubblewrap leaves the guest a capability with which it makes the box's file system its own (`guest.kernel.own`) and
    spaces for every program; what runs or serves a program gives it up. As root, no user namespace is made: with four
    more capabilities the guest makes devices and takes an unused user id. Inside a user namespace root's programs would
    still be the host's root to the kernel, which exempts them from the limit on processes. Others get a user namespace.

    Without `--die-with-parent`: to the kernel the parent is the thread that started the box, and tools run in threads
    of one call. The guest ends when its link is hung up, as it is by the end of this process.
    """

    def __init__(self, program: str | None = None) -> None:
        found = program or shutil.which("bwrap")
        if found is None:
            raise InputError("bubblewrap is not installed")
        self._program = found

    def settings(self) -> dict[str, Any]:
        """What the guest must do to itself: the user id of programs and the system calls that they may make."""
        # an id of its own for every box: limits on processes are counted by user
        uid = 2**20 + secrets.randbelow(2**30) if os.geteuid() == 0 else None
        return {"uid": uid, "calls": base64.b64encode(compiled()).decode()}

    def command(self, config: SandboxConfig, interpreter: Interpreter) -> list[str]:
        namespaces = ["ipc", "pid", "net", "uts", "cgroup-try"]
        identity = ["--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN"]
        if os.geteuid() == 0:
            for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_MKNOD"):
                identity += ["--cap-add", capability]
        else:
            namespaces.append("user")
            identity += ["--uid", "1000", "--gid", "1000"]
        return [
            self._program, "--new-session", "--as-pid-1", "--hostname", "box",
            *(f"--unshare-{kind}" for kind in namespaces), *identity,
            *_folders("/etc", "/run", OWN), "--ro-bind", "/usr", "/usr", *_system(),
            *_read_only({interpreter.prefix: interpreter.prefix} if interpreter.prefix != "/usr" else {}),
            *_read_only({package: package for package in config.packages}),
            *_read_only({str(_PACKAGE / "sandboxes"): f"{GUEST_ROOT}/turntree_worlds/sandboxes"}),
            "--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev",
            "--tmpfs", "/dev/pts", "--remount-ro", "/dev/pts",  # all boxes would share the machine's terminals
            "--symlink", f"{OWN}/passwd", "/etc/passwd", "--symlink", f"{OWN}/group", "/etc/group",
            "--dir", "/tmp", "--remount-ro", "/", "--chdir", "/",
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


def _read_only(folders: dict[str, str]) -> list[str]:
    """Bound folders whose parents may be entered by anyone (bubblewrap would copy the mode of the host's)."""
    options: list[str] = []
    for source, target in folders.items():
        for parent in reversed(Path(target).parents[:-1]):
            if parent != Path("/usr") and Path("/usr") not in parent.parents:
                options += _folders(str(parent))
        options += ["--ro-bind", source, target]
    return options
