"""The papers, where a checkout has them, and the page that goes through them line by line."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "papers.md"
STATUS = ("works", "differs", "missing", "hardware")


@dataclass(frozen=True)
class Row:
    """A statement of a paper. `form` names the keys or the command that give the paper's form, `test` what holds it,
    as file::test."""

    number: str
    statement: str
    status: str
    form: str
    test: str


@cache
def rows() -> tuple[Row, ...]:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if re.match(r"\| [PSA]\d+ \|", line)]
    return tuple(Row(*(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])) for line in lines)


def plain(text: str) -> str:
    """Without white space and marks of emphasis, which conversions of one PDF differ in."""
    return re.sub(r"[\s$*`]|</?b>", "", text).replace("\\times", "×")


@cache
def text(name: str) -> str:
    """A paper as `plain` text; the test is skipped where there is none."""
    folder = Path(os.environ.get("TURNTREE_PAPERS", REPOSITORY.parent / "shared" / "papers"))
    if not (folder / name).is_file():
        pytest.skip(f"the paper {name} is not here; set TURNTREE_PAPERS")
    return plain((folder / name).read_text(encoding="utf-8"))
