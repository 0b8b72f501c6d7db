"""B's answer never depends on A: pairs of programs, in one box one after the other, and in two at once.

A few are run each time, all of them by `make test-pairs`.
"""

import os

import pytest
from hostile import CONFIG
from pairs import LOCKS, PAIRS, answer, beside, differences, programs
from rootless import said_without_root

from turntree_worlds.sandboxes import host
from turntree_worlds.sandboxes.sandbox import Sandbox

ALL = "TURNTREE_PAIRS" in os.environ
FEW = (
    "flock, exclusive", "POSIX read locks", "locks of open file descriptions", "asynchronous I/O", "flags of files",
    "the size of pipes", "the numbers of processes", "signals that wait", "times at which files were read",
)  # fmt: skip
NOTHING_SHARED = {
    "leases": "refused", "a database in the scratch folder": "the folder is the box's own",
    "the list of locks": "it is empty", "POSIX write locks on devices": "held by every guest",
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS if ALL else FEW)
def test_no_program_changes_what_another_answers_by(name, sandbox):
    assert not differences(name)


def test_without_root_no_program_changes_what_another_answers_either():
    names = sorted(PAIRS.keys() if ALL else {"flock, exclusive", "POSIX write locks on devices"})
    found = {}
    for start in range(0, len(names), 8):  # each within the time of a test
        code = f"import json, pairs; print(json.dumps({{n: pairs.differences(n) for n in {names[start : start + 8]}}}))"
        found |= said_without_root(code)
    assert found == {name: {} for name in names}


@pytest.mark.parametrize("name", LOCKS if ALL else FEW[:3])
def test_the_pairs_find_boxes_that_share_files(name, sandbox, monkeypatch):
    """A check of the check: without the guest's own copies boxes share files, as they once did."""
    if name in NOTHING_SHARED:
        pytest.skip(NOTHING_SHARED[name])
    alone = answer_of(programs(name)[1])
    monkeypatch.setattr(host, "_OWN", host._OWN.replace("own({uid}); ", ""))
    assert beside(name) != alone


def answer_of(program):
    with Sandbox(CONFIG) as alone:
        return answer(alone, program)
