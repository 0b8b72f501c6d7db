"""System calls of the guest beyond the standard library: its own file system, process space and privileges (ctypes)."""

from __future__ import annotations

import ctypes
import fcntl
import os
import stat
import struct
from typing import Any

_PDEATHSIG, _SET_DUMPABLE, _SET_SECCOMP, _CAPBSET_DROP, _NO_NEW_PRIVS = 1, 4, 22, 24, 38
_NEW_MOUNTS, _NEW_PROCESSES = 0x00020000, 0x20000000
_READ_ONLY, _NO_SETUID, _NO_DEVICES, _NO_EXECUTION, _REMOUNT, _BIND = 1, 2, 4, 8, 32, 4096
_OFD_SETLK = 37
_PRIVATE = 1 << 18 | 1 << 14  # and all that is mounted below
_libc = ctypes.CDLL(None, use_errno=True)

_TIME = 1_577_836_800  # of the last change of copies: the same in every box
OWN = "/run/own"  # copies that belong to this box
_LISTS = ("/proc/locks", "/proc/keys", "/proc/key-users", "/proc/timer_list", "/proc/interrupts")
_FRESH = ("/", "/dev", "/dev/pts", "/proc")  # what bubblewrap made for this box


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _prctl(option: int, *arguments: int | ctypes.c_void_p) -> None:
    padded = [a if isinstance(a, ctypes.c_void_p) else ctypes.c_ulong(a) for a in (*arguments, 0, 0, 0, 0)[:4]]
    _check(_libc.prctl(option, *padded), f"prctl {option}")


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind)]
    given = None if options is None else os.fsencode(options)
    _check(_libc.mount(*words, ctypes.c_ulong(flags), given), f"mount {kind or source or ''} at {target}")


def drop_privileges(uid: int | None) -> None:
    """Switch to user `uid` (None: keep the current one), drop groups and capabilities, and block `/proc` and ptrace
    access."""
    for capability in range(64) if os.geteuid() == 0 else ():
        if _libc.prctl(_CAPBSET_DROP, ctypes.c_ulong(capability), *[ctypes.c_ulong(0)] * 3) < 0:
            break  # past the last capability of this kernel, or the bounding set is out of reach (and then harmless)
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    header, nothing = struct.pack("Ii", 0x20080522, 0), bytes(24)
    _check(_libc.capset(header, nothing), "capset")
    _prctl(_NO_NEW_PRIVS, 1)
    hide()


def hide() -> None:
    """No other process may read this one's memory or descriptors."""
    _prctl(_SET_DUMPABLE, 0)


def die_with_parent() -> None:
    _prctl(_PDEATHSIG, 9)


def own(uid: int | None) -> None:
    """Give the box an object of its own for each one that it shares with the host: locks, leases and watches belong to
    an object, so that none of another box is ever met. A folder becomes a read-only overlay of itself; a file is
    copied, a device made anew. Only root may make a device: without root those of the host stay (`hold_devices`).

    The user of programs, whose number differs from box to box, is called `user`: listings of files then repeat.
    """
    _check(_libc.unshare(_NEW_MOUNTS), "a mount space")
    _mount(None, "/", None, _PRIVATE)
    shared = [(path, os.open(path, os.O_PATH)) for path in _mounted() if path not in _FRESH and path[:6] != "/proc/"]
    _mount("tmpfs", OWN, "tmpfs", _NO_SETUID | _NO_EXECUTION, "mode=0755")
    os.mkdir(f"{OWN}/nothing")
    for number, (path, opened) in enumerate(shared):
        status = os.fstat(opened)
        if stat.S_ISDIR(status.st_mode):
            os.fchdir(opened)  # a name without anything to escape, whatever is mounted over it meanwhile
            flags = _READ_ONLY | _NO_SETUID | _NO_DEVICES
            _mount("overlay", path, "overlay", flags, f"lowerdir=.:{OWN}/nothing")
        else:
            _own_file(path, f"{OWN}/{number}", f"/proc/self/fd/{opened}", status)
        os.close(opened)
    os.chdir("/")
    number = os.getuid() if uid is None else uid
    _write(f"{OWN}/passwd", f"user:x:{number}:{number}::/tmp:/bin/sh\n".encode())
    _write(f"{OWN}/group", f"user:x:{number}:\n".encode())
    _mount(None, OWN, None, _REMOUNT | _BIND | _READ_ONLY | _NO_SETUID | _NO_EXECUTION)


def _mounted() -> list[str]:
    with open("/proc/self/mountinfo", "rb") as file:
        return [os.fsdecode(line.split()[4].decode("unicode_escape").encode("latin-1")) for line in file]


def _own_file(path: str, copy: str, opened: str, status: os.stat_result) -> None:
    flags = _REMOUNT | _BIND | _READ_ONLY | _NO_SETUID | _NO_EXECUTION
    if stat.S_ISREG(status.st_mode):
        with open(opened, "rb") as file:
            _write(copy, file.read())
    else:
        try:
            os.mknod(copy, status.st_mode, status.st_rdev)
            os.chmod(copy, stat.S_IMODE(status.st_mode))
            os.utime(copy, (_TIME, _TIME))
        except PermissionError:
            copy = path  # it stays the host's, and only its times and mode are kept from programs
    if copy != path:
        _mount(copy, path, None, _BIND)
    _mount(None, path, None, flags)


def _write(path: str, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
    os.chmod(path, 0o644)
    os.utime(path, (_TIME, _TIME))


def hold_devices() -> list[int]:
    """Hold a shared lock of each kind on every device for as long as the box lives. Where the host's had to stay, no
    program can get one that another box could notice: one that excludes is never to be had, one that does not always
    is, and what is told to who asks is the lock of a guest, older than any of a program. Raises `OSError` where another
    process of the host excludes everybody."""
    held: list[int] = []
    for name in sorted(os.listdir("/dev")):
        path = f"/dev/{name}"
        if not stat.S_ISCHR(os.lstat(path).st_mode):
            continue
        try:
            held.append(os.open(path, os.O_RDONLY))
        except OSError:
            continue  # a terminal that nobody here has
        fcntl.flock(held[-1], fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.fcntl(held[-1], _OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))
    return held


def leave(folder: str, size: int, files: int) -> None:
    """Into a mount space of its own, in which `folder` is empty, in memory, for anyone, and takes at most `size` bytes
    and `files` files. What this process forks from now on is in a process space of its own."""
    _check(_libc.unshare(_NEW_MOUNTS | _NEW_PROCESSES), "a mount and a process space")
    options = f"size={size},nr_inodes={files + 1},mode=0777"  # the folder is a file, too
    _mount("tmpfs", folder, "tmpfs", _NO_SETUID | _NO_DEVICES, options)


def mount_processes() -> None:
    """The processes of this space alone, without the lists that name what is in others."""
    _mount("proc", "/proc", "proc", _NO_SETUID | _NO_DEVICES | _NO_EXECUTION)
    for name in filter(os.path.exists, _LISTS):
        _mount("/dev/null", name, None, _BIND)


class SystemCallFilter:
    """A compiled filter (`calls.compiled`), applied in each program's process."""

    def __init__(self, code: bytes) -> None:
        self._code = ctypes.create_string_buffer(code, len(code))
        self._header: Any = ctypes.create_string_buffer(
            struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(self._code))
        )

    def apply(self) -> None:
        """Apply to this process and its children; it cannot be undone."""
        _prctl(_SET_SECCOMP, 2, ctypes.c_void_p(ctypes.addressof(self._header)))
