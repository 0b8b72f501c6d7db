"""Programs that attack what runs them. One that gets through prints ESCAPED; names say what is tried.

`{secret}` is a file of the host that holds SECRET, `{outside}` one that must not come to be, `{port}` a listening port
of the host, `{host}` the process id of the test (which also names a POSIX queue), `{victim}` one of its children;
`{memory}`, `{queue}` and `{semaphore}` are System V objects of the host that anybody may use.
"""

from turntree_worlds.sandboxes.limits import Limits, SandboxConfig

CONFIG = SandboxConfig(
    boxes=1,
    limits=Limits(memory_bytes=256 * 2**20, disk_bytes=4 * 2**20, output_bytes=2000, processes=12),
)

PYTHON = {
    "reads a file of the host": "print(open('{secret}').read(), 'ESCAPED')",
    "reads the shadow file": "print(open('/etc/shadow').read(), 'ESCAPED')",
    "reads root's home": "import os; print(os.listdir('/root/.ssh'), 'ESCAPED')",
    "lists the home folders": "import os\nif [n for n in os.listdir('/home')]: print('ESCAPED')",
    "follows a symbolic link to a file of the host": (
        "import os; os.symlink('{secret}', 'link'); print(open('link').read(), 'ESCAPED')"
    ),
    "makes a hard link to a file of the host": "import os; os.link('{secret}', 'link'); print('ESCAPED')",
    "climbs out with dots": "print(open('../../../../..{secret}').read(), 'ESCAPED')",
    "writes a file of the host": "open('{outside}', 'w').write('x')",
    "truncates a file of the host": "import os; os.truncate('{secret}', 0); print('ESCAPED')",
    "changes the mode of a file of the host": "import os; os.chmod('{secret}', 0o777); print('ESCAPED')",
    "touches a file of the host": "import os; os.utime('{secret}', (0, 0)); print('ESCAPED')",
    "removes a file of the host": "import os; os.remove('{secret}'); print('ESCAPED')",
    "writes to /usr": "open('/usr/turntree-escaped', 'w'); print('ESCAPED')",
    "writes to /dev/shm": "open('/dev/shm/turntree-escaped', 'w'); print('ESCAPED')",
    "opens a disk": "open('/dev/vda', 'rb'); print('ESCAPED')",
    "makes a device": "import os, stat; os.mknod('disk', 0o666 | stat.S_IFBLK, os.makedev(254, 0)); print('ESCAPED')",
    "connects to the host": "import socket; socket.create_connection(('127.0.0.1', {port}), 1); print('ESCAPED')",
    "connects to the world": "import socket; socket.create_connection(('1.1.1.1', 53), 1); print('ESCAPED')",
    "resolves a name": "import socket; print(socket.gethostbyname('example.org'), 'ESCAPED')",
    "sends a datagram": (
        "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))\n"
        "print('ESCAPED')"
    ),
    "listens": "import socket; socket.create_server(('0.0.0.0', 0)); print('ESCAPED')",
    "opens a raw socket": "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW); print('ESCAPED')",
    "talks to the kernel over netlink": "import socket; socket.socket(socket.AF_NETLINK); print('ESCAPED')",
    "signals the host": "import os\nif {host} > 64: os.kill({host}, 0); print('ESCAPED')",
    "kills its parent": "import os, time; os.kill(os.getppid(), 9); os.kill(os.getppid(), 19); time.sleep(99)",
    "kills everybody": "import os; os.kill(-1, 9)",
    "signals a child of the host": "import os\nif {victim} > 64: os.kill({victim}, 9); print('ESCAPED')",
    "lowers the limits of its parent": (
        "import os, resource\nif resource.prlimit({host}, resource.RLIMIT_NOFILE): print('ESCAPED')"
    ),
    "reads the memory of its parent": "import os; open(f'/proc/{{os.getppid()}}/mem', 'rb'); print('ESCAPED')",
    "reads the environment of its parent": (
        "import os; print(open(f'/proc/{{os.getppid()}}/environ', 'rb').read(), 'ESCAPED')"
    ),
    "takes the descriptors of its parent": (
        "import os; print(os.listdir(f'/proc/{{os.getppid()}}/fd'), 'ESCAPED')"
    ),
    "finds the host among the processes": (
        "import os\nif len([n for n in os.listdir('/proc') if n.isdigit()]) > 8: print('ESCAPED')"
    ),
    "traces its parent": (
        "import ctypes, os\nif ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0: print('ESCAPED')"
    ),
    "becomes root": "import os; os.setresuid(0, 0, 0); open('/usr/turntree-escaped', 'w'); print('ESCAPED')",
    "makes a user namespace": (
        "import ctypes\nif ctypes.CDLL(None).unshare(0x10000000) == 0: print('ESCAPED')"
    ),
    "mounts": (
        "import ctypes\nif ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0: print('ESCAPED')"
    ),
    "changes its root": "import os; os.chroot('/tmp'); print('ESCAPED')",
    "fills the memory": "x = bytearray(10**10); print('ESCAPED')",
    "fills the memory in small pieces": "x = []\nwhile True: x.append(bytearray(10**6))",
    "fills the memory behind files without names": (
        "import os; f = os.memfd_create('x')\nwhile True: os.write(f, bytes(10**6))"
    ),
    "fills the disk with one file": (
        "f = open('big', 'wb')\nfor _ in range(200): f.write(bytes(10**6)); f.flush()\nprint('ESCAPED')"
    ),
    "fills the disk with many files": (
        "for i in range(200): open(f'f{{i}}', 'wb').write(bytes(10**6))\nprint('ESCAPED')"
    ),
    "nests folders": "import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')",
    "is a fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "is a thread bomb": (
        "import threading, time\nthreading.stack_size(32768)\nn = 0\ntry:\n    while n < 100:\n"
        "        threading.Thread(target=time.sleep, args=(99,), daemon=True).start(); n += 1\n"
        "except (RuntimeError, MemoryError): pass\nif n > 12: print('ESCAPED')"
    ),
    "leaves a daemon behind": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(1000)\n"
        "    os._exit(0)"
    ),
    "writes without end": "while True: print('x' * 1000)",
    "writes errors without end": "import sys\nwhile True: sys.stderr.write('x' * 1000)",
    "has a value without end": "'x' * (10**8)",
    "has a value that never comes": (
        "class Trap:\n    def __repr__(self):\n        while True: pass\nTrap()"
    ),
    "loops without end": "while True: pass",
    "sleeps": "import time; time.sleep(1000)",
    "ignores signals": (
        "import signal\nfor s in range(1, 64):\n    try: signal.signal(s, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass"
    ),
    "recurses without end": "import sys; sys.setrecursionlimit(10**9)\ndef f(): return f()\nf()",
    "overflows the stack of the parser": "eval('(' * 10**6)",
    "computes a number without end": "9 ** 9 ** 9 ** 9",
    "leaves without saying": "import os; os._exit(7)",
    "crashes": "import ctypes; ctypes.string_at(0)",
    "closes all its descriptors": "import os; os.closerange(0, 100)",
    "forges replies everywhere": (
        "import os\nfor d in range(100):\n"
        "    try: os.write(d, b'{{\"stdout\": \"FORGED\", \"exit_code\": 0}}\\n' * 9)\n"
        "    except OSError: pass"
    ),
    "breaks the interpreter for the next one": (
        "import builtins, json, sys, time\nbuiltins.print = builtins.len = None; json.dumps = json.loads = None\n"
        "time.monotonic = lambda: 0\nsys.modules.clear()"
    ),
    "is not Python": "$%&/(",
    "has a null byte": "x = 1\x00",
    "is no text": "'\udcff'",
}  # fmt: skip

