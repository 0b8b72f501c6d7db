"""The rows of a source file: JSON lines, or one JSON document (a list of rows, one row, or a tau2 result), whatever the
file is called: a document over several lines is told by its first line, which is no whole value."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from turntree.core.errors import InputError
from turntree.observe.jsonl import parse_json, read_lines


@dataclass(frozen=True)
class SourceRow:
    """One row, or why it could not be read. `line` for JSON lines, `index` (as in "simulations[3]") in a document."""

    value: dict[str, Any] | InputError
    line: int | None = None
    index: str | None = None
    environment_info: dict[str, Any] | None = None  # of the tau2 document that the row comes from


def source_rows(path: str | Path) -> Iterator[SourceRow]:
    """Every row of a file. A damaged line is a row with an error; a damaged document raises `InputError`."""
    path = Path(path)
    name = path.name.removesuffix(".gz").removesuffix(".xz")
    lines = read_lines(path)
    first = list(itertools.islice(lines, 2))
    if _is_document(first, named_so=name.endswith(".json")):
        text = b"".join(text for _, text in itertools.chain(first, lines))
        yield from _document(parse_json(text, path), path)
        return
    for number, text in itertools.chain(first, lines):
        yield _line(number, text)


def _is_document(first: list[tuple[int, bytes]], *, named_so: bool) -> bool:
    """Whether a file that begins with these lines is one JSON document: a .json file, unless it holds JSON lines after
    all (more than one, and the first is a whole object), and a file whose first line only opens a bracket."""
    if not first or (len(first) < 2 and not named_so):
        return False
    if not named_so:
        return first[0][1].strip() in (b"{", b"[", b"[{")
    try:
        return len(first) < 2 or not isinstance(parse_json(first[0][1]), dict)
    except InputError:
        return True


def _line(number: int, text: bytes) -> SourceRow:
    try:
        value = parse_json(text)
    except InputError as error:
        return SourceRow(error, line=number)
    return SourceRow(_object(value), line=number)


def _document(value: Any, path: Path) -> Iterator[SourceRow]:
    if isinstance(value, list):
        for i, row in enumerate(cast("list[Any]", value)):
            yield SourceRow(_object(row), index=f"[{i}]")
        return
    document = _object(value)
    if isinstance(document, InputError):
        raise InputError("is neither an object nor a list", path=path, hint="write JSON lines, one trace a line")
    simulations = document.get("simulations")
    if not isinstance(simulations, list):
        yield SourceRow(document)
        return
    info: Any = document.get("info") or {}
    environment = info.get("environment_info") if isinstance(info, dict) else None
    if not isinstance(environment, dict | None):
        raise InputError(f"is {type(environment).__name__}, not an object", path=path, field="info.environment_info")
    for i, row in enumerate(cast("list[Any]", simulations)):
        yield SourceRow(_object(row), index=f"simulations[{i}]", environment_info=cast(Any, environment))


def _object(value: Any) -> dict[str, Any] | InputError:
    if isinstance(value, dict):
        return cast("dict[str, Any]", value)
    return InputError(f"is {type(value).__name__}, not an object", hint="write one object a line")
