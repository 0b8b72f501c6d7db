"""The process at the other end: it builds what plays, and plays one unit at a time."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import time
import traceback
from typing import Any

from turntree.core.errors import ConfigError, InputError, TurntreeError

Told = dict[str, Any]  # {"result": ...} or {"error": {...}}; what a worker says is plain data
_ERRORS = {each.__name__: each for each in (ConfigError, InputError, TurntreeError)}  # the nearest class comes first
_ABOUT = ("path", "line", "field", "hint")


class Worker:
    """An actor. `factory` names a function `module:function` of `settings` that returns a context manager over a
    function of units. `places` are the command's folder and where it finds modules."""

    def __init__(self, factory: str, settings: dict[str, Any], places: list[str]) -> None:
        self._factory, self._settings, self._places = factory, settings, places
        self._open, self._play = contextlib.ExitStack(), None

    def start(self) -> Told:
        """Build, and say where. Separate from `__init__`, whose errors Ray reports as a death."""
        return _told(self._build)

    def play(self, unit: dict[str, Any]) -> Told:
        assert self._play is not None, "a worker was given work before it had started"
        play = self._play
        return _told(lambda: play(unit))

    def pulse(self, seconds: float) -> int:
        """Say after `seconds` that this process lives. It runs beside `play`."""
        time.sleep(seconds)
        return os.getpid()

    def _build(self) -> tuple[str, int]:
        here = [place for place in self._places if os.path.exists(place)]
        if here and here[0] == self._places[0]:  # the command's folder: relative paths mean the same
            os.chdir(here[0])
        sys.path += [place for place in here if place not in sys.path]
        module, _, name = self._factory.partition(":")
        factory = getattr(importlib.import_module(module), name)
        self._play = self._open.enter_context(factory(self._settings))
        import ray

        return ray.get_runtime_context().get_node_id(), os.getpid()


def fetched(shared: Any) -> Any:
    """The value that `Crew.share` gave a reference to."""
    import ray

    return ray.get(shared) if isinstance(shared, ray.ObjectRef) else shared


def end_process(pid: int) -> None:
    """Kill a worker of the node that this runs on, if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _told(work: Any) -> Told:
    try:
        return {"result": work()}
    except Exception as error:  # it must reach the command as data: not every exception survives the way
        return {"error": _as_data(error)}


def _as_data(error: Exception) -> dict[str, Any]:
    name = next((name for name, kind in _ERRORS.items() if isinstance(error, kind)), None)
    if name is None:
        last = "".join(traceback.format_exception(error))[-2000:]
        return {"type": "TurntreeError", "problem": f"a worker failed: {type(error).__name__}: {error}", "trace": last}
    if not isinstance(error, InputError):
        return {"type": "TurntreeError", "problem": str(error)}
    about = {name: getattr(error, name) for name in _ABOUT}
    about["path"] = None if about["path"] is None else str(about["path"])
    return {"type": name, "problem": error.problem, **about}


def raised(data: dict[str, Any]) -> TurntreeError:
    """The error that a worker told of."""
    if data["type"] == "TurntreeError":
        error = TurntreeError(data["problem"])
        if "trace" in data:
            error.add_note(data["trace"])
        return error
    about = {name: data[name] for name in _ABOUT}
    return _ERRORS[data["type"]](data["problem"], **about)  # type: ignore[call-arg]
