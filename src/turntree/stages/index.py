"""Make a search index of a corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from turntree.tools.documents import read_documents
from turntree.tools.search import build_index


def make_index(corpus: Path, out: Path) -> dict[str, Any]:
    """Index the documents of `corpus` (a .jsonl or text file, or a folder of them) into `out`."""
    return {**build_index(read_documents(corpus), out), "bytes": out.stat().st_size}
