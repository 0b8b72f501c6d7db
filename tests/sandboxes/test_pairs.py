"""B's answer never depends on A: pairs of programs, in one box one after the other, and in two at once.

A few are run each time, all of them by `make test-pairs`.
"""

import os

import pytest
from pairs import LOCKS, PAIRS, SHARED_BESIDE, differences
from rootless import said_without_root

ALL = "TURNTREE_PAIRS" in os.environ
FEW = ("asynchronous I/O", "flags of files", "the numbers of processes", "signals that wait", "the scratch folder")
APART = sorted(set(PAIRS) - set(LOCKS) - SHARED_BESIDE)


@pytest.mark.parametrize("name", PAIRS if ALL else (*FEW, "flock, exclusive", "POSIX read locks"))
def test_no_program_changes_what_a_later_one_answers(name, sandbox):
    assert "before" not in differences(name)


@pytest.mark.parametrize("name", APART if ALL else FEW)
def test_no_program_changes_what_another_one_answers_beside_it(name, sandbox):
    """But for what docs/design/sandbox.md does not guarantee: locks on files of the system, marks on devices."""
    assert not differences(name)


def test_without_root_no_program_changes_what_another_answers_either():
    names = APART if ALL else ["asynchronous I/O", "the scratch folder"]
    found = {}
    for start in range(0, len(names), 8):  # each within the time of a test
        code = f"import json, pairs; print(json.dumps({{n: pairs.differences(n) for n in {names[start : start + 8]}}}))"
        found |= said_without_root(code)
    assert found == {name: {} for name in names}
