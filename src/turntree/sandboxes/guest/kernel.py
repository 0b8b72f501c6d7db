"""System calls of the guest beyond the standard library: privileges, Landlock, seccomp (all by ctypes)."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from dataclasses import dataclass

_PDEATHSIG, _SET_DUMPABLE, _SET_SECCOMP, _CAPBSET_DROP, _NO_NEW_PRIVS = 1, 4, 22, 24, 38
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _prctl(option: int, *arguments: int | ctypes.c_void_p) -> None:
    padded = [a if isinstance(a, ctypes.c_void_p) else ctypes.c_ulong(a) for a in (*arguments, 0, 0, 0, 0)[:4]]
    _check(_libc.prctl(option, *padded), f"prctl {option}")


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


_NEW_MOUNTS = 0x00020000
_READ_ONLY, _NO_SETUID, _NO_DEVICES, _NO_EXECUTION, _REMOUNT, _BIND = 1, 2, 4, 8, 32, 4096
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/pts")


def mount_scratch(folder: str, size: int, files: int) -> None:
    """An empty folder in memory for anyone, of at most `size` bytes and `files` files, seen by this process and what it
    starts. Devices can be written to as before, but the times of those of the host stay as they are."""
    _check(_libc.unshare(_NEW_MOUNTS), "a mount space")
    options = f"size={size},nr_inodes={files + 1},mode=0777".encode()  # the folder is a file, too
    tmpfs, flags = b"tmpfs", ctypes.c_ulong(_NO_SETUID | _NO_DEVICES)
    _check(_libc.mount(tmpfs, folder.encode(), tmpfs, flags, options), f"a scratch folder at {folder}")
    for path in filter(os.path.exists, _DEVICES):
        flags = _REMOUNT | _BIND | _READ_ONLY | _NO_SETUID | (_NO_EXECUTION if os.path.isdir(path) else 0)
        _check(_libc.mount(None, path.encode(), None, ctypes.c_ulong(flags), None), f"{path} read-only")


NAMES = "/run/names"  # where /etc/passwd and /etc/group lead


def mount_names(uid: int | None) -> None:
    """Call the user of programs, whose number differs from box to box, `user`: listings of files then repeat."""
    number = os.getuid() if uid is None else uid
    tmpfs, flags = b"tmpfs", _NO_SETUID | _NO_DEVICES | _NO_EXECUTION
    size = ctypes.c_char_p(b"size=16k,nr_inodes=4,mode=0755")
    _check(_libc.mount(tmpfs, NAMES.encode(), tmpfs, ctypes.c_ulong(flags), size), "a folder of names")
    for name, line in (("passwd", f"user:x:{number}:{number}::/tmp:/bin/sh"), ("group", f"user:x:{number}:")):
        with open(os.path.join(NAMES, name), "w", encoding="ascii") as file:
            file.write(f"{line}\n")
        os.chmod(os.path.join(NAMES, name), 0o644)
    flags = ctypes.c_ulong(flags | _REMOUNT | _BIND | _READ_ONLY)
    _check(_libc.mount(None, NAMES.encode(), None, flags, None), "names read-only")


def io_priority() -> int:
    return _check(_libc.syscall(_IOPRIO_GET[_column()], 1, 0), "ioprio_get")


def _column() -> int:
    """The column of this machine's numbers in the tables below. Raises `OSError` for an unknown architecture."""
    machine = os.uname().machine
    if machine not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no system-call filter for {machine}")
    return list(_MACHINES).index(machine)


def hide() -> None:
    """No other process may read this one's memory or descriptors."""
    _prctl(_SET_DUMPABLE, 0)


def die_with_parent() -> None:
    _prctl(_PDEATHSIG, 9)


# Landlock: linux/landlock.h

_ABI_RIGHTS = {3: 15, 5: 16}  # how many file rights an ABI handles; before the third, truncation is not among them
_READ = 1 << 0 | 1 << 2 | 1 << 3  # execute, read a file, read a folder
_OF_A_FILE = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14  # execute, write, read, truncate
_SUPERVISED_NETWORK, _SUPERVISED_SCOPES = 0b11, 0b11  # bind and connect TCP; abstract sockets and signals


