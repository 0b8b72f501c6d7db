"""The scratch folder of a box as a value: filled before a program, read after it, when all its processes are dead.

Both happen from outside, below a descriptor that the box handed out, and follow no link: nothing that a program made
leads out of its folder.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import PurePosixPath

from turntree.core.errors import InputError
from turntree_worlds.sandboxes.limits import File, Files, Limits

MOST_FILES = 2048
_DEEPEST = 64  # folders inside folders
_LONGEST = 4000  # bytes of a path: the kernel takes 4096
_WHOLE = 0o700  # what is needed to enter a folder that a program has closed


class NotKept(Exception):
    """The folder holds what no value can carry. The text says what."""


def checked(files: Files, limits: Limits) -> Files:
    """The files with every folder that they are in. Raises `InputError` for what cannot be made."""
    above: dict[str, File] = {}
    for path in files:
        if not path or os.path.isabs(path) or os.path.normpath(path) != path or path.split("/")[0] == "..":
            raise InputError(f"{path!r} is not a path below the scratch folder", field="files", hint="like a/b.txt")
        for parent in map(str, PurePosixPath(path).parents[:-1]):
            if files.get(parent, File(kind="folder")).kind != "folder":
                raise InputError(f"{path!r} is below {parent!r}, which is no folder", field="files")
            above[parent] = File(kind="folder", mode=0o755)
    size = sum(len(file.data) for file in files.values())
    if size > limits.disk_bytes // 2 or len(files) > MOST_FILES:
        problem = f"{len(files)} files of {size} bytes leave too little room in the sandbox"
        raise InputError(problem, field="files", hint=f"raise sandbox.limits.disk_bytes; at most {MOST_FILES} files")
    return {**above, **files}


def fill(folder: int, files: Files, owner: int | None) -> None:
    """Make `files` in an empty folder: always in the same order, so that listings repeat."""
    ordered = sorted(files.items())
    for path, file in ordered:
        if file.kind == "folder":
            os.mkdir(path, dir_fd=folder)
        elif file.kind == "link":
            os.symlink(os.fsdecode(file.data), path, dir_fd=folder)
        else:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd=folder), "wb") as opened:
                opened.write(file.data)
    for path, file in reversed(ordered):  # a folder's time and mode are set after what it holds
        if owner is not None:
            os.chown(path, owner, owner, dir_fd=folder, follow_symlinks=False)
        if file.kind != "link":
            os.chmod(path, file.mode, dir_fd=folder)
        os.utime(path, (file.time, file.time), dir_fd=folder, follow_symlinks=False)


def read(folder: int, before: Files, room: int, started: float, clock: int) -> Files:
    """What is in the folder, at most `room` bytes together. What was changed since `started` gets the time `clock`:
    the real one would make every repetition differ. Entries that did not change are those of `before`, so that states
    share them. Raises `NotKept`."""
    result: dict[str, File] = {}
    for path, name, place, status in _walk(folder, "", 0):
        if len(result) == MOST_FILES:
            raise NotKept(f"there are more than {MOST_FILES} files and folders")
        room -= status.st_size if stat.S_ISREG(status.st_mode) else 0
        if room < 0:
            raise NotKept("the files are too large together")
        file = _file(path, name, place, status, clock if status.st_mtime >= started else int(status.st_mtime))
        old = before.get(path)
        result[path] = old if old is not None and (old, old.time) == (file, file.time) else file
    return result


def _file(path: str, name: str, place: int, status: os.stat_result, time: int) -> File:
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISLNK(status.st_mode):
        return File(os.fsencode(os.readlink(name, dir_fd=place)), "link", mode, time)
    if stat.S_ISDIR(status.st_mode):
        return File(b"", "folder", mode, time)
    if not stat.S_ISREG(status.st_mode):
        raise NotKept(f"{path} is neither a file nor a folder nor a link")
    if not mode & stat.S_IRUSR:
        os.chmod(name, mode | stat.S_IRUSR, dir_fd=place)
    with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=place), "rb") as opened:
        return File(opened.read(), "file", mode, time)


def _walk(folder: int, above: str, depth: int) -> Iterator[tuple[str, str, int, os.stat_result]]:
    """Everything below a folder (path, name, the folder that it is in, status), a folder before what it holds."""
    if depth > _DEEPEST:
        raise NotKept(f"there are more than {_DEEPEST} folders inside each other")
    for name in sorted(os.listdir(folder)):
        path, status = os.path.join(above, name), os.lstat(name, dir_fd=folder)
        if len(os.fsencode(path)) > _LONGEST:
            raise NotKept("the path of a file is too long")
        yield path, name, folder, status
        if stat.S_ISDIR(status.st_mode):
            if status.st_mode & _WHOLE != _WHOLE:
                os.chmod(name, _WHOLE, dir_fd=folder)
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            try:
                yield from _walk(inner, path, depth + 1)
            finally:
                os.close(inner)
