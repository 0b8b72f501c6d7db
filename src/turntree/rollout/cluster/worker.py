"""The process at the other end: it builds what plays, and plays one unit at a time."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from turntree.core.errors import ConfigError, InputError, TurntreeError

Reply = dict[str, Any]  # {"result": ...} or {"error": ...}


class Worker:
    """An actor. `factory` names a function `module:function` of `settings` that returns a context manager over a
    function of units. `places` are the command's folder and where it finds modules."""

    def __init__(self, factory: str, settings: dict[str, Any], places: list[str]) -> None:
        self._factory, self._settings, self._places = factory, settings, places
        self._open, self._play = contextlib.ExitStack(), None

    def start(self) -> Reply:
        """Build, and say where. Separate from `__init__`, whose errors Ray reports as a death."""
        return _reply(self._build)

    def play(self, unit: dict[str, Any]) -> Reply:
        assert self._play is not None, "a worker was given work before it had started"
        play = self._play
        return _reply(lambda: play(unit))

    def _build(self) -> str:
        here = [place for place in self._places if os.path.exists(place)]
        if here and here[0] == self._places[0]:  # the command's folder: relative paths mean the same
            os.chdir(here[0])
        sys.path += [place for place in here if place not in sys.path]
        module, _, name = self._factory.partition(":")
        factory = getattr(importlib.import_module(module), name)
        self._play = self._open.enter_context(factory(self._settings))
        import ray

        return ray.get_runtime_context().get_node_id()


def fetched(shared: Any) -> Any:
    """The value that `WorkerPool.share` gave a reference to."""
    import ray

    return ray.get(shared) if isinstance(shared, ray.ObjectRef) else shared


def _reply(work: Callable[[], Any]) -> Reply:
    try:
        return {"result": work()}
    except Exception as error:  # it must reach the command: not every exception survives the way
        return {"error": sendable(error)}


def sendable(error: Exception) -> TurntreeError:
    """An error as one of those that every process knows."""
    if isinstance(error, InputError):
        kind = ConfigError if isinstance(error, ConfigError) else InputError
        return kind(error.problem, path=error.path, line=error.line, field=error.field, hint=error.hint)
    if isinstance(error, TurntreeError):
        return TurntreeError(str(error))
    failed = TurntreeError(f"a worker failed: {type(error).__name__}: {error}")
    failed.add_note("".join(traceback.format_exception(error))[-2000:])
    return failed