def landlock(readable: list[str], writable: list[str]) -> None:
    """Deny every file but these (for good, children included), TCP from ABI 4 on, signals to others from ABI 6 on.

    Raises `OSError` where the kernel has no Landlock, or one without control over truncation (before Linux 6.2).
    """
    numbers = (444, 445, 446)  # the same on every architecture
    abi = _check(_libc.syscall(numbers[0], None, ctypes.c_size_t(0), ctypes.c_uint(1)), "Landlock")
    if abi < min(_ABI_RIGHTS):
        raise OSError(errno.ENOSYS, f"Landlock has ABI {abi} here, and {min(_ABI_RIGHTS)} is needed")
    rights = (1 << max(count for first, count in _ABI_RIGHTS.items() if first <= abi)) - 1
    attributes = struct.pack(
        "QQQ", rights, _SUPERVISED_NETWORK if abi >= 4 else 0, _SUPERVISED_SCOPES if abi >= 6 else 0
    )
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = _check(_libc.syscall(numbers[0], attributes, ctypes.c_size_t(size), ctypes.c_uint(0)), "Landlock")
    for path, allowed in [*((p, _READ) for p in readable), *((p, rights) for p in writable)]:
        if not os.path.exists(path):
            continue
        if not os.path.isdir(path):
            allowed &= _OF_A_FILE
        descriptor = os.open(path, os.O_PATH)
        rule = struct.pack("=Qi", allowed, descriptor)
        _check(_libc.syscall(numbers[1], ruleset, 1, rule, ctypes.c_uint(0)), f"Landlock rule for {path}")
        os.close(descriptor)
    _check(_libc.syscall(numbers[2], ruleset, ctypes.c_uint(0)), "Landlock")
    os.close(ruleset)


# seccomp: linux/seccomp.h, linux/filter.h

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_AF_UNIX = 1
_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # and what the kernel calls them
_NEW_NAMESPACES = 0x7E020080  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET,TIME}

# name: (x86_64, aarch64), None where the architecture has no such call
_KERNEL_SURFACE: dict[str, tuple[int | None, int | None]] = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsmount": (432, 432), "mount_setattr": (442, 442), "swapon": (167, 224), "swapoff": (168, 225),
    "reboot": (169, 142), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "bpf": (321, 280), "perf_event_open": (298, 241),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "io_uring_setup": (425, 425),
    "userfaultfd": (323, 282), "open_by_handle_at": (304, 265), "pidfd_getfd": (438, 438), "acct": (163, 89),
    "quotactl": (179, 60), "syslog": (103, 116), "memfd_secret": (447, 447), "memfd_create": (319, 279),
    # what outlives a program: objects of System V and POSIX, which are found by number as well as by name
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193),
    "semctl": (66, 191), "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188),
    "msgctl": (71, 187), "mq_open": (240, 180), "mq_unlink": (241, 181), "mq_timedsend": (242, 182),
    "mq_timedreceive": (243, 183), "mq_notify": (244, 184), "mq_getsetattr": (245, 185),
    # what acts on other processes of the same user, among them the guest that forks the next program
    "setpriority": (141, 140), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122), "sched_setattr": (314, 274), "ioprio_set": (251, 30),
    "migrate_pages": (256, 238), "move_pages": (279, 239), "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    # what reveals files that others use
    "inotify_init": (253, None), "inotify_init1": (294, 26), "inotify_add_watch": (254, 27),
    "fanotify_init": (300, 262), "fanotify_mark": (301, 263),
}  # fmt: skip
# what reaches other processes, or the owner, mode and times of any file, where the program runs directly
# on the host (Landlock does not cover these)
_HOST_SURFACE: dict[str, tuple[int | None, int | None]] = {
    "fork": (57, None), "vfork": (58, None), "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424),
    "flock": (73, 32), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None),
    "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5),
    "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "setxattrat": (463, 463), "removexattrat": (466, 466), "file_setattr": (469, 469),
}  # fmt: skip
_CLONE, _CLONE3, _SOCKET, _FCNTL, _IOCTL, _PRLIMIT = (56, 220), (435, 435), (41, 198), (72, 25), (16, 29), (302, 261)
_IOPRIO_GET = (252, 31)
_WATCH_COMMANDS = (1024, 1026)  # F_SETLEASE, F_NOTIFY: to be told when others open or change a file
_OWNER_COMMANDS = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX: a signal to another process on input
_OWNER_REQUESTS = (0x8901, 0x8902)  # FIOSETOWN, SIOCSPGRP


