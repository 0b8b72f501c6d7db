"""The boundary to foreign code: environments, tools, rewards, verifiers, gates, loggers and every other part of a user.

Such code may end in anything: an exception, `sys.exit`, a cancelled task. Where it judges or plays, the rollout is then
censored with the reason; a logger is switched off; a part that decides about a whole run (`call_part`) ends it in one
line. Whoever calls it catches `BaseException` and asks `reason_of`, which lets the user's own interrupt pass.
"""

from __future__ import annotations

import errno
import importlib
import sqlite3
import subprocess
import threading
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar, cast

from turntree.core.errors import InputError, TurntreeError, disk_is_full

T = TypeVar("T")

NEEDS = "_turntree_needs"  # the package and the extra of a factory
_LONGEST = 500  # characters of a reason
# what an argument of the policy's leads to: a file that is not there, a folder in place of a file
_ASKED_WRONGLY = frozenset({
    errno.ENOENT, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.EINVAL,
    errno.ENAMETOOLONG, errno.ELOOP, errno.EBADF, errno.ESPIPE, errno.EXDEV,
})  # fmt: skip
# a server's own failure, and lost connections of httpx, aiohttp, websockets and openai, none of which need be installed
_SERVERS = (429, *range(500, 600))
_LOST = {
    "TimeoutException", "NetworkError", "RemoteProtocolError", "ProxyError", "ClientConnectionError",
    "ClientPayloadError", "ConnectionClosed", "APIConnectionError", "ConnectionError", "SSHException", "RpcError",
    "AutoReconnect", "AcceleratorError", "OutOfMemoryError",
}  # fmt: skip
_SQLITE = (5, 6, 7, 10, 11, 13)  # busy, locked, no memory, disk, corrupt, full; its other errors are of the question
_RUNTIME = ("CUDA error", "CUDA out of memory", "can't start new thread")


def package(name: str, extra: str, field: str | None = "environment", path: Path | None = None) -> Any:
    """Import a package that is an optional extra. Raises `InputError` that says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        own = name.partition(".")[0]
        problem = f"{own} is not installed" if error.name in (own, name) else f"{own} needs {error.name!r}"
        raise InputError(problem, field=field, path=path, hint=f"pip install 'turntree[{extra}]'") from error


def needs(name: str, extra: str) -> Callable[[T], T]:
    """Of a part's factory: without the package it is refused where its options are read, before a model is loaded."""

    def mark(factory: T) -> T:
        setattr(factory, NEEDS, (name, extra))
        return factory

    return mark


class EnvironmentFault(Exception):
    """An environment broke its contract; the text says how."""


class EnvironmentGone(TurntreeError):
    """What all episodes share (a server of tools) is gone. That is no fault of one rollout: the run ends, resumably."""


def reason_of(error: BaseException) -> str:
    """Why foreign code gave no answer, in one line. Raises `error` again where that code is not to blame: the user's
    interrupt, which only the main thread gets, and an `EnvironmentGone`."""
    interrupted = isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()
    if interrupted or isinstance(error, EnvironmentGone):
        raise error
    return described(error)


def described(error: BaseException) -> str:
    """An error in one line."""
    try:
        text = str(error)
    except Exception:  # its text is foreign code, too
        text = ""
    text = text if isinstance(error, EnvironmentFault) else f"{type(error).__name__}: {text}"
    return " ".join(text.split())[:_LONGEST]


def call_foreign(call: Callable[[], T]) -> T:
    """What foreign code answers. Whatever it ends in instead becomes an `EnvironmentFault`."""
    try:
        return call()
    except BaseException as error:
        raise EnvironmentFault(reason_of(error)) from error


def call_part(part: str, call: Callable[..., T], *arguments: object) -> T:
    """What a part that decides about the whole run answers (a gate, brancher, filter or estimator): there is no rollout
    to censor where it fails, so the run ends, resumably. An exception says where it was raised; of what is none
    (`sys.exit`, a cancelled task) this makes one, or the run would end without a word."""
    try:
        return call(*arguments)
    except Exception:
        raise
    except BaseException as error:
        name = getattr(call, "__qualname__", type(call).__name__)
        raise TurntreeError(f"the {part} ended in {reason_of(error)}, in {name}") from error


def is_of_the_machine(error: BaseException | None) -> bool:
    """Whether an error of a tool, one that it came from or one of its group says that the machine failed: a lost
    connection, a server's failure, a time limit, a full disk, no memory, a missing package, an exit. No policy is to
    blame for that. Any other exception may be the tool's way to speak to the policy."""
    while error is not None:
        if any(map(is_of_the_machine, _grouped(error))):
            return True
        lost = not _LOST.isdisjoint(kind.__name__ for kind in type(error).mro())
        if lost or isinstance(error, HTTPException) or _status(error) in _SERVERS:
            return True
        if isinstance(error, OSError) and error.errno not in _ASKED_WRONGLY:
            return True
        if isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 255 in _SQLITE:
            return True
        if isinstance(error, RuntimeError) and str(error).startswith(_RUNTIME):
            return True
        exits = not isinstance(error, Exception)
        if exits or isinstance(error, (MemoryError, ImportError, subprocess.TimeoutExpired)) or disk_is_full(error):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def _grouped(error: BaseException) -> tuple[BaseException, ...]:
    return cast("Any", error).exceptions if isinstance(error, BaseExceptionGroup) else ()


def _status(error: BaseException) -> int:
    """The status of a server's answer that an HTTP client raised, of httpx, requests, aiohttp, openai or urllib; 0 of
    any other error."""
    held: Any = getattr(error, "response", None)
    found = [getattr(of, name, None) for of in (held, error) for name in ("status_code", "status", "code")]
    return next((status for status in found if type(status) is int and 100 <= status < 600), 0)
