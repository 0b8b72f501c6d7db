"""The system calls that programs may make: an allow list, compiled by libseccomp for the machine that runs it.

Every call in it is one that containers may make by default (tests/sandboxes/test_calls.py compares it with the profile
that podman and docker have). Left out of that profile is what reaches past a box or outlives a program: budgets of the
machine (asynchronous I/O, watches, locked memory), memory that is not counted as address space, and what else ordinary
programs do not need. A call that is not listed does not exist for a program.
"""

from __future__ import annotations

import errno
import functools
import os
import tempfile

from turntree.core.errors import InputError

_WORDS = """
access chdir chmod chown close close_range copy_file_range creat dup dup2 dup3 faccessat faccessat2 fadvise64 fallocate
fchdir fchmod fchmodat fchmodat2 fchown fchownat fdatasync fgetxattr flistxattr flock fremovexattr fsetxattr fstat
fstatfs fsync ftruncate futimesat getcwd getdents getdents64 getxattr ioctl lchown lgetxattr link linkat listxattr
llistxattr lremovexattr lseek lsetxattr lstat mkdir mkdirat mknod mknodat newfstatat open openat openat2 pread64 preadv
pwrite64 pwritev read readahead readlink readlinkat readv removexattr rename renameat renameat2 rmdir sendfile setxattr
splice stat statfs statx symlink symlinkat tee truncate umask unlink unlinkat utime utimensat utimes write writev

epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 pipe pipe2 poll ppoll pselect6
select signalfd signalfd4 timerfd_create timerfd_gettime timerfd_settime

accept accept4 bind connect getpeername getsockname getsockopt listen recvfrom recvmmsg recvmsg sendmsg sendto
setsockopt shutdown

brk madvise membarrier mmap mprotect mremap msync munmap

arch_prctl capget capset execve execveat exit exit_group fork getegid geteuid getgid getgroups getpgid getpgrp getpid
getppid getresgid getresuid getrlimit getrusage getsid gettid getuid get_robust_list kill pidfd_open pidfd_send_signal
prctl rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait
rt_tgsigqueueinfo setfsgid setfsuid setgid setgroups setpgid setregid setresgid setresuid setreuid setrlimit
set_robust_list setsid set_tid_address setuid sigaltstack tgkill times tkill vfork wait4 waitid

alarm clock_getres clock_gettime clock_nanosleep getcpu getitimer getpriority getrandom gettimeofday ioprio_get
nanosleep pause restart_syscall sched_getaffinity sched_getattr sched_getparam sched_get_priority_max
sched_get_priority_min sched_getscheduler sched_rr_get_interval sched_yield setitimer sysinfo time timer_create
timer_delete timer_getoverrun timer_gettime timer_settime uname
"""
_ALLOWED = _WORDS.split()
_AF_UNIX, _NEW_NAMESPACES = 1, 0x7E020080  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET,TIME}
_LOCKS = (5, 6, 7, 36, 37, 38)  # F_GETLK, F_SETLK, F_SETLKW and those of open file descriptions
_DESCRIPTORS = (0, 1, 2, 3, 4, 1030, 1032)  # duplicates and flags, and the size of a pipe; no leases, signals, watches
# (call, argument, mask or None for equality, values): allowed with one of them
_BY_ARGUMENT: list[tuple[str, int, int | None, tuple[int, ...]]] = [
    ("clone", 0, _NEW_NAMESPACES, (0,)),
    ("socket", 0, None, (_AF_UNIX,)),
    ("socketpair", 0, None, (_AF_UNIX,)),
    ("fcntl", 1, None, _DESCRIPTORS + _LOCKS),
    ("prlimit64", 0, None, (0,)),  # its own limits only
    ("personality", 0, None, (0, 0xFFFFFFFF)),
    # its own process only, or to wait (as the end of a thread is waited for): pages of files are shared between boxes
    ("futex", 1, 0x80, (0x80,)),
    ("futex", 1, 0xFF, (0, 9)),
]


@functools.cache
def compiled() -> bytes:
    """The filter as bubblewrap takes it. Raises `InputError` where there is no libseccomp."""
    try:
        import pyseccomp
    except (ImportError, RuntimeError, OSError) as error:
        raise InputError("libseccomp is not installed") from error
    Arg, refused = pyseccomp.Arg, pyseccomp.ERRNO(errno.ENOSYS)
    rules = pyseccomp.SyscallFilter(refused)
    rules.set_attr(pyseccomp.Attr.ACT_BADARCH, refused)
    known = {name for name in {*_ALLOWED, *(name for name, *_ in _BY_ARGUMENT)} if _exists(name)}
    try:
        for name in _ALLOWED:
            if name in known:
                rules.add_rule(pyseccomp.ALLOW, name)
        for name, argument, mask, values in _BY_ARGUMENT:
            for value in values if name in known else ():
                equal = Arg(argument, pyseccomp.EQ, value)
                rules.add_rule(
                    pyseccomp.ALLOW, name, equal if mask is None else Arg(argument, pyseccomp.MASKED_EQ, mask, value)
                )
        rules.add_rule(pyseccomp.ERRNO(errno.EPERM), "socket", Arg(0, pyseccomp.NE, _AF_UNIX))
        with tempfile.TemporaryFile() as file:
            rules.export_bpf(file)
            file.seek(0)
            return file.read()
    except OSError as error:
        raise InputError(f"libseccomp compiles no filter for {os.uname().machine}") from error


def _exists(name: str) -> bool:
    """A call that this machine or its libseccomp does not know stays refused."""
    import pyseccomp

    try:
        return pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name) >= 0
    except ValueError:
        return False