@dataclass(frozen=True)
class _Instruction:
    code: int
    k: int
    yes: int = 0
    no: int = 0

    def packed(self) -> bytes:
        return struct.pack("HBBI", self.code, self.yes, self.no, self.k)


def _refuse(number: int, error: int = errno.EPERM) -> list[_Instruction]:
    return [_Instruction(_EQUAL, number, 0, 1), _Instruction(_RETURN, _ERRNO | error)]


def _refuse_unless(number: int, argument: int, tests: list[_Instruction]) -> list[_Instruction]:
    """`tests` look at the call's argument and fall through to the refusal or skip it."""
    body = [_Instruction(_LOAD, _ARGUMENTS + 8 * argument), *tests, _Instruction(_RETURN, _ERRNO | errno.EPERM)]
    body.append(_Instruction(_LOAD, _NUMBER))
    return [_Instruction(_EQUAL, number, 0, len(body)), *body]


def _refuse_values(number: int, argument: int, values: tuple[int, ...]) -> list[_Instruction]:
    tests = [_Instruction(_EQUAL, value, len(values) - 1 - i, 0) for i, value in enumerate(values[:-1])]
    return _refuse_unless(number, argument, [*tests, _Instruction(_EQUAL, values[-1], 0, 1)])


def _program(machine: str, alone: bool) -> list[_Instruction]:
    """`alone`: the box has a process space of its own, so programs may start and signal processes."""
    column, architecture = list(_MACHINES).index(machine), _MACHINES[machine]
    program = [
        _Instruction(_LOAD, _ARCHITECTURE), _Instruction(_EQUAL, architecture, 1, 0), _Instruction(_RETURN, _KILL),
        _Instruction(_LOAD, _NUMBER),
    ]  # fmt: skip
    if machine == "x86_64":  # the x32 calls are the same ones under other numbers
        program += [_Instruction(_AT_LEAST, 0x40000000, 0, 1), _Instruction(_RETURN, _ERRNO | errno.EPERM)]
    refused = _KERNEL_SURFACE if alone else _KERNEL_SURFACE | _HOST_SURFACE
    for numbers in refused.values():
        number = numbers[column]
        program += _refuse(number) if number is not None else []
    program += _refuse(_CLONE3[column], errno.ENOSYS)  # its flags are out of sight; the C library then uses clone
    clone, socket = _CLONE[column], _SOCKET[column]
    if alone:
        program += _refuse_unless(clone, 0, [_Instruction(_ANY_BIT, _NEW_NAMESPACES, 0, 1)])
        program += _refuse_unless(socket, 0, [_Instruction(_EQUAL, _AF_UNIX, 1, 0)])
    else:
        program += _refuse(clone)  # threads too: only a user id of its own would bound their number
        program += _refuse(socket)
        program += _refuse_values(_FCNTL[column], 1, _OWNER_COMMANDS)
        program += _refuse_values(_IOCTL[column], 1, _OWNER_REQUESTS)
    program += _refuse_values(_FCNTL[column], 1, _WATCH_COMMANDS)
    program += _refuse_unless(_PRLIMIT[column], 0, [_Instruction(_EQUAL, 0, 1, 0)])  # its own limits only
    return [*program, _Instruction(_RETURN, _ALLOW)]


class SystemCallFilter:
    """Assembled once, applied in each program's process. Raises `OSError` for an unknown architecture."""

    def __init__(self, *, alone: bool) -> None:
        instructions = _program(list(_MACHINES)[_column()], alone)
        self._code = ctypes.create_string_buffer(b"".join(i.packed() for i in instructions))
        self._header = ctypes.create_string_buffer(
            struct.pack("HxxxxxxQ", len(instructions), ctypes.addressof(self._code))
        )

    def apply(self) -> None:
        """Apply to this process and its children; it cannot be undone."""
        _prctl(_SET_SECCOMP, 2, ctypes.c_void_p(ctypes.addressof(self._header)))
