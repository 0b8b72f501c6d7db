"""The fault matrix: whatever foreign code does at any place, no reward comes of it.

`TURNTREE_WRITE=1` writes the table into docs/results/reliability.md, which this test compares it with.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from foreign_parts import FAULTS, LIMITED, MARKS, NOT_HERE, PARTS, STANDS_ALONE, TurntreeError, played, proper, table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "reliability.md"
BEGIN, END = "<!-- fault matrix: made by tests/contracts/test_fault_matrix.py -->\n", "<!-- end -->"
RAISED, GIVEN = [*FAULTS][:6], [*FAULTS][7:]
TALKS = ("plain class: a tool", "plain class: an asynchronous tool", "`tau2:` a tool")
MEANT = {  # what is documented to be an answer, by part and fault
    **{(name, fault): "told the policy" for name in TALKS for fault in ("exception", *GIVEN)},
    **{(name, "None"): "decides nothing" for name in ("gate", "brancher", "filter")},
    **{("logger", fault): "decides nothing" for fault in GIVEN},
    ("plain class: `done`", "None"): "goes on",
    ("filter", "empty"): "decides nothing",
    ("filter", "text"): "drops, by this reason",
    ("MCP row: `answer`", "text"): "taken",
}


@pytest.fixture(scope="module")
def cells() -> dict[tuple[str, str], str]:
    return {(name, fault): played(name, fault) for name in PARTS for fault in FAULTS}


def test_no_cell_is_a_reward(cells: dict[tuple[str, str], str]) -> None:
    """Each censors, ends the run in one line, is refused, switched off, or has its documented meaning."""
    told = {cell for cell, found in cells.items() if found == "told the policy"}
    assert told == {cell for cell, meaning in MEANT.items() if meaning == "told the policy"}
    wrong = {cell: found for cell, found in cells.items() if found not in MARKS and MEANT.get(cell) != found}
    assert wrong == {}


def test_what_the_machine_does_is_never_told_to_the_policy(cells: dict[tuple[str, str], str]) -> None:
    for (name, fault), found in cells.items():
        if fault in RAISED[1:] and found != NOT_HERE:
            assert found in ("censored", "ends the run", "refused", "switched off"), (name, fault)


def test_every_limit_of_time_is_met(cells: dict[tuple[str, str], str]) -> None:
    assert {name for name in PARTS if cells[name, "hangs"] == "censored"} == LIMITED


@pytest.mark.parametrize("name", [name for name in PARTS if name not in STANDS_ALONE])
def test_every_part_works_where_it_gives_what_it_should(name: str) -> None:
    """Or nothing of it would say anything about faults."""
    try:
        found = proper(name)
    except TurntreeError as error:
        found = f"refused: {error}"
    assert not found.startswith(("censored", "refused", "ends the run", "switched off")), found


def test_the_page_has_the_table(cells: dict[tuple[str, str], str]) -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    shown, _, after = rest.partition(END)
    made = table(cells) + "\n"
    if os.environ.get("TURNTREE_WRITE"):
        PAGE.write_text(before + BEGIN + made + END + after)
        shown = made
    assert shown == made, "write it with TURNTREE_WRITE=1"
