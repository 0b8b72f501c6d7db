"""docs/papers.md goes through the papers line by line: every row has what it promises."""

from __future__ import annotations

import contextlib
import io
import json
import re
import tomllib
from collections import Counter
from functools import cache

import pytest
from paper_rows import REPOSITORY, STATUS, Row, rows

from turntree.cli.main import main

STAGES = (
    *("traces import", "sft", "profile --verifier paper", "select", "train pivot --verifier paper", "evaluate"),
    *("gate calibrate", "experiment gate", "train online --environment household --filter dapo"),
    "train online --environment qa --gate divergence --brancher entropy",
    "train online --environment qa --brancher arpo",
)
PARTS = {"filters": "filters", "gate": "gates", "brancher": "branchers", "format": "trace_formats"}
PARTS |= {"verifier": "verifiers", "verifier.then": "verifiers", "rewards": "rewards", "device.engine": "engines"}
DERIVED = ("papers/test_statements.py", "laws/", "credit/", "decide/", "studies/tests/test_theory.py")
DERIVED += tuple(f"train/test_{name}.py" for name in ("losses", "parity", "packing", "update"))
NUMBERS = {"P": range(1, 76), "S": range(76, 152), "A": range(152, 195)}


def listed(stage: str) -> set[str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main(["config", *stage.split(), "--json", "-"])
    return {row["key"] for row in json.loads(out.getvalue())["keys"]}


@cache
def keys() -> frozenset[str]:
    return frozenset({"filters.0"}).union(*(listed(stage) for stage in STAGES))


@cache
def registered() -> dict[str, set[str]]:
    groups = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["entry-points"]
    return {name.removeprefix("turntree."): set(parts) for name, parts in groups.items()}


def settings(row: Row) -> list[tuple[str, str]]:
    """The keys that the row's form names, with their values."""
    told = [word.partition("=") for word in re.findall(r"`([^`]+)`", row.form)]
    found = [(re.sub(r"^filters\.\d+\..+", "filters.0", key), value) for key, _, value in told]  # options of a part
    return [(key, value) for key, value in found if key in keys() or (value and " " not in key)]


def test_the_page_has_the_194_statements_of_three_papers() -> None:
    assert [row.number for row in rows()] == [f"{paper}{n}" for paper, span in NUMBERS.items() for n in span]
    assert not [row.number for row in rows() if not row.statement or row.status not in STATUS]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.number)
def test_what_a_row_names_exists(row: Row) -> None:
    for key, value in settings(row):
        assert key in keys(), f"{row.number}: there is no key {key}"
        if value and key in PARTS and ":" not in value:
            assert value in registered()[PARTS[key]], f"{row.number}: {key} has no {value}"
    for script in re.findall(r"`python ([^ `]+)", row.form):
        assert (REPOSITORY / script).is_file()
    if row.test:
        path, _, name = row.test.strip("`").partition("::")
        folder = REPOSITORY if path.startswith("studies/") else REPOSITORY / "tests"
        text = (folder / path).read_text(encoding="utf-8")
        assert not name or f"def {name}(" in text, f"{row.number}: {row.test}"


def test_what_differs_has_a_key_what_is_missing_a_reason_and_what_works_a_form() -> None:
    assert not [row.number for row in rows() if row.status == "differs" and not any(v for _, v in settings(row))]
    assert not [row.number for row in rows() if row.status == "missing" and len(row.form) < 10]
    assert not [row.number for row in rows() if not row.form or (row.status == "works" and not row.test)]


def test_sixty_statements_are_held_by_a_derivation_of_their_own() -> None:
    held = [row for row in rows() if row.test.strip("`").startswith(DERIVED)]
    assert len(held) >= 60
    assert sum("papers/test_statements.py" in row.test for row in held) >= 40


def test_the_page_says_how_many_rows_it_has_of_each_kind() -> None:
    page = (REPOSITORY / "docs" / "papers.md").read_text(encoding="utf-8")
    found = Counter(row.status for row in rows())
    assert ", ".join(f"{found[status]} {status}" for status in STATUS) in page
