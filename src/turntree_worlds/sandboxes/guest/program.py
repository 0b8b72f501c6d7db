"""One program in its own process: started in advance, fed through a pipe, read with caps, always ended."""

from __future__ import annotations

import ast
import contextlib
import linecache
import os
import random
import resource
import select
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from typing import Any

from turntree_worlds.sandboxes.guest import kernel

FLOOD_BYTES = 16 * 2**20  # a program that writes more than this is ended
_CHUNK = 65536
_NAME = "<program>"
_VALUE, _SOURCE = 3, 4  # descriptors in the program's process, beside the standard three
_BEGUN, _NOT_STARTED = b"+", b"-"  # what comes first from `_VALUE`, and what follows when the shell did not start
_SIGNALS = 256  # that wait at once: without a user of its own, boxes share the machine's bound


@dataclass(frozen=True)
class Bounds:
    """The limits of each program's process, and of how many there may be."""

    memory_bytes: int
    file_bytes: int
    open_files: int
    output_bytes: int
    processes: int


@dataclass
class Stream:
    """The head of what a program writes to one descriptor, and how much it was."""

    descriptor: int
    limit: int
    head: bytearray = field(default_factory=bytearray)
    written: int = 0

    def read(self) -> bool:
        """Read what is available; False at the end."""
        try:
            chunk = os.read(self.descriptor, _CHUNK)
        except BlockingIOError:
            return True
        self.written += len(chunk)
        self.head += chunk[: self.limit - len(self.head)]
        return bool(chunk)

    def drain(self) -> None:
        """What a dead program left in the pipe."""
        while (before := self.written) < FLOOD_BYTES and self.read() and self.written > before:
            pass

    @property
    def text(self) -> str:
        return self.head.decode("utf-8", errors="replace")


