"""The guest: a warm interpreter in the box that runs one program after another, each in mount and process spaces that
are made for it and end with it.

One JSON object a line over a socket that programs do not inherit: a request `{language, source, seconds}` and its
reply (`Program.run`). A request with `files` and `clock` (`guest.folder`) runs among these files; its reply holds what
became of them in `files`, or in `not_kept` why they cannot be kept. When the other end closes, at whatever moment, the
guest ends, and all that is in the box with it. It also ends when it cannot begin a program: the other side sees a lost
box, not an answer.
"""

from __future__ import annotations

import base64
import importlib
import io
import json
import os
import signal
import socket
import sys
import time
from typing import Any

from turntree_worlds.sandboxes.guest import folder, kernel
from turntree_worlds.sandboxes.guest.program import Bounds, Program

SCRATCH = "/tmp"
_SERVED = 0


def main(channel: int) -> None:
    """Serve until the other end closes. The first line is what `host._settings` says. Only this process keeps
    privileges, and it touches nothing that a program made: a child of it serves each program and gives them up."""
    kernel.hide()
    link = socket.socket(fileno=channel)
    settings = _line(link)
    sys.path[:] = [entry for entry in sys.path[1:] if entry] + settings["packages"]
    for module in settings["preload"]:
        importlib.import_module(module)
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)  # output before a time limit is shown
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # process 1 is spared the signals that it does not handle
    _held = kernel.hold_devices()
    system_calls = kernel.SystemCallFilter(base64.b64decode(settings["calls"]))
    link.sendall(b"{}\n")
    while (server := os.fork()) != 0:
        if os.waitpid(server, 0)[1] != _SERVED:
            return
    try:
        served = _serve(link, Bounds(**settings["bounds"]), settings, system_calls)
        os._exit(_SERVED if served else 1)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(1)


def _serve(
    link: socket.socket, bounds: Bounds, settings: dict[str, Any], system_calls: kernel.SystemCallFilter
) -> bool:
    """Prepare for one program, wait for it, and run it. False: the other end closed."""
    kernel.leave(SCRATCH, bounds.file_bytes, settings["files"])
    os.chdir(SCRATCH)
    program = Program(bounds, settings["uid"], system_calls, link.fileno())
    kernel.drop_privileges(settings["uid"])
    request = _line(link)
    if request is None:
        return False
    files, clock = request.pop("files", None), request.pop("clock", 0)
    started = time.time() - 1  # file systems keep a coarser time
    if files is not None:
        folder.fill(".", files)
    reply = program.run(**request)
    if files is not None:
        reply |= _taken(bounds.file_bytes // 2, settings["files"] // 2, started, clock)
    link.sendall(json.dumps(reply).encode() + b"\n")
    return True


def _line(link: socket.socket) -> Any:
    """The next line; None at the end. The other side sends one and waits for the answer."""
    with link.makefile("r", encoding="utf-8") as lines:
        return json.loads(lines.readline() or "null")


def _taken(most: int, count: int, started: float, clock: int) -> dict[str, Any]:
    """What is in the scratch folder."""
    try:
        return {"files": folder.read(".", most, count, started, clock), "not_kept": None}
    except (folder.NotKept, OSError) as reason:  # a path may be longer than the kernel takes
        return {"files": None, "not_kept": str(reason)[:200]}