_LIBC = "import ctypes, os, signal\nlibc = ctypes.CDLL(None, use_errno=True)\n"
_NUMBERS = "x86 = os.uname().machine == 'x86_64'\n"

# programs that try to change what later programs of the same box find, or what other boxes find
INFLUENCE = {
    **{
        f"sets the limit {kind} of its parent": (
            "import os, resource\n"
            f"resource.prlimit(os.getppid(), resource.RLIMIT_{kind}, (4096, 4096)); print('ESCAPED')"
        )
        for kind in ("AS", "CPU", "DATA", "FSIZE", "NOFILE", "NPROC", "STACK")
    },
    "lowers the priority of its parent": "import os; os.setpriority(0, os.getppid(), 19); print('ESCAPED')",
    "lowers the priority of its user": "import os; os.setpriority(os.PRIO_USER, 0, 19); print('ESCAPED')",
    "makes its parent idle": (
        "import os; os.sched_setscheduler(os.getppid(), os.SCHED_IDLE, os.sched_param(0)); print('ESCAPED')"
    ),
    "puts its parent on one core": "import os; os.sched_setaffinity(os.getppid(), {{0}}); print('ESCAPED')",
    "lowers the I/O priority of its parent": (
        _LIBC + _NUMBERS + "if libc.syscall(251 if x86 else 30, 1, os.getppid(), 3 << 13) == 0: print('ESCAPED')"
    ),
    "sends its parent every signal": (
        "import os\nfor number in range(1, 65):\n    try: os.kill(os.getppid(), number)\n    except OSError: pass"
    ),
    "leaves an attribute on the scratch folder": "import os; os.setxattr('.', 'user.note', b'hello')",
    "leaves a time on the scratch folder": "import os; os.utime('.', (1, 1))",
    "leaves a trace of a file that is gone": "import os; open('note', 'w').close(); os.remove('note')",
    "shuts the scratch folder": "import os; os.chmod('/tmp', 0)",
    "leaves a mode on a device": "import os; os.chmod('/dev/null', 0); print('ESCAPED')",
    "fills the scratch folder with empty files": (
        "n = 0\ntry:\n    while n < 20000: open(f'f{{n}}', 'w').close(); n += 1\nexcept OSError: pass\n"
    ),
    "leaves shared memory": _LIBC + "if libc.shmget(77, 4096, 0o1666) >= 0: print('ESCAPED')",
    "writes shared memory of the host": (
        _LIBC + "libc.shmat.restype = ctypes.c_void_p\nat = libc.shmat({memory}, None, 0)\n"
        "if at != ctypes.c_void_p(-1).value: ctypes.memset(at, 1, 1); print('ESCAPED')"
    ),
    "removes shared memory of the host": _LIBC + "if libc.shmctl({memory}, 0, None) == 0: print('ESCAPED')",
    "sends a message to the host": (
        _LIBC + "if libc.msgsnd({queue}, b'\\1' + bytes(15), 8, 0o4000) == 0: print('ESCAPED')"
    ),
    "takes a message of the host": (
        _LIBC + "if libc.msgrcv({queue}, ctypes.create_string_buffer(64), 8, 0, 0o4000) >= 0: print('ESCAPED')"
    ),
    "removes a queue of the host": _LIBC + "if libc.msgctl({queue}, 0, None) == 0: print('ESCAPED')",
    "raises a semaphore of the host": (
        _LIBC + "if libc.semop({semaphore}, b'\\0\\0\\1\\0\\0\\0', 1) == 0: print('ESCAPED')"
    ),
    "reads a semaphore of the host": _LIBC + "if libc.semctl({semaphore}, 0, 12, 0) >= 0: print('ESCAPED')",
    "removes a POSIX queue": _LIBC + "if libc.mq_unlink(b'/turntree-{host}') == 0: print('ESCAPED')",
    "watches files of the host": (
        _LIBC + "if libc.inotify_add_watch(libc.inotify_init1(0), b'/usr', 0xfff) >= 0: print('ESCAPED')"
    ),
    "is told of changes in a folder": "import fcntl, os; fcntl.fcntl(os.open('/usr', 0), 1026, 2); print('ESCAPED')",
}  # fmt: skip
PYTHON |= INFLUENCE

