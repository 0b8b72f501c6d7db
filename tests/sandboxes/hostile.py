"""Programs that attack what runs them. One that gets through prints ESCAPED; names say what is tried.

`{secret}` is a file of the host that holds SECRET, `{outside}` one that must not come to be, `{port}` a listening port
of the host, `{host}` the process id of the test, `{victim}` one of its children.
"""

from turntree.sandboxes.limits import Limits, SandboxConfig

CONFIG = SandboxConfig(
    boxes=1, limits=Limits(memory_bytes=256 * 2**20, disk_bytes=4 * 2**20, output_bytes=2000, processes=12)
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
        "import threading, time\nn = 0\ntry:\n    while n < 1000:\n"
        "        threading.Thread(target=time.sleep, args=(99,), daemon=True).start(); n += 1\n"
        "except (RuntimeError, MemoryError): pass\nif n >= 1000: print('ESCAPED')"
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
