"""Files that are either whole or absent: JSON and JSONL, written to a temporary sibling and renamed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turntree.core.errors import InputError
from turntree.run.identity import digest, file_digest
from turntree.run.jsonl import parse_json, parse_object, read_text, replacing
from turntree.run.jsonl import writing as writing


def require_writable(path: Path, *, folder: bool = False) -> None:
    """Raise `InputError` unless a file (or a folder) can be written at `path`, in place of what is there."""
    if path.exists() and path.is_dir() != folder:
        raise InputError("is a file" if folder else "is a folder", path=path, hint="name another path to write to")
    place = Path(os.path.realpath(path if folder else path.parent))
    above = next(one for one in (place, *place.parents) if one.exists())
    if not above.is_dir():
        raise InputError(f"cannot be written: {above} is a file", path=path, hint="name another path to write to")
    if not os.access(above, os.W_OK | os.X_OK):
        raise InputError(f"cannot be written: {above} is read-only", path=path, hint="name another path to write to")


@contextlib.contextmanager
def replacing_folder(target: Path) -> Iterator[Path]:
    """A fresh folder beside `target` to write into, which takes its place when the block ends: a reader sees the old
    folder or the new one, never a mixture."""
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    try:
        fresh.chmod(0o755)
        with writing(target):
            yield fresh
            _rename_folder(fresh, target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _rename_folder(fresh: Path, target: Path) -> None:
    """A folder cannot be renamed over a full one, so the old one is moved away first."""
    if not target.exists():
        fresh.rename(target)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent))
    old = target.rename(aside / target.name)
    try:
        fresh.rename(target)
    except BaseException:
        old.rename(target)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_text(path: Path, text: str) -> Path:
    """Write a file whole or not at all; returns `path`. A lone surrogate (a model can write one as an escape, and UTF-8
    cannot hold it) is written as that escape."""
    with replacing(path) as file:
        file.write(text.encode("utf-8", "backslashreplace"))
    return path


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """The JSON value of a file. Raises `InputError`."""
    return parse_json(read_text(path), path, half_characters=True)


def require_replaceable(path: Path, beginning: str) -> None:
    """Raise `InputError` where `path` holds something that does not begin so: commands without --overwrite ask."""
    if path.is_file() and path.stat().st_size and path.suffix not in (".gz", ".xz"):
        with path.open("rb") as file:
            if not file.read(200).lstrip().lower().startswith(beginning.lower().encode()):
                raise InputError("holds something else", path=path, hint="choose another --out, or delete the file")


def require_table(path: Path, schema: str) -> None:
    """`require_replaceable` by a table of this schema, in any version."""
    require_replaceable(path, f'{{"schema": "{schema.partition("/")[0]}/')


def parse_line(text: bytes | str, path: Path, number: int) -> dict[str, Any]:
    """One JSON object of our own JSONL files. Raises `InputError` naming the line."""
    return parse_object(text, path, number, half_characters=True)


def file_hash(path: Path) -> str:
    """Short content hash, to name the input of a stage."""
    if not path.is_file():
        raise InputError("no such file", path=path, hint="check the path")
    return file_digest(path, 8)


def tree_hash(path: Path) -> str:
    """`file_hash` of a file, or of a folder: the names and contents of all files below it."""
    if not path.is_dir():
        return file_hash(path)
    inside = sorted(each for each in path.rglob("*") if each.is_file())
    named = "".join(f"{each.relative_to(path)} {file_hash(each)}\n" for each in inside)
    return digest(named.encode("utf-8", "surrogateescape"), 8)
