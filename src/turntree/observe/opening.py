"""Every file that people bring is opened here, within bounds, so that none takes the machine with it.

A file is regular, or a pipe that this process was given (/dev/stdin, `<(...)`), which is read once; a device and a pipe
with a name have no end. What is compressed (.gz, .xz) becomes `UNPACKED` times its size at most, and a line, a JSON
value or a file that is read as a whole has `LONGEST` bytes at most. Damage, in an archive too, is an `InputError`.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import lzma
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turntree.core.errors import InputError

LONGEST = 2**28  # bytes (256 MiB) of a line, a value or a whole file in memory: the largest trees have some 100 MB
UNPACKED = 200  # times: logs become 5 to 50 times as large, what is made to harm 1,000 times
_ALWAYS = 2**24  # bytes that even a tiny archive may become
PACKED: dict[str, Any] = {".gz": gzip.open, ".tgz": gzip.open, ".xz": lzma.open, ".txz": lzma.open}
_DAMAGED = (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile)
_pipes: set[tuple[int, int]] = set()  # that were read


@contextlib.contextmanager
def opened(path: Path, *, packed: bool = True) -> Iterator[io.BufferedReader[Any]]:
    """The bytes of a file, unpacked by its suffix unless `packed` is False. Raises `InputError`, also while they are
    read."""
    with contextlib.ExitStack() as stack:
        file: io.BufferedReader[Any] = stack.enter_context(os.fdopen(_descriptor(path), "rb"))
        if packed and path.suffix in PACKED:
            most = most_unpacked(path, os.fstat(file.fileno()).st_size)
            unpacked = _Unpacked(PACKED[path.suffix](file), path, most)
            file = stack.enter_context(io.BufferedReader(unpacked, 1 << 20))
        yield file


def most_unpacked(path: Path, size: int | None = None) -> int:
    """How many bytes may come out of a compressed file or an archive."""
    return max(_ALWAYS, UNPACKED * (path.stat().st_size if size is None else size))


def unpacks_too_far(path: Path) -> InputError:
    problem = f"unpacks to more than {UNPACKED} times its size"
    return InputError(problem, path=path, hint="unpack it yourself, if you trust it, and name what comes out")


def _descriptor(path: Path) -> int:
    """Open without waiting for the other end of a pipe."""
    try:
        _check_kind(path, os.stat(path))
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise InputError("does not exist", path=path, hint="check the path") from error
    os.set_blocking(descriptor, True)
    return descriptor


def _check_kind(path: Path, found: os.stat_result) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise InputError("is a folder", path=path, hint="name the files inside it")
    if stat.S_ISREG(found.st_mode):
        return
    if not stat.S_ISFIFO(found.st_mode) or not os.path.realpath(path).startswith("/proc/"):
        hint = "name a file, or pass its content as /dev/stdin"
        raise InputError("is a device or a pipe with a name, which may have no end", path=path, hint=hint)
    if (found.st_dev, found.st_ino) in _pipes:
        hint = "write it to a file and name that"
        raise InputError("is a pipe, and this command reads its input more than once", path=path, hint=hint)
    _pipes.add((found.st_dev, found.st_ino))


class _Unpacked(io.RawIOBase):
    """An unpacked file up to its `most` bytes."""

    def __init__(self, file: Any, path: Path, most: int) -> None:
        self._file, self._path, self._most = file, path, most

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, place: int, whence: int = os.SEEK_SET, /) -> int:
        return self._file.seek(place, whence)

    def readinto(self, buffer: Any, /) -> int:
        try:
            data = self._file.read(len(buffer))
        except _DAMAGED as error:
            problem = f"the compressed file is damaged or cut off ({error})"
            raise InputError(problem, path=self._path, hint="copy it again") from error
        buffer[: len(data)] = data
        if self._file.tell() > self._most:
            raise unpacks_too_far(self._path)
        return len(data)
