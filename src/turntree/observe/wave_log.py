"""An append-only log of finished waves: what a killed stage goes on from.

A stage that works in waves of fixed membership and order appends each one when it is done. Whatever kills the process
costs the unfinished wave only, which is replayed; a stage that is deterministic therefore ends with the same artifact.

Laws (tests): a wave is in the log whole or not at all; waves are read back in the order in which they were appended;
a log is opened again by the same identity only, and by one process at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from turntree.core.errors import InputError
from turntree.observe.files import json_line, parse_line

SCHEMA = "turntree.waves/1"


class WaveLog:
    """One line that says whose waves these are, then one line a finished wave. `finished` counts them."""

    def __init__(self, path: Path, handle: IO[bytes]) -> None:
        self.path, self.finished = path, 0
        self._handle = handle

    def append(self, wave: dict[str, Any]) -> None:
        """Add a finished wave; it is on disk when this returns."""
        self._write(wave)
        self.finished += 1

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The finished waves in order, one at a time."""
        with self.path.open("rb") as handle:
            for number, line in enumerate(handle, start=1):
                if number > 1:
                    yield parse_line(line, self.path, number)

    def remove(self) -> None:
        """Forget the waves: what they were made for is finished."""
        self.path.unlink()

    def _resume(self, identity: dict[str, Any]) -> None:
        """Drop what a kill left half written, check whose waves these are, or begin a new log."""
        held = whole = 0
        first = b""
        for line in self._handle:
            if not line.endswith(b"\n"):
                break
            first = first or line
            whole += len(line)
            held += 1
        self._handle.truncate(whole)
        self._handle.seek(whole)
        if not held:
            self._write({"schema": SCHEMA, "identity": identity})
            return
        header = parse_line(first, self.path, 1)
        if header.get("schema") != SCHEMA:
            problem = f"is {header.get('schema')!r}, not {SCHEMA!r}"
            raise InputError(problem, path=self.path, line=1, field="schema", hint="pass --overwrite to start anew")
        self._check(header.get("identity"), identity)
        self.finished = held - 1

    def _check(self, found: Any, wanted: dict[str, Any]) -> None:
        wanted = json.loads(json.dumps(wanted))
        differing = sorted(_differing(found, wanted))
        if differing:
            hint = "give the same settings to go on, choose another --out, or pass --overwrite to start anew"
            raise InputError(f"is an interrupted run that differs in {', '.join(differing)}", path=self.path, hint=hint)

    def _write(self, value: dict[str, Any]) -> None:
        self._handle.write(json_line(value).encode("utf-8"))
        self._handle.flush()
        os.fsync(self._handle.fileno())


@contextlib.contextmanager
def open_log(path: Path, identity: dict[str, Any], *, overwrite: bool = False) -> Iterator[WaveLog]:
    """The log at `path`, for this process alone while the block lasts; `overwrite` empties it first.

    `identity` (a JSON object) names everything that decides what the waves hold. Raises `InputError` where the log
    belongs to another identity, naming what differs, and where another process has it open.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel lets go of it however the process dies
        except BlockingIOError as error:
            raise InputError("is in use by another process", path=path, hint="choose another --out") from error
        if overwrite:
            handle.truncate(0)
        handle.seek(0)
        log = WaveLog(path, handle)
        log._resume(identity)
        yield log


def _differing(found: Any, wanted: Any, key: str = "") -> Iterator[str]:
    """Dotted keys (with both values) at which two JSON values differ."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for part in {*found, *wanted}:
            yield from _differing(found.get(part), wanted.get(part), f"{key}.{part}" if key else part)
    elif found != wanted:
        yield f"{key} ({found!r}, not {wanted!r})"
