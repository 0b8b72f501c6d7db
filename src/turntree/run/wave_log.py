"""An append-only log of finished waves, from which a killed stage resumes.

A stage that works in waves of fixed membership and order appends each wave when it is done. A killed process loses only
its unfinished wave, which is replayed, so a deterministic stage ends with the same artifact.

Every line carries a checksum over itself and the line before, so that a line that was changed, lost or moved is
noticed when the log is opened. Laws (tests): a wave is in the log whole or not at all; waves are read back in the order
in which they were appended; a log is opened again by the same identity only, and by one process at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from turntree import __version__
from turntree.core.errors import InputError
from turntree.run.files import parse_line, writing
from turntree.run.identity import FREE, digest, locked, require_same
from turntree.run.jsonl import json_line

SCHEMA = "turntree.waves/2"
_CHECK = "check"


class WaveLog:
    """One line with the identity of the run, then one line per finished wave. `finished` counts the waves."""

    def __init__(self, path: Path, handle: IO[bytes]) -> None:
        self.path, self.finished = path, 0
        self._handle, self._last = handle, ""  # checksum of the last line

    def append(self, wave: dict[str, Any]) -> None:
        """Add a finished wave; it is on disk when this returns."""
        self._write(wave)
        self.finished += 1

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The finished waves in order, one at a time."""
        with self.path.open("rb") as handle:
            for number, line in enumerate(handle, start=1):
                if number > 1:
                    yield _parsed(line, self.path, number)[0]

    def remove(self) -> None:
        """Delete the waves: the stage that needed them is finished."""
        self.path.unlink()

    def _resume(self, identity: dict[str, Any]) -> None:
        """Drop a half-written line, check the identity, or begin a new log."""
        held = whole = 0
        for line in self._handle:
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            held += 1
            value, check = _parsed(line, self.path, held)
            if held == 1:
                if value.get("schema") != SCHEMA:
                    problem, hint = f"is {value.get('schema')!r}, not {SCHEMA!r}", "pass --overwrite to start anew"
                    raise InputError(problem, path=self.path, line=1, field="schema", hint=hint)
                require_same(value.get("identity"), identity, self.path, free=FREE)
            self._last = _checksum(self._last, value)
            if check != self._last:
                problem = "is damaged, or lines before it are missing"
                raise InputError(problem, path=self.path, line=held, hint="pass --overwrite to start anew")
        self._handle.truncate(whole)
        self._handle.seek(whole)
        if not held:
            self._write({"schema": SCHEMA, "identity": identity})
        self.finished = max(0, held - 1)

    def _write(self, value: dict[str, Any]) -> None:
        # What will be read: NaN could be written and never be read, and two halves of a character are read as one
        value = json.loads(json_line(value))
        check = _checksum(self._last, value)
        with writing(self.path):
            self._handle.write(json_line({**value, _CHECK: check}).encode("utf-8"))
            self._handle.flush()
            os.fsync(self._handle.fileno())
        self._last = check


@contextlib.contextmanager
def open_log(path: Path, identity: dict[str, Any], *, overwrite: bool = False) -> Iterator[WaveLog]:
    """The log at `path`, locked for this process while the block lasts; `overwrite` empties it first.

    `identity` (a JSON object) names everything that determines the contents of the waves, beside our version. Raises
    `InputError` where the log belongs to another identity (`FREE` apart), naming what differs, where another process
    has it open, and where it is damaged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as handle, locked(path):
        if overwrite:
            handle.truncate(0)
        handle.seek(0)
        log = WaveLog(path, handle)
        log._resume({**identity, "version": __version__})
        yield log


def _checksum(last: str, value: dict[str, Any]) -> str:
    return digest((last + json_line(value)).encode("utf-8"))


def _parsed(line: bytes, path: Path, number: int) -> tuple[dict[str, Any], Any]:
    """The object of a line without its checksum, and the checksum."""
    try:
        value = parse_line(line.decode("utf-8"), path, number)
    except UnicodeDecodeError as error:
        raise InputError("is not text", path=path, line=number, hint="pass --overwrite to start anew") from error
    return value, value.pop(_CHECK, None)
