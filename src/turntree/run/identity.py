"""The identity of a run folder (or log): one process holds it at a time, and only the run that began it resumes it.

Run directories, wave logs and checkpoints all use this module.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turntree.core.errors import InputError

# how often to save, where to step environments, how many processes, which loggers, how a server is reached, where the
# reference lies (what it is has a name of its own): no result changes beyond rounding
_CONNECTION = ("url", "concurrency", "retries", "timeout", "patience", "folder", "prices")
FREE = (
    *("config.checkpoints", "config.workers", "config.cluster", "config.loggers", "config.reference"),
    *(f"config.{part}.{key}" for part in ("device.engine", "device.carrier", "endpoint") for key in _CONNECTION),
)
_MOST_KEYS = 8  # in a message
_MOST_SHOWN = 60  # characters of a value in a message


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a file or folder for this process while the block lasts. The kernel releases the lock when the process dies.
    Raises `InputError` while another process holds it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError("is in use by another process", path=path, hint="choose another --out") from error
        yield
    finally:
        os.close(descriptor)


def require_same(found: Any, wanted: Any, path: Path, *, free: tuple[str, ...] = ()) -> None:
    """Raise `InputError` where two identities (JSON objects) differ, naming the keys with both values. Keys that
    begin with one of `free` may differ."""
    here, now = _flat(found), _flat(json.loads(json.dumps(wanted)))
    differing = {
        ".".join(key): f"({_short(here.get(key))}, not {_short(now.get(key))})"
        for key in sorted({*here, *now})
        if here.get(key) != now.get(key)
    }
    shown = [f"{key.removeprefix('config.')} {both}" for key, both in differing.items() if not key.startswith(free)]
    if shown:
        more = [f"{len(shown) - _MOST_KEYS} more"] if len(shown) > _MOST_KEYS else []
        named = ", ".join(shown[:_MOST_KEYS] + more)
        hint = "give the same to resume, choose another --out, or start again with --overwrite where the command has it"
        if all(key.rpartition(".")[2] in ("steps", "iterations") for key in differing):
            hint = f"a run ends where it was meant to; go on from its policy: --model {path / 'model'} --out ANOTHER"
        raise InputError(f"is of another run, which differs in {named}", path=path, hint=hint)


def digest(data: bytes, size: int = 16) -> str:
    """Checksum of bytes on disk, of `size` bytes."""
    return hashlib.blake2b(data, digest_size=size).hexdigest()


def fingerprint(value: Any, size: int = 8) -> str:
    """A short name for JSON content: equal values, equal names."""
    return digest(json.dumps(value, sort_keys=True).encode(), size)


def file_digest(path: Path, size: int = 16) -> str:
    """`digest` of a file."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, lambda: hashlib.blake2b(digest_size=size)).hexdigest()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _flat(value: Any, place: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Nested mappings by the keys that lead to a value."""
    if not isinstance(value, dict) or not value:
        return {place: value}
    parts = [_flat(item, (*place, str(key))) for key, item in value.items()]
    return {key: item for part in parts for key, item in part.items()}
