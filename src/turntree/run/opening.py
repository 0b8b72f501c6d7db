"""Every file that people bring is opened here, within bounds, so that none takes the machine with it.

A file is regular, or a pipe that this process was given (/dev/stdin, `<(...)`), which is read once; a device and a pipe
with a name have no end. What is compressed (.gz, .xz) becomes `UNPACKED` times its size at most, and a line, a JSON
value or a file that is read as a whole has `LONGEST` bytes at most. Damage is an `InputError`. Tar archives and Parquet
files are opened in the same way.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import lzma
import os
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from turntree.core.errors import InputError
from turntree.core.foreign import package

LONGEST = 2**28  # bytes (256 MiB) of a line, a value or a whole file in memory: the largest trees have some 100 MB
UNPACKED = 200  # times: logs become 5 to 50 times as large, what is made to harm 1,000 times
_CHUNK = 1 << 20
_BATCH = 256  # rows of a Parquet file: a value that is stored once may stand in every row
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


def members_of(path: str | Path) -> Iterator[tuple[tarfile.TarInfo, Callable[[], Iterator[bytes]]]]:
    """The members of an archive in its order, each with what gives its content, in pieces. What comes out, of sparse
    members and links too, is bounded by the size of the archive. Raises `InputError`."""
    path, left = Path(path), 0

    def pieces(archive: tarfile.TarFile, member: tarfile.TarInfo) -> Iterator[bytes]:
        nonlocal left
        with _named_errors(path):
            inside = archive.extractfile(member)
            while inside is not None and (piece := inside.read(_CHUNK)):
                left -= len(piece)
                if left < 0:
                    raise unpacks_too_far(path)
                yield piece

    with opened(path) as file, _named_errors(path):
        left = most_unpacked(path)
        with tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                yield member, lambda member=member: pieces(archive, member)


@contextlib.contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, ValueError, OverflowError, KeyError, RecursionError) as error:
        raise InputError(f"is not a readable tar archive ({error})", path=path, hint="copy it again") from error


def parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet file, a few at a time. Raises `InputError` for a file that is not Parquet, is damaged, or
    would become far larger than it is."""
    parquet = package("pyarrow.parquet", "parquet", None, path)
    with opened(path) as raw:
        most = most_unpacked(path)
        try:
            with parquet.ParquetFile(raw, pre_buffer=False) as file:
                groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
                if max(file.metadata.num_rows, sum(group.total_byte_size for group in groups)) > most:
                    raise unpacks_too_far(path)
                for batch in file.iter_batches(_BATCH):
                    yield from batch.to_pylist()
        except InputError:
            raise
        except Exception as error:  # the boundary to foreign code, which has errors of its own
            problem = f"is not a Parquet file that can be read ({type(error).__name__}: {str(error)[:200]})"
            raise InputError(problem, path=path, hint="copy it again") from error


def parquet_lines(path: Path) -> Iterator[bytes]:
    """The rows of a Parquet file as JSON, in which a date or bytes are text and a number that is none (NaN) is null."""
    rows = ({k: None if isinstance(v, float) and v != v else v for k, v in row.items()} for row in parquet_rows(path))
    return (json.dumps(row, default=str).encode() for row in rows)


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