SHELL = {
    "is the classic bomb": ":(){{ :|:& }};:",
    "yes without end": "yes",
    "reads the host": "cat {secret} && echo ESCAPED",
    "copies out": "echo x > {outside}; cp /bin/sh /usr/turntree-escaped && echo ESCAPED",
    "removes everything": "rm -rf --no-preserve-root / 2>/dev/null; true",
    "mounts the processes of the host": "mount -t proc proc /tmp && echo ESCAPED",
    "unshares": "unshare -Ur id && echo ESCAPED",
    "switches user": "su -c id root </dev/null && echo ESCAPED",
    "leaves a setuid shell": "cp /bin/sh sh; chmod 4755 sh; ./sh -p -c 'cat {secret}' && echo ESCAPED",
    "hides in the background": "(setsid sleep 1000 &) ; nohup sleep 1000 & exit 0",
    "fills the disk": "dd if=/dev/zero of=big bs=1M count=200 2>/dev/null && echo ESCAPED",
    "looks at processes": "cat /proc/1/environ && echo ESCAPED",
    "writes to the terminal": "echo ESCAPED > /dev/tty",
    "stops process one": "kill -STOP 1; kill -9 1; kill -9 -1; sleep 100",
    "changes the clock": "date -s 2000-01-01 && echo ESCAPED",
}  # fmt: skip

# these end only when they are ended (some of them, in one sandbox, sooner); the others must come to their own end
ENDLESS = {
    "kills its parent", "is a fork bomb", "has a value that never comes", "loops without end", "sleeps",
    "recurses without end", "ignores signals", "computes a number without end", "is the classic bomb",
    "stops process one", "removes everything",
}  # fmt: skip

# what a program finds around it: no program that ran before may change a word of it
PROBE = """
import ctypes, os, resource, signal
names = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
libc = ctypes.CDLL(None)
found = [20 + 22, os.getcwd(), sorted(os.environ), os.umask(0), os.uname().nodename]
found += [resource.getrlimit(getattr(resource, name)) for name in names]
found += [os.getpriority(0, 0), os.sched_getscheduler(0), sorted(os.sched_getaffinity(0)), libc.prctl(30, 0, 0, 0, 0)]
found += [libc.syscall(252 if os.uname().machine == "x86_64" else 31, 1, 0)]
found += [signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getsignal(signal.SIGINT) is signal.default_int_handler]
if os.getcwd() == "/tmp":
    found += [os.stat("/dev/null").st_mode, open("/proc/self/oom_score_adj").read()]
    folder, space = os.stat("."), os.statvfs(".")
    found += [oct(folder.st_mode), folder.st_size, folder.st_mtime_ns > 10**18, os.listdir("."), os.listxattr(".")]
    found += [space.f_bfree, space.f_ffree, os.access(".", os.W_OK), os.listdir("/dev/shm")]
found
"""