class Program:
    """A program that waits for its source, in a process space of its own: nothing it does is seen by the next one.

    This process is outside of that space. Its child is process 1 there: it starts the program, inherits every orphan,
    tells how the program ended and ends, and the kernel then ends all that is left.
    """

    def __init__(self, bounds: Bounds, uid: int | None, system_calls: kernel.SystemCallFilter, channel: int) -> None:
        pipes = [os.pipe() for _ in range(5)]
        (source, self._source), (self._ended, ended), *outputs = pipes
        self._first = os.fork()
        if self._first == 0:
            writers = [write for _, write in outputs]
            os.close(self._source)
            try:
                _become_first(ended, source, writers, channel, bounds, uid, system_calls)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            finally:
                os._exit(127)
        os.close(source)
        os.close(ended)
        for read, write in outputs:
            os.close(write)
            os.set_blocking(read, False)
        self._channel = channel
        limits = (bounds.output_bytes, bounds.output_bytes, bounds.output_bytes + len(_BEGUN))
        self._streams = [Stream(read, limit) for (read, _), limit in zip(outputs, limits, strict=True)]
        self._exited = os.pidfd_open(self._first)

    def run(self, language: str, source: str, seconds: float) -> dict[str, Any]:
        """Feed it, read it, end it. Returns the reply of the protocol. Raises `ChildProcessError` when it never began:
        the behaviour of its process is then not an answer."""
        started = time.monotonic()
        deadline = started + seconds
        timed_out, flooded = self._watch((language[0] + source).encode("utf-8", "replace"), deadline)
        os.kill(self._first, signal.SIGKILL)
        os.waitpid(self._first, 0)  # after all other processes of its space
        for stream in self._streams:
            stream.drain()
        out, err, value = self._streams
        code, said = os.read(self._ended, _CHUNK).decode(), value.text
        if said[:1].encode() != _BEGUN or (language == "shell" and value.written > 1):
            raise ChildProcessError(f"a program did not begin (exit code {code or 'unknown'})")
        if not (code or timed_out or flooded):
            raise ChildProcessError("a program's first process ended before it")
        return {
            "stdout": out.text,
            "stderr": err.text,
            "value": said[1:] if value.written > 1 else None,
            "truncated": any(stream.written > stream.limit for stream in self._streams),
            "timed_out": timed_out,
            "exit_code": None if timed_out or flooded else int(code),
            "seconds": time.monotonic() - started,
        }

    def _watch(self, source: bytes, deadline: float) -> tuple[bool, bool]:
        """Until it exits, its time is over (first), or it floods (second)."""
        os.set_blocking(self._source, False)
        readers = {stream.descriptor: stream for stream in self._streams}
        poller = select.poll()
        poller.register(self._channel, 0)  # only that it was hung up
        for descriptor in (self._exited, *readers):
            poller.register(descriptor, select.POLLIN)
        source = self._feed(source, poller)
        while (left := deadline - time.monotonic()) > 0:
            for descriptor, _ in poller.poll(left * 1000 + 1):
                if descriptor == self._channel:
                    os._exit(1)  # the host hung up: the box ends, and the program with it
                if descriptor == self._exited:
                    self._stop_feeding(poller)
                    return False, False
                if descriptor == self._source:
                    source = self._feed(source, poller)
                elif not readers[descriptor].read():
                    poller.unregister(descriptor)
                elif readers[descriptor].written > FLOOD_BYTES:
                    self._stop_feeding(poller)
                    return False, True
        self._stop_feeding(poller)
        return True, False

    def _feed(self, source: bytes, poller: select.poll) -> bytes:
        """Write what the pipe takes; close it after the last byte."""
        try:
            source = source[os.write(self._source, source) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            source = b""
        if source:
            poller.register(self._source, select.POLLOUT)
        else:
            self._stop_feeding(poller)
        return source

    def _stop_feeding(self, poller: select.poll) -> None:
        if self._source >= 0:
            with contextlib.suppress(KeyError):
                poller.unregister(self._source)
            os.close(self._source)
            self._source = -1


def _become_first(
    ended: int,
    source: int,
    writers: list[int],
    channel: int,
    bounds: Bounds,
    uid: int | None,
    system_calls: kernel.SystemCallFilter,
) -> None:
    """Process 1: no signal from inside reaches it, and it holds no privilege."""
    kernel.mount_processes()
    kernel.drop_privileges(uid)
    kernel.die_with_parent()
    most = bounds.processes + (2 if uid is not None else 3)  # with those of ours that the kernel counts
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    program = os.fork()
    if program == 0:
        try:
            _become_program(source, writers, channel, bounds, system_calls)
        finally:
            os._exit(127)
    while True:
        process, status = os.waitpid(-1, 0)
        if process == program:
            os.write(ended, b"%d" % os.waitstatus_to_exitcode(status))
            os._exit(0)


def _become_program(
    source: int, writers: list[int], channel: int, bounds: Bounds, system_calls: kernel.SystemCallFilter
) -> None:
    """The child: limits first, then nothing but its pipes, then the program."""
    os.close(channel)
    os.setpgid(0, 0)
    given = [os.open("/dev/null", os.O_RDONLY), *writers, source]
    high = [os.dup2(descriptor, 20 + i, inheritable=False) for i, descriptor in enumerate(given)]
    for target, descriptor in enumerate(high):
        os.dup2(descriptor, target, inheritable=target < _VALUE)
    os.closerange(_SOURCE + 1, bounds.open_files + 64)
    for kind, limit in (
        (resource.RLIMIT_AS, bounds.memory_bytes),
        (resource.RLIMIT_FSIZE, bounds.file_bytes),
        (resource.RLIMIT_NOFILE, bounds.open_files),
        (resource.RLIMIT_CORE, 1),  # with 0 a host that pipes core dumps to a program would start it
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_SIGPENDING, _SIGNALS),
    ):
        resource.setrlimit(kind, (limit, limit))
    system_calls.apply()
    random.seed(0)  # what a program answers depends on its source only (a fork of its own seeds it anew)
    text = _read_all(_SOURCE).decode()
    os.close(_SOURCE)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.write(_VALUE, _BEGUN)
    if text[:1] == "s":
        try:
            os.execv("/bin/sh", ["sh", "-c", text[1:]])
        except BaseException:
            os.write(_VALUE, _NOT_STARTED)
            raise
    os._exit(_run_python(text[1:]))


def _read_all(descriptor: int) -> bytes:
    chunks: list[bytes] = []
    while chunk := os.read(descriptor, _CHUNK):
        chunks.append(chunk)
    return b"".join(chunks)


def _run_python(source: str) -> int:
    """Execute a program in a fresh `__main__`; its exit code. A last line that is an expression is the value."""
    code = 0
    try:
        _execute(source)
    except SystemExit as leaving:
        code = _code_of(leaving)
    except BaseException as error:
        shown = error.__traceback__
        while shown is not None and shown.tb_frame.f_code.co_filename != _NAME:
            shown = shown.tb_next
        linecache.cache[_NAME] = (len(source), None, source.splitlines(keepends=True), _NAME)
        traceback.print_exception(type(error), error, shown)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # it may have closed or replaced them
            stream.flush()
    return code


def _execute(source: str) -> None:
    tree = ast.parse(source, _NAME)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    space: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(compile(tree, _NAME, "exec"), space)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), _NAME, "eval"), space)
        if value is not None:
            os.write(_VALUE, repr(value).encode("utf-8", "replace"))


def _code_of(leaving: SystemExit) -> int:
    if leaving.code is None or isinstance(leaving.code, int):
        return (leaving.code or 0) & 0xFF
    print(leaving.code, file=sys.stderr)
    return 1
