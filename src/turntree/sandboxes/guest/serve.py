"""The guest: a warm interpreter in the box that runs one program after another, each in its own fork.

One JSON object a line over a socket that programs do not inherit: a request `{language, source, seconds}` and its
reply (`Program.run`) with `dirty`, which says that the box is not as it was before the program and must not be used
again. A request with `files` and `clock` (`guest.folder`) runs among these files; its reply holds what became of them
in `files`, or in `not_kept` why they cannot be kept. When the other end closes, at whatever moment, the guest ends, and
all that is in the box with it. It also ends when it cannot begin a program: the other side sees a lost box, not an
answer.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import resource
import signal
import socket
import sys
import time
from typing import Any

from turntree.sandboxes.guest import folder, kernel
from turntree.sandboxes.guest.program import Bounds, Program, reap


def main(channel: int, settings: dict[str, Any]) -> None:
    """Confine itself, then serve until the other end closes. `settings`: see `host.Box`."""
    link = socket.socket(fileno=channel)
    sys.path[:] = [entry for entry in sys.path if entry] + settings["packages"]
    for module in settings["preload"]:
        importlib.import_module(module)
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)  # output before a time limit is shown
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # process 1 is spared the signals that it does not handle
    bounds = Bounds(**settings["bounds"])
    if bounds.alone:
        kernel.mount_scratch(settings["folder"], bounds.file_bytes, settings["files"])
        kernel.mount_names(settings["uid"])
    os.chdir(settings["folder"])
    _lock(settings, bounds)
    system_calls = kernel.SystemCallFilter(alone=bounds.alone)
    link.sendall(b"{}\n")
    _serve(link, bounds, settings["files"], system_calls)


def _lock(settings: dict[str, Any], bounds: Bounds) -> None:
    kernel.drop_privileges(settings["uid"])
    if settings["landlock"] is not None:
        kernel.landlock(settings["landlock"], ["/dev/null"])
    else:
        processes = settings["processes"] + 2  # the guest and the program that waits
        resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))


def _serve(link: socket.socket, bounds: Bounds, files_most: int, system_calls: kernel.SystemCallFilter) -> None:
    scratch = os.open(".", os.O_RDONLY | os.O_DIRECTORY) if bounds.alone else None
    untouched = _condition(scratch)
    with link, link.makefile("r", encoding="utf-8") as requests:
        program = Program(bounds, system_calls, link.fileno())
        while line := requests.readline():
            request = json.loads(line)
            files, clock = request.pop("files", None), request.pop("clock", 0)
            started = time.time() - 1  # file systems keep a coarser time
            if files is not None:
                folder.fill(".", files)
            reply = program.run(**request)
            reap()
            if files is not None:
                reply |= _taken(bounds.file_bytes // 2, files_most // 2, started, clock)
            now = _condition(scratch)
            if files is not None and now[:_TIMES] == untouched[:_TIMES]:
                untouched = now
            reply["dirty"] = now != untouched
            link.sendall(json.dumps(reply).encode() + b"\n")
            if reply["dirty"]:
                return
            program = Program(bounds, system_calls, link.fileno())


def _taken(most: int, count: int, started: float, clock: int) -> dict[str, Any]:
    """What is in the scratch folder, which is empty afterwards unless something in it cannot be removed. It may be half
    full, so that the next program has room."""
    reply: dict[str, Any] = {"files": None, "not_kept": None}
    try:
        reply["files"] = folder.read(".", most, count, started, clock)
    except (folder.NotKept, OSError) as reason:  # a path may be longer than the kernel takes
        reply["not_kept"] = str(reason)[:200]
    with contextlib.suppress(OSError, folder.NotKept):  # what is left makes the box differ
        folder.empty(".")
    return reply


_TIMES = -2  # how many parts of a condition, from its end, are times


def _condition(scratch: int | None) -> tuple[Any, ...]:
    """All that a program can inherit from the guest or find in the scratch folder. No program can set the time of the
    last change, so that it also tells of what was made and removed again."""
    limits = [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")]
    schedule = (
        os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), os.sched_getparam(0).sched_priority,
        os.sched_getaffinity(0), kernel.io_priority(),
    )  # fmt: skip
    if scratch is None:
        return limits, schedule
    found = os.fstat(scratch)
    inside = os.listdir(scratch), os.listxattr(scratch)
    return limits, schedule, found.st_mode, inside, found.st_mtime_ns, found.st_ctime_ns
