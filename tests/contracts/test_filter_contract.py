"""What every filter promises, over ours and one from outside the package."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doors.parts_of_ones_own import MODULES
from turntree.core.labels import Credit, NodeCredit
from turntree.core.protocols import Filter, FinishedGroup
from turntree.decide.filters.dapo import DapoFilter
from turntree.decide.filters.greso import Greso, GresoConfig

OWN: dict[str, Any] = {}
exec(MODULES["door_rules"], OWN)
KINDS: dict[str, Callable[[], Filter]] = {
    "nothing": lambda: type("Nothing", (Filter,), {})(),
    "dapo": lambda: DapoFilter(refill_cap=1.0),
    "greso": lambda: Greso(GresoConfig(seed=3, easy_exploration=0.05, hard_exploration=0.05)),
    "of one's own": lambda: OWN["Bored"](seed=3, after=1),
}
contract = settings(max_examples=60, deadline=None)
each = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())

rewards = st.lists(st.one_of(st.none(), st.sampled_from([0.0, 0.25, 1.0])), min_size=2, max_size=4).map(tuple)


def finished(task: str, iteration: int, found: tuple[float | None, ...]) -> FinishedGroup:
    scored = {reward for reward in found if reward is not None}
    labels = Credit({1: NodeCredit(1.0, -1.0, 1.0)}, 4.0, 2.0, zero_variance=len(scored) < 2)
    lonely = sum(reward is not None for reward in found) < 2
    return FinishedGroup(task_id=task, iteration=iteration, rewards=found, credit=None if lonely else labels)


plays = st.lists(st.lists(st.tuples(st.sampled_from("abc"), rewards), max_size=5), max_size=6)
Said = list[tuple[str, str | None]]


def play(one: Filter, log: list[list[tuple[str, Any]]], first: int = 1) -> Said:
    """What it says of every task and every group, in whole iterations."""
    said: Said = []
    for iteration, groups in enumerate(log, start=first):
        said += [(f"skip {task}", one.skip(task, iteration)) for task in "abc"]
        for task, found in groups:
            group = finished(task, iteration, found)
            said.append((f"drop {task}", one.drop(group) if group.credit is not None else None))
            one.finished(group)
        one.end_iteration()
    return said


@each
@contract
@given(before=plays, after=plays)
def test_what_is_restored_goes_on_as_the_first_would_have(make: Any, before: Any, after: Any) -> None:
    first, second = make(), make()
    play(first, before)
    second.restore(json.loads(json.dumps(first.state())))
    assert second.state() == first.state()
    assert play(second, after, len(before) + 1) == play(first, after, len(before) + 1)


@each
@contract
@given(log=plays, group=rewards)
def test_a_question_changes_no_answer(make: Any, log: Any, group: Any) -> None:
    """Tasks are asked about as often as the stream passes them, and a repeated call is no new evidence."""
    one = make()
    play(one, log)
    asked = finished("a", len(log) + 1, group)
    answers = [(one.skip("a", len(log) + 1), asked.credit and one.drop(asked)) for _ in range(3)]
    assert len(set(answers)) == 1


@each
@contract
@given(log=plays)
def test_reasons_are_few_and_can_be_counted(make: Any, log: Any) -> None:
    reasons = {why for _, why in play(make(), log) if why is not None}
    assert all(isinstance(why, str) and why for why in reasons) and len(reasons) <= 6


@each
@contract
@given(log=plays)
def test_nothing_is_skipped_of_which_nothing_is_known(make: Any, log: Any) -> None:
    one = make()
    play(one, log)
    assert one.skip("never seen", len(log) + 1) is None


@each
@contract
@given(log=plays)
def test_the_order_of_groups_within_an_iteration_does_not_matter(make: Any, log: Any) -> None:
    """Groups of different tasks may end in any order; those of one task keep theirs."""
    one, other = make(), make()
    play(one, log)
    play(other, [sorted(groups, key=lambda group: group[0]) for groups in log])
    assert [one.skip(task, 99) for task in "abc"] == [other.skip(task, 99) for task in "abc"]
