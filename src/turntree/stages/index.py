"""Make a search index of a corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from turntree.core.errors import InputError
from turntree.tools.documents import read_documents
from turntree.tools.search import build_index


def make_index(corpus: Path, out: Path, *, overwrite: bool = False) -> dict[str, Any]:
    """Index the documents of `corpus` (a .jsonl or text file, or a folder of them) into `out`. Raises `InputError`
    where `out` is there already, unless `overwrite`."""
    if out.exists() and not overwrite:
        raise InputError("is there already", path=out, hint="choose another --out, or add --overwrite")
    return {**build_index(read_documents(corpus), out), "bytes": out.stat().st_size}
