"""The rows of a source: a file of JSON lines or text, one JSON document, a Parquet file, a log of Inspect, a folder or
an archive of them.

A document (a list of rows, one row, a tau2 result) is recognised by its name or by a first line that is not a complete
value, and is read row by row (`traces.documents`).
"""

from __future__ import annotations

import itertools
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from turntree.core.errors import InputError
from turntree.core.messages import as_object
from turntree.run.jsonl import decode, read_chunks, read_lines
from turntree.run.opening import members_of, most_unpacked, opened, parquet_lines, unpacks_too_far
from turntree.traces.documents import document_info, document_rows, parsed

NAMES = (".json", ".jsonl", ".traj", ".txt", ".ndjson")  # of the files that a folder or an archive is searched for
_DOCUMENTS = (".json", ".traj")
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz")
_RESULT, _SIMULATIONS = "results.json", "simulations"  # of a tau2 result that is a folder
_HEAD = 1 << 20  # bytes that are looked at to tell a document from lines


@dataclass(frozen=True)
class SourceRow:
    """One row, or why it could not be read. `line` for JSON lines, `index` (as in "simulations[3]") in a document."""

    value: dict[str, Any] | InputError
    line: int | None = None
    index: str | None = None
    format: str | None = None  # where the file told it: of a session, whose rows come as one


@dataclass(frozen=True)
class SourceFile:
    """One file of rows. `shown` is its name in errors; `info` is the `environment_info` of the tau2 result that it
    belongs to."""

    path: Path
    shown: Path
    info: dict[str, Any] | None = None


def source_files(path: str | Path, ignored: Counter[str]) -> Iterator[SourceFile]:
    """A file itself; of a folder the files inside in the order of their names, of a tar archive in its own order.
    Files of other names, and links that lead to no file or to a folder, are counted in `ignored`. Raises `InputError`
    where there is none."""
    path = Path(path)
    if path.is_dir():
        names = sorted(file for file in path.rglob("*") if _is_file(file, ignored))
        found = [file for file in names if file.suffix in _PACKED or _wanted(file, ignored)]
        for file in found:
            yield from _opened(file, _result_info(file, path))
        if not found:
            told = ", ".join((*NAMES, *_PACKED))
            raise InputError(f"holds no file named {told}", path=path, hint="name the files themselves")
    elif path.name.endswith(_ARCHIVES):
        yield from _members(path, ignored)
    else:
        yield from _opened(path)


def source_rows(path: str | Path, known: dict[str, Any] | None = None) -> Iterator[SourceRow]:
    """Every row of a file. What is damaged is a row with an error. The rows of a tau2 result have its
    `environment_info`, which its document tells or is `known`."""
    path = Path(path)
    if not _is_document(path):
        for number, text in read_lines(path):
            yield SourceRow(_object(parsed(text), known), line=number)
        return
    for (index, value), info in document_rows(path):
        try:
            environment = _environment(info)
        except InputError as error:  # without it, no row has its prompt
            yield SourceRow(error, index=index)
            continue
        yield SourceRow(_object(value, known if environment is None else environment), index=index)


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file that are not blank, with their numbers from 1."""
    for number, line in read_lines(path):
        yield number, decode(line, path, number).rstrip("\r\n")


def is_text(path: Path) -> bool:
    """Whether a file is text: its beginning cannot be JSON."""
    return next(read_chunks(path, 1 << 12), b"").lstrip(b"\xef\xbb\xbf \t\r\n")[:1] not in (b"{", b"[", b"")


def _members(path: Path, ignored: Counter[str]) -> Iterator[SourceFile]:
    """One member at a time, as a file of its own in a folder that is removed, whatever place its name tells."""
    with tempfile.TemporaryDirectory() as folder:
        for member, pieces in members_of(path):
            name = Path(member.name)
            if not (member.isfile() or member.isdir()):
                ignored["links and devices in an archive"] += 1
            if not member.isfile() or not _wanted(name, ignored):
                continue
            if name.parent.name == _SIMULATIONS:  # what it needs of its result may stand behind it
                raise InputError("is a result of tau2 as a folder", path=path / name, hint="extract the archive")
            file = Path(folder) / name.name[-100:]
            with file.open("wb") as target:
                target.writelines(pieces())
            yield SourceFile(file, path / member.name)
            file.unlink()


def _samples(path: Path) -> Iterator[SourceFile]:
    """The samples of an archive of Inspect, one at a time."""
    with tempfile.TemporaryDirectory() as folder, opened(path) as raw:
        file, left = Path(folder) / "sample.json", most_unpacked(path)
        try:
            archive = zipfile.ZipFile(raw)
            names = [name for name in archive.namelist() if name.startswith("samples/") and name.endswith(".json")]
            for name in names:
                left -= archive.getinfo(name).file_size
                if left < 0:
                    raise unpacks_too_far(path)
                file.write_bytes(archive.read(name))
                yield SourceFile(file, path / name)
        except NotImplementedError as error:
            hint = "inspect log convert --to json --output-dir DIR FILE, and import the samples of what that writes"
            raise InputError("is compressed in a way that Python does not read", path=path, hint=hint) from error
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise InputError(f"is not a readable archive ({error})", path=path, hint="copy it again") from error
    if not names:
        raise InputError("holds no samples", path=path, hint="name a log of Inspect whose samples were written")


def _table(path: Path) -> Iterator[SourceFile]:
    """The rows of a Parquet file as JSON lines."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        with file.open("wb") as lines:
            lines.writelines(line + b"\n" for line in parquet_lines(path))
        yield SourceFile(file, path)


