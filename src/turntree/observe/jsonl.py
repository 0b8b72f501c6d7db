"""JSON lines on disk, compressed by suffix (.gz, .xz); every problem names the file and the line."""

from __future__ import annotations

import gzip
import json
import lzma
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from turntree.core.errors import InputError
from turntree.observe.files import writing


def read_lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not blank, with their numbers from 1. Raises `InputError`."""
    path = Path(path)
    number = 0
    try:
        with _open_to_read(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except FileNotFoundError as error:
        raise InputError("does not exist", path=path, hint="check the path") from error
    except IsADirectoryError as error:
        raise InputError("is a folder", path=path, hint="name the files inside it") from error
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise InputError(
            f"the compressed file is damaged or cut off ({error})", path=path, line=number + 1, hint="copy it again"
        ) from error


def parse_json(text: bytes | str, path: str | Path | None = None, line: int | None = None) -> Any:
    """One JSON value. Raises `InputError`; NaN and Infinity are not JSON, although Python reads them."""
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig").rstrip("\r\n")
        return json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        problem = f"is not complete JSON ({error.msg}: character {error.pos})"
    except RecursionError:
        problem = "is nested too deeply to read"
    except ValueError as error:  # bytes that are not UTF-8, NaN
        problem = f"is not JSON ({error})"
    raise InputError(problem, path=path, line=line, hint="the line is damaged or cut off: write the file again")


def write_lines(path: str | Path, values: Iterable[Any]) -> int:
    """Write one JSON value a line, atomically: the file appears whole or not at all. Returns the number of lines.

    Equal values give equal bytes (no time stamp in the archive). Raises `InputError` for a value that is not JSON.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    count = 0
    try:
        with writing(path):
            with partial.open("wb") as raw:
                with _compressed(raw, path) as file:
                    for count, value in enumerate(values, start=1):
                        file.write(_encode(value, path, count))
                raw.flush()
                os.fsync(raw.fileno())
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return count


def located(
    error: InputError, *, path: str | Path | None = None, line: int | None = None, inside: str | None = None
) -> InputError:
    """The same error with its place filled in; `inside` is the field around the one that the error names."""
    field = error.field
    if inside is not None:
        field = inside if field is None or field == inside.partition("[")[0] else f"{inside}.{field}"
    return InputError(error.problem, path=path or error.path, line=line or error.line, field=field, hint=error.hint)


def _open_to_read(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return cast("IO[bytes]", gzip.open(path, "rb"))
    if path.suffix == ".xz":
        return cast("IO[bytes]", lzma.open(path, "rb"))
    return path.open("rb")


def _compressed(raw: IO[bytes], path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return cast("IO[bytes]", gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0))
    if path.suffix == ".xz":
        return cast("IO[bytes]", lzma.LZMAFile(raw, "wb"))
    return cast("IO[bytes]", _Borrowed(raw))


class _Borrowed:
    """A file that is left open when its block ends, as the two compressors leave theirs."""

    def __init__(self, raw: IO[bytes]) -> None:
        self.write = raw.write

    def __enter__(self) -> _Borrowed:
        return self

    def __exit__(self, *_: object) -> None:
        return None


def _encode(value: Any, path: Path, line: int) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=True, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"cannot be written as JSON ({error})", path=path, line=line) from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
