"""Pairs of programs: whatever A does, before B or beside it, B answers as in a sandbox that never saw A.

Both are Python. `tried(act)` is what `act` gives, or the name of its error; `call(name, ...)` is a system call by name.
Not among them are answers that tell of the whole machine whoever runs on it: clocks, load, free memory, counters of the
kernel, and how long something takes (also what is in the page cache). docs/design/sandbox.md names them.
"""

# ruff: noqa: E501
from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import replace

from hostile import CONFIG

from turntree_worlds.sandboxes.sandbox import Sandbox

HOLD = 1.0  # seconds for which A stays as it is
PRELUDE = r"""
import ctypes, errno, fcntl, mmap, os, resource, select, signal, socket, stat, struct, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
NUMBERS = dict(
    io_setup=(206, 0), io_uring_setup=(425, 425), inotify_init1=(294, 26), inotify_add_watch=(254, 27), bpf=(321, 280),
    fanotify_init=(300, 262), add_key=(248, 217), request_key=(249, 218), keyctl=(250, 219), mq_open=(240, 180),
    shmget=(29, 194), semget=(64, 190), msgget=(68, 186), memfd_create=(319, 279), unshare=(272, 97), mlock=(149, 228),
    perf_event_open=(298, 241), userfaultfd=(323, 282), timer_create=(222, 107), ioprio_set=(251, 30),
    ioprio_get=(252, 31), sethostname=(170, 161), settimeofday=(164, 170), adjtimex=(159, 171), personality=(135, 92),
    futex=(202, 98), preadv2=(327, 286), quotactl=(179, 60), process_vm_readv=(310, 270), kcmp=(312, 272),
    cachestat=(451, 451), swapon=(167, 224), sched_setattr=(314, 274), memfd_secret=(447, 447), sync=(162, 81),
)
COLUMN = 0 if os.uname().machine == "x86_64" else 1
def call(name, *arguments):
    result = libc.syscall(NUMBERS[name][COLUMN], *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return result
def tried(act, *arguments):
    try:
        return act(*arguments)
    except (OSError, MemoryError, ValueError, RuntimeError) as error:
        return errno.errorcode.get(getattr(error, "errno", None) or 0, type(error).__name__)
def most(act, limit):
    kept = []
    while len(kept) < limit:
        made = tried(act)
        if isinstance(made, str):
            return len(kept), made
        kept.append(made); KEPT.append(made)
    return len(kept), None
KEPT = []
def everywhere(act):  # in as many processes as there may be, which all stay
    act()
    for _ in range(64):
        try:
            if os.fork() == 0:
                act(); time.sleep(99)
        except OSError:
            break
SHARED = [
    "/usr", "/usr/bin/env", os.path.realpath("/bin/sh"), sys.executable, os.__file__, os.path.dirname(os.__file__),
    "/etc/ld.so.cache", "/etc/localtime", "/etc/passwd", "/etc/group", "/etc/alternatives", "/etc", "/", "/dev",
    "/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/pts", "/dev/shm", "/run",
    "/run/runner.py", "/proc/self/exe", "/proc",
    "/proc/1/cmdline", "/proc/sys/kernel/pid_max", "/proc/sys/fs/aio-max-nr", "/tmp",
]
DEVICES = ["/dev/null", "/dev/zero", "/dev/full"]
def lock(kind, type, start=0, length=0):  # struct flock
    return lambda file: fcntl.fcntl(file, kind, struct.pack("hhqqi4x", type, 0, start, length, 0))
READ, WRITE, OFD_GET, OFD_SET = 0, 1, 36, 37
def on(paths, act, flags=os.O_RDONLY):
    said = []
    for path in paths:
        file = tried(os.open, path, flags)
        KEPT.append(file)
        said.append(file if isinstance(file, str) else tried(act, file))
    return [one.hex() if isinstance(one, bytes) else one for one in said]
"""

_LIMITS = "sorted((n, resource.getrlimit(getattr(resource, n))) for n in dir(resource) if n[:7] == 'RLIMIT_')"
_LOOK = "KEPT.append(tried(os.open, path, os.O_RDONLY))"
_CAPACITY = """
reader, writer = os.pipe(); os.set_blocking(writer, False); written = 0
try:
    while True: written += os.write(writer, bytes(4096))
except BlockingIOError: pass
"""

