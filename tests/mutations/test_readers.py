"""Whatever is done to a file that turntree reads, it is read, or refused in one short line that names it."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from mutations.measure import outcomes
from mutations.readers import READERS

COUNT, _, SEED = os.environ.get("TURNTREE_MUTANTS", "").partition(":")  # COUNT[:SEED]; mutations.measure has no tests
MUTATIONS = int(COUNT or 60)


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_input_is_read_or_refused_in_one_line_that_names_it(name, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # thousands of small files: a disk would take minutes
    found = outcomes(READERS[name], tmp_path, MUTATIONS, int(SEED or 0))
    wrong = Counter({what: count for what, count in found.items() if what not in ("read", "refused")})
    assert found.total() == MUTATIONS
    assert not wrong, f"{wrong.total()} of {MUTATIONS}: {dict(wrong.most_common(5))}"
    assert found["refused"] or "dropping" in name  # the damage is damage
