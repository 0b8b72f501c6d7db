"""The documents of a corpus: JSONL rows, text files, or a folder of both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turntree.core.errors import InputError
from turntree.run.files import parse_line
from turntree.run.jsonl import read_lines, read_text

_TEXT = (".txt", ".md", ".rst")
_KEYS = {"id", "title", "text"}


@dataclass(frozen=True)
class Document:
    id: str
    title: str
    text: str


def read_documents(path: Path) -> Iterator[Document]:
    """The documents of a `.jsonl` file (`text`, and `id` and `title` if it has them), of a text file (its name is the
    title), or of every such file below a folder, in order of path. Raises `InputError` naming file, line and field;
    an empty document is an error too, because a search cannot find it.
    """
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and file.suffix in (".jsonl", *_TEXT))
        if not files:
            raise InputError("holds no documents", path=path, hint=f"put .jsonl, {', '.join(_TEXT)} files in it")
        for file in files:
            yield from _of_file(file, str(file.relative_to(path)))
    else:
        yield from _of_file(path, path.name)


def _of_file(path: Path, name: str) -> Iterator[Document]:
    if path.suffix == ".jsonl":
        for number, line in read_lines(path):
            yield _of_row(parse_line(line, path, number), path, number, f"{name}:{number}")
    elif path.suffix in _TEXT:
        text = read_text(path)
        if not text.strip():
            raise InputError("is empty", path=path, hint="remove it")
        yield Document(name, Path(name).stem, text)
    elif not path.exists():
        raise InputError("does not exist", path=path, hint="check the path")
    else:
        raise InputError("is neither .jsonl nor text", path=path, hint=f"use .jsonl, {', '.join(_TEXT)} or a folder")


def _of_row(row: dict[str, Any], path: Path, number: int, name: str) -> Document:
    if unknown := sorted(set(row) - _KEYS):
        raise InputError("unknown key", path=path, line=number, field=unknown[0], hint="known keys: id, text, title")
    values: dict[str, Any] = {"id": name, "title": ""} | row
    for key in ("text", "title"):
        if not isinstance(values.get(key), str):
            raise InputError("is not text", path=path, line=number, field=key, hint="write a string")
    if not values["text"].strip():
        raise InputError("is empty", path=path, line=number, field="text", hint="leave the row out")
    return Document(str(values["id"]), values["title"], values["text"])