# name: what A does, what B answers with (its last line)
LOCKS = {
    "flock, exclusive": (
        "on(SHARED, lambda f: fcntl.flock(f, 6))", "on(SHARED, lambda f: fcntl.flock(f, 6))"),
    "flock, shared against exclusive": (
        "on(SHARED, lambda f: fcntl.flock(f, 5))", "on(SHARED, lambda f: fcntl.flock(f, 6))"),
    "POSIX read locks": (
        "on(SHARED, lock(fcntl.F_SETLK, READ))",
        "on(SHARED, lock(fcntl.F_SETLK, READ)), on(SHARED, lock(fcntl.F_GETLK, WRITE))"),
    "POSIX write locks on devices": (
        "on(DEVICES, lock(fcntl.F_SETLK, WRITE), os.O_RDWR)",
        "on(DEVICES, lock(fcntl.F_SETLK, WRITE), os.O_RDWR), on(DEVICES, lock(fcntl.F_GETLK, WRITE), os.O_RDWR)"),
    "POSIX locks of ranges": (
        "for n in range(500): on(['/usr/bin/env'], lock(fcntl.F_SETLK, READ, 2 * n, 1))",
        "on(['/usr/bin/env'], lock(fcntl.F_GETLK, WRITE, 7, 0))"),
    "locks of open file descriptions": (
        "on(SHARED, lock(OFD_SET, READ)); on(DEVICES, lock(OFD_SET, WRITE), os.O_RDWR)",
        "on(SHARED, lock(OFD_GET, WRITE)), on(DEVICES, lock(OFD_SET, WRITE), os.O_RDWR)"),
    "flock of the shell's tool": (
        "subprocess.Popen(['flock', '/usr/bin/env', 'sleep', '99']); subprocess.Popen(['flock', '/dev/null', 'sleep', '99'])",
        "[subprocess.run(['flock', '-n', path, 'echo', 'got'], capture_output=True).stdout for path in SHARED]"),
    "leases": (
        "on(SHARED, lambda f: fcntl.fcntl(f, 1024, 0)); on(SHARED, lambda f: fcntl.fcntl(f, 1024, 1))",
        "on(SHARED, lambda f: fcntl.fcntl(f, 1024, 0)), on(SHARED, lambda f: fcntl.fcntl(f, 1025)),"
        "on(SHARED, os.fstat, os.O_RDONLY | os.O_NONBLOCK) != []"),
    "a database in the scratch folder": (
        "import sqlite3; c = sqlite3.connect('/tmp/a.db', isolation_level=None)\n"
        "try: c.execute('begin exclusive')\n"
        "except sqlite3.Error: pass",
        "import sqlite3\ndef play():\n    c = sqlite3.connect('/tmp/a.db', timeout=0.1)\n"
        "    c.execute('create table t (x)'); c.execute('insert into t values (1)'); c.commit()\n"
        "    return c.execute('select * from t').fetchall()\n"
        "try: said = play()\nexcept sqlite3.Error as error: said = str(error)\nsaid"),
    "the list of locks": (
        "on(SHARED, lambda f: fcntl.flock(f, 6)); on(SHARED, lock(OFD_SET, READ))",
        "[open('/proc/' + name).read() for name in ('locks', 'keys', 'key-users')]"),
}  # fmt: skip
PAIRS = LOCKS | {
    "notices of folders": (
        "on(SHARED, lambda f: fcntl.fcntl(f, 1026, 0x80000007))", "on(SHARED, lambda f: fcntl.fcntl(f, 1026, 7))"),
    "asynchronous I/O": (
        "everywhere(lambda: [tried(call, 'io_setup', 65536, ctypes.byref(ctypes.c_ulong())) for _ in range(4)])",
        "[tried(call, 'io_setup', n, ctypes.byref(ctypes.c_ulong())) for n in (1, 128, 65536)],"
        "open('/proc/sys/fs/aio-nr').read()"),
    "io_uring": (
        "everywhere(lambda: most(lambda: call('io_uring_setup', 4096, bytes(120)), 50))",
        "tried(call, 'io_uring_setup', 8, bytes(120))"),
    "instances of inotify": (
        "everywhere(lambda: most(lambda: call('inotify_init1', 0), 50))", "most(lambda: call('inotify_init1', 0), 20)"),
    "watches of inotify": (
        "f = tried(call, 'inotify_init1', 0)\nfor p in SHARED: tried(call, 'inotify_add_watch', f if type(f) is int else -1, p.encode(), 0xfff)",
        "f = tried(call, 'inotify_init1', 0)\nf, tried(call, 'inotify_add_watch', f if type(f) is int else -1, b'/usr', 0xfff)"),
    "fanotify": ("most(lambda: call('fanotify_init', 0, 0), 200)", "tried(call, 'fanotify_init', 0x200, 0)"),
    "keys": (
        "for ring in (-1, -2, -3, -4, -5): tried(call, 'add_key', b'user', b'note', b'hello', 5, ring)",
        "[tried(call, 'request_key', b'user', b'note', None, ring) for ring in (-3, -4, -5)],"
        "open('/proc/keys').read()"),
    "the budget of keys": (
        "for n in range(300): tried(call, 'add_key', b'user', b'k%d' % n, bytes(90), 90, -4)",
        "tried(call, 'add_key', b'user', b'mine', b'x', 1, -4), tried(call, 'keyctl', 0, -4, 0)"),
    "POSIX queues": (
        "most(lambda: call('mq_open', b'note%d' % len(KEPT), 0o102, 0o666, None), 300)",
        "tried(call, 'mq_open', b'note0', 0o2, 0, None), most(lambda: call('mq_open', b'b%d' % len(KEPT), 0o102, 0o600, None), 9)"),
    "System V shared memory": (
        "[tried(call, 'shmget', key, 4096, 0o1666) for key in range(1, 400)]",
        "[tried(call, 'shmget', 7, 4096, flag) for flag in (0, 0o1666)], open('/proc/sysvipc/shm').read()"),
    "System V semaphores": (
        "[tried(call, 'semget', key, 250, 0o1666) for key in range(1, 400)]",
        "[tried(call, 'semget', 7, 1, flag) for flag in (0, 0o1666)], open('/proc/sysvipc/sem').read()"),
    "System V queues": (
        "[tried(call, 'msgget', key, 0o1666) for key in range(1, 400)]",
        "[tried(call, 'msgget', 7, flag) for flag in (0, 0o1666)], open('/proc/sysvipc/msg').read()"),
    "/dev/shm": (
        "tried(lambda: open('/dev/shm/note', 'w').write('x' * 9999))",
        "os.listdir('/dev/shm'), tried(lambda: open('/dev/shm/mine', 'w').write('x'))"),
    "named semaphores": (
        "libc.sem_open(b'/note', 0o100, 0o666, 1)",
        "libc.sem_open.restype = ctypes.c_void_p; libc.sem_open(b'/note', 0)"),
    "names of sockets without a file": (
        "for n in range(20):\n    s = socket.socket(socket.AF_UNIX); KEPT.append(s); tried(s.bind, '\\0note%d' % n); tried(s.listen)",
        "s = [socket.socket(socket.AF_UNIX) for _ in range(20)]\n"
        "[tried(x.connect, '\\0note%d' % n) for n, x in enumerate(s)], [tried(x.bind, '\\0note%d' % n) for n, x in enumerate(s)]"),
    "sockets with a file": (
        "s = socket.socket(socket.AF_UNIX); s.bind('/tmp/note'); s.listen()",
        "s = socket.socket(socket.AF_UNIX); tried(s.connect, '/tmp/note'), tried(s.bind, '/tmp/note')"),
    "the list of sockets": (
        "for n in range(9): KEPT.append(socket.socket(socket.AF_UNIX)); KEPT[-1].bind('\\0x%d' % n)",
        "len(open('/proc/net/unix').readlines()), open('/proc/net/sockstat').read().split('UDP')[0][:40] != ''"),
    "ports": (
        "for port in range(8000, 8040): KEPT.append(tried(socket.create_server, ('127.0.0.1', port)))",
        "[type(tried(socket.create_server, (host, 8000))).__name__ for host in ('127.0.0.1', '0.0.0.0')]"),
    "other families of sockets": (
        "[tried(socket.socket, family, kind) for family in range(50) for kind in (1, 2, 3, 5)]",
        "[[tried(socket.socket, family, kind) for kind in (2, 3, 5)] for family in (2, 10, 16, 17, 38, 40)]"),
    "descriptors in flight": (
        "everywhere(lambda: [tried(socket.send_fds, s, [b'x'], [0] * 250) for s in socket.socketpair() for _ in range(9)])",
        "a, b = socket.socketpair(); tried(socket.send_fds, a, [b'x'], [0]), a.send(b'y'), b.recv(9)"),
    "the number of processes": (
        "everywhere(lambda: None)",
        "n = 0\ntry:\n    while n < 99:\n        if os.fork() == 0: time.sleep(99)\n        n += 1\n"
        "except OSError: pass\nn"),
    "the number of threads": (
        "threading.stack_size(65536)\nmost(lambda: threading.Thread(target=time.sleep, args=(99,), daemon=True).start() or 1, 99)",
        "threading.stack_size(65536)\n"
        "most(lambda: threading.Thread(target=time.sleep, args=(9,), daemon=True).start() or 1, 99)"),
    "the numbers of processes": (
        "for _ in range(40):\n    if os.fork() == 0: os._exit(0)\n    os.wait()",
        "child = os.fork() or os._exit(0)\nos.getpid(), os.getppid(), child, open('/proc/sys/kernel/ns_last_pid').read()"),
    "processes left behind": (
        "for _ in range(3): subprocess.Popen(['sleep', '1000'], start_new_session=True)",
        "sorted(n for n in os.listdir('/proc') if n.isdigit()), tried(os.kill, -1, 0)"),
    "orphans that do not end": (
        "for _ in range(5):\n    if os.fork() == 0:\n        os.setsid()\n        for s in range(1, 65): tried(signal.signal, s, signal.SIG_IGN)\n"
        "        if os.fork(): os._exit(0)\n        time.sleep(1000)",
        "sorted(n for n in os.listdir('/proc') if n.isdigit())"),
    "signals to everybody": (
        "for n in (-1, 1, os.getppid()):\n    for s in range(0, 65):\n        if s not in (9, 19) or n != -1: tried(os.kill, n, s)",
        "[str(signal.getsignal(s)) for s in (1, 2, 13, 15, 17)], signal.pthread_sigmask(0, []), signal.sigpending()"),
    "signals that wait": (
        "signal.pthread_sigmask(0, range(34, 65))\n"
        "everywhere(lambda: [libc.sigqueue(os.getpid(), 34, None) for _ in range(9999)])",
        "signal.pthread_sigmask(0, [40]); n = 0\nwhile n < 9999 and libc.sigqueue(os.getpid(), 40, None) == 0: n += 1\nn"),
    "timers": (
        "everywhere(lambda: [libc.syscall(NUMBERS['timer_create'][COLUMN], 1, None, ctypes.byref(ctypes.c_int())) for _ in range(9999)])",
        "n = 0\nwhile n < 9999 and libc.syscall(NUMBERS['timer_create'][COLUMN], 1, None, ctypes.byref(ctypes.c_int())) == 0: n += 1\nn"),
    "alarms": ("signal.setitimer(0, 1000); signal.alarm(999)", "signal.getitimer(0), signal.alarm(0)"),
    "the scratch folder": (
        "os.makedirs('/tmp/a/b'); open('/tmp/a/b/c', 'w').write('x'); os.symlink('/usr', '/tmp/l'); os.mkfifo('/tmp/p')",
        "os.listdir('/tmp'), os.listdir('.'), os.stat('.').st_nlink, oct(os.stat('.').st_mode)"),
    "a closed scratch folder": (
        "open('/tmp/x', 'w').close(); os.chmod('/tmp/x', 0); tried(os.chmod, '/tmp', 0)",
        "oct(os.stat('/tmp').st_mode), open('/tmp/x', 'x').write('y'), os.access('/tmp', 7)"),
    "a full disk": (
        "f = open('/tmp/big', 'wb')\ntry:\n    while True: f.write(bytes(10**5)); f.flush()\nexcept OSError: pass",
        "s = os.statvfs('/tmp'); s.f_blocks, s.f_bfree, s.f_files, s.f_ffree, open('/tmp/y', 'wb').write(bytes(10**6))"),
    "a disk that is reserved": (
        "f = os.open('/tmp/big', os.O_CREAT | os.O_RDWR); tried(os.posix_fallocate, f, 0, 4 * 10**6)",
        "f = os.open('/tmp/big', os.O_CREAT | os.O_RDWR); tried(os.posix_fallocate, f, 0, 10**6), os.statvfs('.').f_bfree"),
    "the numbers of files": (
        "for n in range(500): open(f'/tmp/{n}', 'w').close()", "open('/tmp/a', 'w').close(); os.stat('/tmp/a').st_ino"),
    "files without names": (
        "KEPT.append(tried(call, 'memfd_create', b'note', 0)); KEPT.append(tried(os.open, '/tmp', os.O_TMPFILE | os.O_RDWR))",
        "tried(call, 'memfd_create', b'note', 0), tried(call, 'memfd_secret', 0), sorted(os.listdir('/proc/self/fd'))[:4]"),
    "open files": (
        "everywhere(lambda: most(lambda: os.open('/dev/null', 0), 9999))", "most(lambda: os.open('/dev/null', 0), 9999)"),
    "descriptors of events": (
        "everywhere(lambda: most(lambda: os.eventfd(0), 9999))",
        "most(lambda: os.eventfd(0), 9999)" if sys.version_info >= (3, 10) else "1"),
    "watches of epoll": (
        "def many():\n    es = [select.epoll() for _ in range(20)]; KEPT.extend(es)\n"
        "    fs = [os.pipe() for _ in range(9)]\n    for e in es:\n        for f, _ in fs: e.register(f)\neverywhere(many)",
        "e = select.epoll(); most(lambda: e.register(os.pipe()[0]) or 1, 9)"),
    "the size of pipes": (
        "everywhere(lambda: [tried(fcntl.fcntl, f, 1031, 2**20) for _ in range(25) for f in tried(os.pipe)[:1]])",
        _CAPACITY + "written, fcntl.fcntl(writer, 1032), tried(fcntl.fcntl, writer, 1031, 2**20)"),
    "locked memory": (
        "m = mmap.mmap(-1, 2**20); tried(call, 'mlock', ctypes.addressof(ctypes.c_char.from_buffer(m)), 2**20)",
        "m = mmap.mmap(-1, 4096); tried(call, 'mlock', ctypes.addressof(ctypes.c_char.from_buffer(m)), 4096)"),
    "much memory": (
        "everywhere(lambda: KEPT.append(tried(bytearray, 10**7)))", "len(bytearray(10**8)), tried(bytearray, 10**10)"),
    "user namespaces": (
        "everywhere(lambda: [tried(call, 'unshare', 1 << 28) for _ in range(9)])",
        "[tried(call, 'unshare', flag) for flag in (1 << 28, 1 << 17, 1 << 26, 1 << 27, 1 << 29, 1 << 30)]"),
    "priorities": (
        "for kind, who in ((0, 0), (0, 1), (1, 0), (2, 0), (2, os.getuid())): tried(os.setpriority, kind, who, 19)",
        "[tried(os.getpriority, kind, 0) for kind in (0, 1, 2)], tried(os.nice, 0)"),
    "schedules": (
        "for p in (0, 1, 2): tried(os.sched_setscheduler, p, os.SCHED_IDLE, os.sched_param(0)); tried(os.sched_setaffinity, p, [0])",
        "os.sched_getscheduler(0), os.sched_getaffinity(0), [tried(os.sched_getscheduler, p) for p in (1, 2)]"),
    "priorities of I/O": (
        "for kind, who in ((1, 0), (1, 1), (2, 0), (3, 0), (3, os.getuid())): tried(call, 'ioprio_set', kind, who, 3 << 13)",
        "[tried(call, 'ioprio_get', kind, who) for kind, who in ((1, 0), (1, 1), (2, 0), (3, os.getuid()))]"),
    "limits": (
        "for p in (0, 1, os.getppid()):\n    for k in range(16): tried(resource.prlimit, p, k, (1, 1)) if p else None",
        _LIMITS),
    "core dumps": (
        "subprocess.run(['sh', '-c', 'ulimit -c unlimited; kill -SEGV $$']); subprocess.run(['sh', '-c', 'kill -ABRT $$'])",
        "sorted(os.listdir('/tmp')), resource.getrlimit(resource.RLIMIT_CORE), open('/proc/sys/kernel/core_pattern').read()"),
    "attributes": (
        "[tried(os.setxattr, p, n, b'hello') for p in SHARED for n in ('user.note', 'security.note', 'trusted.note')]",
        "[tried(os.listxattr, p) for p in SHARED], [tried(os.setxattr, p, 'user.mine', b'x') for p in SHARED[:-1]]"),
    "flags of files": (
        "for p in [*SHARED, '/tmp']: on([p], lambda f: [tried(fcntl.ioctl, f, 0x40086602, struct.pack('l', x)) for x in (8, 64, 128, 16, 32)])",
        "on(SHARED, lambda f: fcntl.ioctl(f, 0x80086601, bytes(8))),"
        "on(SHARED[:-1], lambda f: fcntl.ioctl(f, 0x40086602, struct.pack('l', 64)))"),
    "modes and times of shared files": (
        "for p in SHARED[:-1]:\n    tried(os.chmod, p, 0); tried(os.utime, p, (1, 1)); tried(os.chown, p, os.getuid(), -1); tried(os.truncate, p, 0)",
        "[(s.st_mode, s.st_uid, int(s.st_mtime) > 10) for s in map(os.stat, SHARED[:11])], [tried(os.chmod, p, 0o777) for p in SHARED[:11]]"),
    "times at which files were read": (
        "for _ in range(3): open(os.path.dirname(os.__file__) + '/this.py').read(); time.sleep(0.01)",
        "s = os.stat(os.path.dirname(os.__file__) + '/this.py'); s.st_atime_ns, s.st_mtime_ns"),
    "links": (
        "[tried(os.link, p, f'/tmp/l{n}') for n, p in enumerate(SHARED)]", "[os.stat(p).st_nlink for p in SHARED[:4]]"),
    "marks on devices": (
        "for p in SHARED[14:19]:\n    tried(os.utime, p); tried(os.chmod, p, 0)\n    tried(lambda: open(p, 'wb', 0).write(b'note'))\n"
        "    on([p], lambda f: tried(fcntl.ioctl, f, 0x40045201, struct.pack('i', -4096)))",
        "[(os.stat(p).st_mode, tried(lambda: len(open(p, 'rb', 0).read(4)))) for p in SHARED[14:19]]"),
    "settings of the kernel": (
        "for root, _, names in os.walk('/proc/sys'):\n    for n in names: tried(lambda: open(os.path.join(root, n), 'w').write('1'))",
        "[open('/proc/sys/' + n).read() for n in ('kernel/hostname', 'kernel/randomize_va_space', 'vm/overcommit_memory',"
        "'fs/file-max', 'fs/aio-max-nr', 'fs/pipe-user-pages-soft', 'kernel/pid_max', 'kernel/core_pattern', 'kernel/pty/nr')]"),
    "names of the machine": (
        "tried(call, 'sethostname', b'note', 4)", "os.uname().nodename, tried(call, 'sethostname', b'x', 1)"),
    "the clock": (
        "tried(call, 'settimeofday', struct.pack('qq', 1, 0), None); tried(time.clock_settime, 0, 1.0)",
        "time.time() > 1.7e9, tried(call, 'adjtimex', bytes(208)), tried(time.clock_settime, 0, 1.0)"),
    "randomness": (
        "on(['/dev/random'], lambda f: tried(fcntl.ioctl, f, 0x5206)); tried(lambda: open('/dev/random', 'wb').write(bytes(9**6)))",
        "len(os.urandom(99)), len(os.getrandom(99, 1)), on(['/dev/random'], lambda f: len(os.read(f, 9)))"),
    "personalities": (
        "[tried(call, 'personality', p) for p in (0x40000, 0x400000, 8, 0x20000)]",
        "tried(call, 'personality', 0xffffffff), [tried(call, 'personality', p) for p in (0x40000, 8)]"),
    "what a process is": (
        "[libc.prctl(o, 1, 0, 0, 0) for o in (1, 4, 8, 29, 36, 41)]; os.umask(0o777); os.chdir('/'); os.environ['NOTE'] = '1'",
        "[libc.prctl(o, 0, 0, 0, 0) for o in (3, 7, 30, 42)], os.umask(0), os.getcwd(), sorted(os.environ)"),
    "scores and groups of a process": (
        "for n in ('oom_score_adj', 'loginuid', 'coredump_filter', 'autogroup', 'timerslack_ns', 'comm', 'setgroups', 'uid_map'):\n"
        "    for p in ('self', '1'): tried(lambda: open(f'/proc/{p}/{n}', 'w').write('7'))",
        "[[tried(lambda: open(f'/proc/{p}/{n}').read()) for p in ('self', '1')] for n in ('oom_score_adj', 'loginuid',"
        "'coredump_filter', 'comm')]"),
    "counters of events": (
        "most(lambda: call('perf_event_open', bytes(112), 0, -1, -1, 0), 99)",
        "tried(call, 'perf_event_open', bytes(112), 0, -1, -1, 0)"),
    "programs in the kernel": ("most(lambda: call('bpf', 0, bytes(72), 72), 99)", "tried(call, 'bpf', 0, bytes(72), 72)"),
    "faults handled by a program": (
        "most(lambda: call('userfaultfd', 1), 99)", "tried(call, 'userfaultfd', 1)"),
    "mounts": (
        "[tried(lambda: libc.mount(b'tmpfs', p.encode(), b'tmpfs', 0, None)) for p in SHARED]; [libc.umount2(p.encode(), 2) for p in SHARED]",
        "[line.split()[4] for line in open('/proc/self/mountinfo')]"),
    "terminals": (
        "everywhere(lambda: most(lambda: os.open('/dev/ptmx', os.O_RDWR), 60))",
        "tried(os.open, '/dev/ptmx', os.O_RDWR), tried(os.openpty), os.listdir('/dev/pts'), tried(os.open, '/dev/tty', 0)"),
    "a word in a page of a shared file": (
        "f = os.open('/usr/bin/env', 0); libc.mmap.restype = ctypes.c_void_p\n"
        "at = libc.mmap(None, 4096, 1, 1, f, 0); word = ctypes.c_uint.from_address(at).value\n"
        "threading.Thread(target=lambda: libc.syscall(NUMBERS['futex'][COLUMN], ctypes.c_void_p(at), 0, word, None, None, 0), daemon=True).start()",
        "f = os.open('/usr/bin/env', 0); libc.mmap.restype = ctypes.c_void_p; at = libc.mmap(None, 4096, 1, 1, f, 0)\n"
        "[tried(call, 'futex', ctypes.c_void_p(at), op, 9, None, ctypes.c_void_p(at), 0) for op in (1, 3, 4, 10)]"),
    "what is read already, asked for": (
        "[tried(lambda: open(p, 'rb').read()) for p in SHARED[1:5]]",
        "f = os.open('/usr/bin/env', 0); tried(os.preadv, f, [bytearray(9)], 0, getattr(os, 'RWF_NOWAIT', 8)),"
        "tried(call, 'cachestat', f, bytes(16), bytes(40), 0)"),
    "memory of other processes": (
        "[tried(call, 'process_vm_readv', p, None, 0, None, 0, 0) for p in range(1, 99)]",
        "[tried(call, 'process_vm_readv', p, None, 0, None, 0, 0) for p in (1, 2)], tried(call, 'kcmp', 1, 2, 0, 0, 0)"),
    "quotas and swap": (
        "tried(call, 'quotactl', 0x80000700, b'/dev/vda', 0, bytes(99)); tried(call, 'swapon', b'/tmp/x', 0); tried(call, 'sync')",
        "tried(call, 'quotactl', 0x80000700, b'/dev/vda', 0, bytes(99)), tried(call, 'sync')"),
    "groups of processes": (
        "tried(os.listdir, '/sys'); tried(lambda: open('/sys/fs/cgroup/cgroup.procs', 'w').write('0'))",
        "tried(os.listdir, '/sys'), len(open('/proc/self/cgroup').read()) > 0"),
    "formats of programs": (
        "tried(lambda: open('/proc/sys/fs/binfmt_misc/register', 'w').write(':note:M::note::/bin/sh:'))",
        "open('/tmp/x', 'w').write('note'); os.chmod('/tmp/x', 0o755); tried(subprocess.run, ['/tmp/x'])"),
    "libraries loaded before": (
        "tried(lambda: open('/etc/ld.so.preload', 'w').write('/tmp/x.so')); tried(lambda: open('/usr/lib/sitecustomize.py', 'w'))",
        "os.path.exists('/etc/ld.so.preload'), subprocess.run(['echo', 'x'], capture_output=True)"),
    "caches of modules": (
        "import decimal, json.tool; json.dumps = None; tried(os.mkdir, os.path.dirname(os.__file__) + '/__pycache__/x')",
        "import json; json.dumps([1]), 'decimal' in sys.modules, os.path.exists(os.path.dirname(os.__file__) + '/__pycache__/x')"),
    "the user's names": (
        "tried(lambda: open('/etc/passwd', 'a').write('x')); tried(lambda: open('/run/own/passwd', 'w'))",
        "import pwd; [entry.pw_name for entry in pwd.getpwall()], tried(lambda: open('/run/own/passwd', 'w'))"),
}  # fmt: skip


