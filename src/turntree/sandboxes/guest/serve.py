"""The guest: a warm interpreter that lives in the box and runs one program after another, each in a fork of its own.

One JSON object a line over a socket that programs do not inherit: a request `{language, source, seconds}` and its
reply (`Program.run`) with `dirty`, which says that the program left files behind and the box must not be used again.
When the other end closes, at whatever moment, the guest ends, and all that is in the box with it.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import resource
import socket
import sys
from typing import Any

from turntree.sandboxes.guest import kernel
from turntree.sandboxes.guest.program import Bounds, Program, reap


def main(channel: int, settings: dict[str, Any]) -> None:
    """Lock the door, then serve until the other end closes. `settings`: see `host.Box`."""
    link = socket.socket(fileno=channel)
    sys.path[:] = [entry for entry in sys.path if entry] + settings["packages"]
    for module in settings["preload"]:
        importlib.import_module(module)
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)  # what was said before a time limit is shown
    bounds = Bounds(**settings["bounds"])
    os.chdir(settings["folder"])
    if bounds.alone:
        os.chmod(".", 0o777)
    _lock(settings, bounds)
    system_calls = kernel.SystemCallFilter(alone=bounds.alone)
    link.sendall(b"{}\n")
    _serve(link, bounds, system_calls)


def _lock(settings: dict[str, Any], bounds: Bounds) -> None:
    kernel.drop_privileges(settings["uid"])
    if settings["landlock"] is not None:
        kernel.landlock(settings["landlock"], ["/dev/null"])
    else:
        processes = settings["processes"] + 2  # the guest and the program that waits
        resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))


def _serve(link: socket.socket, bounds: Bounds, system_calls: kernel.SystemCallFilter) -> None:
    with link, link.makefile("r", encoding="utf-8") as requests:
        program = Program(bounds, system_calls, link.fileno())
        while line := requests.readline():
            reply = program.run(**json.loads(line))
            reap()
            reply["dirty"] = bounds.alone and bool(os.listdir("."))
            link.sendall(json.dumps(reply).encode() + b"\n")
            if reply["dirty"]:
                return
            program = Program(bounds, system_calls, link.fileno())
