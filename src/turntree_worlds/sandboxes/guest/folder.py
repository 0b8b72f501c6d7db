"""The scratch folder as a value: filled before a program, read after it, when all its processes are dead.

An entry is `[path, kind, mode, time, data]`: the path below the folder, "file", "folder" or "link", the permission
bits, the time of the last change in whole seconds, and the contents in base64 (of a link: where it leads).
"""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import Iterator
from typing import Any

_DEEPEST = 64  # folders inside folders
_WHOLE = 0o700  # what the guest needs to enter a folder that a program has closed


class NotKept(Exception):
    """The folder holds what no value can carry. The text says what."""


def fill(root: str, entries: list[list[Any]]) -> None:
    """Make `entries`, with every folder that they are in, in the empty folder `root`: always in the same order, so that
    listings repeat."""
    ordered = sorted(entries)
    for path, kind, _, _, data in ordered:
        place, content = os.path.join(root, path), base64.b64decode(data)
        if kind == "folder":
            os.mkdir(place)
        elif kind == "link":
            os.symlink(os.fsdecode(content), place)
        else:
            with open(place, "xb") as file:
                file.write(content)
    for path, kind, mode, time, _ in reversed(ordered):  # a folder's time and mode are set after what it holds
        place = os.path.join(root, path)
        if kind != "link":
            os.chmod(place, mode)
        os.utime(place, (time, time), follow_symlinks=False)


def read(root: str, most: int, count: int, started: float, clock: int) -> list[list[Any]]:
    """The entries of `root`, at most `count` of at most `most` bytes together. What was changed since `started` gets
    the time `clock`: the real one would make every repetition differ. Raises `NotKept`."""
    entries: list[list[Any]] = []
    for path, place, found in _walk(root, "", 0):
        if len(entries) == count:
            raise NotKept(f"there are more than {count} files and folders")
        time = clock if found.st_mtime >= started else int(found.st_mtime)
        mode = stat.S_IMODE(found.st_mode)
        if stat.S_ISLNK(found.st_mode):
            kind, data = "link", os.fsencode(os.readlink(place))
        elif stat.S_ISDIR(found.st_mode):
            kind, data = "folder", b""
        elif stat.S_ISREG(found.st_mode):
            most -= found.st_size
            if most < 0:
                raise NotKept("the files are too large together")
            if not mode & stat.S_IRUSR:
                os.chmod(place, mode | stat.S_IRUSR)
            with open(place, "rb") as file:
                kind, data = "file", file.read()
        else:
            raise NotKept(f"{path} is neither a file nor a folder nor a link")
        entries.append([path, kind, mode, time, base64.b64encode(data).decode()])
    return entries


def _walk(root: str, above: str, depth: int) -> Iterator[tuple[str, str, os.stat_result]]:
    """Everything below `root`, a folder before what it holds; links are not followed. Raises `NotKept` where it is
    deeper than anyone needs."""
    if depth > _DEEPEST:
        raise NotKept(f"there are more than {_DEEPEST} folders inside each other")
    for name in sorted(os.listdir(root)):
        path, place = os.path.join(above, name), os.path.join(root, name)
        found = os.lstat(place)
        yield path, place, found
        if stat.S_ISDIR(found.st_mode):
            if found.st_mode & _WHOLE != _WHOLE:
                os.chmod(place, _WHOLE)
            yield from _walk(place, path, depth + 1)