SHARED_BESIDE = {"marks on devices"}  # boxes share the machine's devices


def programs(name: str) -> tuple[str, str]:
    """A, which then stays as it is and says since when, and B."""
    first, second = PAIRS[name]
    held = f"{first}\nprint('held', time.monotonic(), flush=True)\ntime.sleep({HOLD})"
    return PRELUDE + held, PRELUDE + second


def answer(sandbox: Sandbox, program: str) -> tuple:
    done = sandbox.run(program, seconds=30.0)
    return done.stdout, done.stderr, done.value, done.exit_code


def alone(program: str) -> tuple:
    with Sandbox(CONFIG) as sandbox:
        return answer(sandbox, program)


def before(name: str, **options) -> tuple:
    """What B answers in the box in which A ran before."""
    first, second = programs(name)
    with Sandbox(CONFIG, **options) as sandbox:
        sandbox.run(first.replace(f"time.sleep({HOLD})", ""), seconds=20.0)
        assert sandbox.lost == 0
        return answer(sandbox, second)


def beside(name: str, **options) -> tuple:
    """What B answers while A holds what it has. A that is late is tried again."""
    first, second = programs(name)
    with Sandbox(replace(CONFIG, boxes=2), **options) as sandbox:
        for attempt in range(1, 6):
            said: list[str] = []
            longer = first.replace(f"time.sleep({HOLD})", f"time.sleep({HOLD * attempt})")
            run = threading.Thread(target=lambda: said.append(sandbox.run(longer, seconds=30.0).stdout))  # noqa: B023
            run.start()
            time.sleep(HOLD * attempt / 2)
            began = time.monotonic()
            answered = answer(sandbox, second)
            ended = time.monotonic()
            run.join()
            assert said and said[0], f"A of {name!r} does not get as far as to hold anything"
            since = float(said[0].split()[-1])
            if since < began and ended < since + HOLD * attempt:
                return answered
    raise AssertionError(f"A and B of {name!r} never ran at once")


def differences(name: str, **options) -> dict[str, list]:
    """How B's answers differ from the one it gives in a sandbox that never saw A: empty, where they do not."""
    expected = alone(programs(name)[1])
    said = {"before": before(name, **options), "beside": beside(name, **options)}
    return {how: [expected, given] for how, given in said.items() if given != expected}


if __name__ == "__main__":
    print(json.dumps({name: differences(name) for name in sys.argv[1:]}))