_PACKED = {".eval": _samples, ".parquet": _table}


def _opened(path: Path, info: dict[str, Any] | None = None) -> Iterator[SourceFile]:
    return _PACKED[path.suffix](path) if path.suffix in _PACKED else iter([SourceFile(path, path, info)])


def _is_file(path: Path, ignored: Counter[str]) -> bool:
    if path.is_file():
        return True
    if path.is_symlink() or not path.is_dir():
        ignored["links that lead to no file, and devices"] += 1
    return False


def _wanted(file: Path, ignored: Counter[str]) -> bool:
    name = file.name.removesuffix(".gz").removesuffix(".xz")
    if name.startswith(".") or not name.endswith(NAMES):
        ignored[f"files named *{Path(name).suffix or name}"] += 1
        return False
    return True


def _result_info(file: Path, folder: Path) -> dict[str, Any] | None:
    """tau2 writes a result also as a folder: `results.json` with the `info`, and one file a simulation."""
    result = file.parent.parent / _RESULT
    if file.parent.name != _SIMULATIONS or not result.is_relative_to(folder) or not result.is_file():
        return None
    return _environment(document_info(result))


def _environment(info: Any) -> dict[str, Any] | None:
    """The `environment_info` of a tau2 document's `info`, and which of the benchmark's agents spoke."""
    if info is None:
        return None
    whole = as_object(info)
    environment = whole.get("environment_info") or {}
    if not isinstance(environment, dict):
        raise InputError(f"is {type(environment).__name__}, not an object", field="info.environment_info")
    spoke = as_object(whole.get("agent_info")).get("implementation")
    return cast("dict[str, Any]", environment) | ({"agent": spoke} if spoke else {})


def _is_document(path: Path) -> bool:
    """Whether a file is one JSON document: one named so, unless it holds JSON lines after all (more than one, and the
    first is a whole object), and a file whose first line is only the beginning of a list or an object."""
    name = path.name.removesuffix(".gz").removesuffix(".xz")
    head = b"".join(itertools.islice(read_chunks(path, _HEAD), 2)).removeprefix(b"\xef\xbb\xbf").lstrip()
    first, several, rest = head.partition(b"\n")
    if not name.endswith(_DOCUMENTS):
        whole = first.strip() != b"{" and not (first.startswith(b"[") and isinstance(parsed(first), InputError))
        return bool(several and rest.strip()) and not whole
    if not several or not rest.strip():
        return bool(head)
    return not isinstance(parsed(first), dict)


def _object(value: Any, environment: dict[str, Any] | None) -> dict[str, Any] | InputError:
    if isinstance(value, dict):
        return cast("dict[str, Any]", value) | ({} if environment is None else {"environment_info": environment})
    if isinstance(value, InputError):
        return value
    return InputError(f"is {type(value).__name__}, not an object", hint="write one object a line")
