"""JSON from disk, read strictly: text, one value, lines (compressed by suffix: .gz, .xz).

All text and all JSON from users is read here, so that damage of any kind (another encoding, a cut
line or archive, nesting without end, numbers of thousands of digits) is an `InputError` that names file and line.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import gzip
import json
import lzma
import os
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from turntree.core.errors import InputError, TurntreeError, disk_is_full
from turntree.core.messages import each_key_once, finite_number
from turntree.run.opening import LONGEST, opened

DEEPEST = 100  # levels of nesting: far above any real input, far below Python's recursion limit
_HUGE = re.compile(r"[eE]\+?\d{3}|\d{200}")  # what a number that no float can hold looks like
_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # how JSON spells the halves of a surrogate pair
_LONE = re.compile(r"[\ud800-\udfff]")  # a half that is left without the other, which UTF-8 cannot hold
_AGAIN = "write the file again"
_ROWS = "write its rows as JSON lines"
_BINARY = {  # how files begin that hold no text
    b"PAR1": ("a Parquet file", f"of traces, `turntree traces import` reads it; else {_ROWS}"),
    b"PK\x03\x04": ("a zip archive (logs of Inspect, *.eval, are such)", "extract it, and name the JSON files in it"),
    b"\x1f\x8b": ("a gzip archive", "give it a name that ends in .gz, a tar archive one in .tar.gz"),
    b"\xfd7zXZ": ("an xz archive", "give it a name that ends in .xz, a tar archive one in .tar.xz"),
    b"\x28\xb5\x2f\xfd": ("a zstd archive", "decompress it"),
    b"BZh": ("a bzip2 archive", "decompress it"),
    b"ARROW1": ("an Arrow file", _ROWS),
    b"\xff\xff\xff\xff": ("an Arrow stream", _ROWS),
    b"SQLite format 3": ("an SQLite database", _ROWS),
    b"\x89HDF": ("an HDF5 file", _ROWS),
}


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a full disk (or quota) inside the block into a one-line `TurntreeError`."""
    try:
        yield
    except TurntreeError:
        raise
    except Exception as error:  # safetensors and sqlite raise their own errors
        if not disk_is_full(error):
            raise
        problem = f"{path}: cannot be written, because the disk or your quota is full, or `ulimit -f` is reached"
        raise TurntreeError(f"{problem}; free some space and give the same command again") from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary sibling of `path` for writing; it is renamed to `path` only if the block succeeds. Those that
    killed processes left are removed: a living one holds a lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with contextlib.suppress(OSError), left.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with writing(path), temporary.open("wb") as raw:
            with contextlib.suppress(OSError):  # a file system without locks: nothing is removed on it either
                fcntl.flock(raw, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield raw
            raw.flush()
            os.fsync(raw.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not blank, with their numbers from 1. Raises `InputError`."""
    path, number = Path(path), 0
    with opened(path) as file:
        with placed(line=1):
            beginning = file.peek(16)
        _refuse_binary(beginning, path)
        try:
            while line := file.readline(LONGEST + 1):
                if len(line) > LONGEST:
                    raise too_long(path)
                number += 1
                if line.strip():
                    yield number, line
        except InputError as error:
            raise located(error, line=number + 1) from error


def read_chunks(path: str | Path, size: int = 1 << 20) -> Iterator[bytes]:
    """The bytes of a file, `size` at a time. Raises `InputError`."""
    path = Path(path)
    with opened(path) as file:
        _refuse_binary(file.peek(16), path)
        while chunk := file.read(size):
            yield chunk


def read_bytes(path: str | Path) -> bytes:
    """A whole file as it is. Raises `InputError`."""
    path = Path(path)
    with opened(path, packed=False) as file:
        data = file.read(LONGEST + 1)
    if len(data) > LONGEST:
        raise too_long(path)
    return data


def read_text(path: str | Path) -> str:
    """A whole file of UTF-8 text (with or without a byte order mark). Raises `InputError`."""
    return decode(read_bytes(path), path)


def read_toml(path: str | Path) -> dict[str, Any]:
    """A whole file of TOML. Raises `InputError`."""
    try:
        return tomllib.loads(read_text(path).replace("\r\n", "\n"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"is not TOML ({error})", path=path, hint="correct it") from error


def read_config(path: str | Path) -> dict[str, Any]:
    """The object in a model's `config.json`, which may hold Infinity (state-space models' do). Raises `InputError`."""
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise InputError(f"is not JSON ({error})", path=path, hint="save the model again") from error
    if not isinstance(value, dict):
        raise InputError(f"is {type(value).__name__}, not an object", path=path, hint="save the model again")
    return cast("dict[str, Any]", value)


def too_long(path: str | Path | None = None) -> InputError:
    problem = f"is longer than {LONGEST:,} bytes, the most that is held in memory"
    return InputError(problem, path=path, hint="write smaller rows, one a line")


def decode(data: bytes, path: str | Path | None = None, line: int | None = None) -> str:
    """UTF-8 bytes as text. Raises `InputError` for any other encoding."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        _refuse_binary(data, path)
        problem = f"is not UTF-8 ({error.reason} at byte {error.start})"
        raise InputError(problem, path=path, line=line, hint="save it as UTF-8") from error


def parse_json(
    text: bytes | str, path: str | Path | None = None, line: int | None = None, *, half_characters: bool = False
) -> Any:
    """One JSON value. Raises `InputError`.

    NaN and Infinity are not JSON, although Python reads them, and 1e999 as infinity. An object that says a key twice is
    refused, for readers differ in which they take. Text with a lone surrogate is
    refused too, because no tokenizer and no UTF-8 file can hold it; `half_characters` allows it, for our own records of
    model output.
    """
    if isinstance(text, bytes):
        text = decode(text, path, line)
    try:
        floats = finite_number if _HUGE.search(text) else None  # a function of Python's takes its time
        value = json.loads(
            text.rstrip("\r\n"), parse_constant=finite_number, parse_float=floats, object_pairs_hook=each_key_once
        )
    except json.JSONDecodeError as error:
        raise _not_json(text, error, path, line) from error
    except RecursionError as error:
        raise _too_deep(path, line) from error
    except ValueError as error:  # NaN, a key twice, or a number with more digits than Python reads
        raise InputError(f"is not JSON ({error})", path=path, line=line, hint=_AGAIN) from error
    if text.count("[") + text.count("{") > DEEPEST and depth(value) > DEEPEST:
        raise _too_deep(path, line)
    if not half_characters and _HALF.search(text) and _LONE.search(json.dumps(value, ensure_ascii=False)):
        problem = "holds half of a surrogate pair (\\ud800 to \\udfff alone), which is not a character"
        raise InputError(problem, path=path, line=line, hint="remove it")
    return value


def parse_object(
    text: bytes | str, path: str | Path | None = None, line: int | None = None, *, half_characters: bool = False
) -> dict[str, Any]:
    """`parse_json` of an object."""
    value = parse_json(text, path, line, half_characters=half_characters)
    if not isinstance(value, dict):
        raise InputError(f"is {type(value).__name__}, not an object", path=path, line=line, hint=_AGAIN)
    return cast("dict[str, Any]", value)


def json_line(value: Any) -> str:
    """One line of a JSONL file. Text stays readable; lone surrogates are escaped, and what some readers take for
    the end of a line."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n"
    for end in ("\x85", "\u2028", "\u2029"):  # `str.translate` takes fifty times as long where text is not ASCII
        text = text.replace(end, f"\\u{ord(end):04x}")
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def write_lines(path: str | Path, values: Iterable[Any]) -> int:
    """Write one JSON value a line, atomically: the file appears whole or not at all. Returns the number of lines.

    Equal values give equal bytes (no time stamp in the archive). Raises `InputError` for a value that is not JSON.
    """
    path, count = Path(path), 0
    with replacing(path) as raw, _compressed(raw, path) as file:
        for count, value in enumerate(values, start=1):
            try:
                line = json_line(value)
            except (TypeError, ValueError, RecursionError) as error:
                raise InputError(f"cannot be written as JSON ({error})", path=path, line=count) from error
            file.write(line.encode())
    return count


def located(
    error: InputError, *, path: str | Path | None = None, line: int | None = None, inside: str | None = None
) -> InputError:
    """The same error with its place filled in; `inside` is the field around the one that the error names."""
    field = error.field
    if inside is not None:
        field = inside if field is None or field == inside.partition("[")[0] else f"{inside}.{field}"
    return InputError(error.problem, path=path or error.path, line=line or error.line, field=field, hint=error.hint)


@contextlib.contextmanager
def placed(*, path: str | Path | None = None, line: int | None = None, inside: str | None = None) -> Iterator[None]:
    """Errors of the block with their place filled in (`located`)."""
    try:
        yield
    except InputError as error:
        raise located(error, path=path, line=line, inside=inside) from error


def _refuse_binary(beginning: bytes, path: str | Path | None) -> None:
    for magic, (what, hint) in _BINARY.items():
        if beginning.startswith(magic):
            raise InputError(f"is {what}, not text", path=path, hint=hint)


def _compressed(raw: IO[bytes], path: Path) -> contextlib.AbstractContextManager[IO[bytes]]:
    if path.suffix == ".gz":
        return cast(Any, gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0))
    return cast(Any, lzma.LZMAFile(raw, "wb")) if path.suffix == ".xz" else contextlib.nullcontext(raw)


def _not_json(text: str, error: json.JSONDecodeError, path: str | Path | None, line: int | None) -> InputError:
    opening = text.strip()
    if line is not None and (opening == "{" or (opening[:1] == "[" and error.pos >= len(text.rstrip()))):
        hint = f"write one value a line (jq -c {'.' if opening == '{' else '.[]'} does that)"
        return InputError("is the beginning of JSON over several lines", path=path, line=line, hint=hint)
    line = error.lineno if line is None and path is not None else line
    problem = f"is not complete JSON ({error.msg}: character {error.pos})"
    begins = error.pos > len(text) - len(text.lstrip())
    hint = f"it is damaged or cut off: {_AGAIN}" if begins else "no JSON begins so: name a file of JSON"
    return InputError(problem, path=path, line=line, hint=hint)


def _too_deep(path: str | Path | None, line: int | None) -> InputError:
    return InputError(f"is nested too deeply to read (more than {DEEPEST} levels)", path=path, line=line, hint=_AGAIN)


def depth(value: Any) -> int:
    """Levels of nesting, without recursion."""
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        level = [item for one in level for item in (one.values() if isinstance(one, dict) else one)]
    return depth
