"""What the workers of the tests build: they do what a unit says, without a model."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from turntree.core.errors import InputError


class Misfit(InputError):
    """A part may raise errors of its own kind: their words reach the user as those of any other."""


@contextlib.contextmanager
def obedient(settings: dict[str, Any]) -> Iterator[Callable[[dict[str, Any]], Any]]:
    def play(unit: dict[str, Any]) -> Any:
        if "once" in unit:  # a fault of the first process that is given this unit
            mark = Path(unit["once"])
            if mark.exists():
                return unit["number"]
            mark.touch()
        match unit.get("do"):
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "sleep":
                time.sleep(unit["seconds"])
            case "refuse":
                raise Misfit("is wrong", path="a.jsonl", line=3, field="reward", hint="write 0.0")
            case "crash":
                raise ZeroDivisionError("of a user's part")
            case "tell":
                return {"number": unit["number"], "pid": os.getpid()}
        return unit["number"]

    yield play


def refused(settings: dict[str, Any]) -> Any:
    raise InputError("does not exist", field="model", hint="name a folder")
