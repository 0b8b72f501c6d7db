"""Success is looked at while turns are trained: a run whose reward runs away from it ends, and says why."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.train.success import FALL, Look, best, change, has_fallen, runs_away

outcomes = st.dictionaries(st.sampled_from([f"t{i}" for i in range(30)]), st.sampled_from([0.0, 1.0]), min_size=1)


def look(step: int, won: int, of: int = 40, reward: float | None = None, **actions: float) -> Look:
    """The first `won` of `of` tasks are successes."""
    return Look(step, {f"t{i}": float(i < won) for i in range(of)}, actions, reward)


@given(outcomes)
def test_the_same_outcomes_are_no_fall(found):
    assert not has_fallen(Look(0, found, {}), Look(4, found, {}))


@given(outcomes, outcomes)
def test_a_fall_is_a_sign_test_on_the_tasks_that_both_looks_played(before, after):
    both = before.keys() & after.keys()
    lost = sum(after[task] < before[task] for task in both)
    won = sum(after[task] > before[task] for task in both)
    p = sum(math.comb(lost + won, k) for k in range(lost, lost + won + 1)) / 2 ** (lost + won)
    assert has_fallen(Look(0, before, {}), Look(4, after, {})) == (p < FALL)


@pytest.mark.parametrize(("won", "fallen"), [(12, False), (6, False), (5, True), (0, True)])
def test_the_fewest_lost_tasks_that_are_a_fall(won, fallen):
    """7 of 12 lost and none won have p = 1/128; 6 have 1/64."""
    assert has_fallen(look(0, 12), look(4, won)) is fallen


def test_a_run_ends_where_success_falls_and_the_reward_rises_and_says_what_it_does_now():
    looks = [
        look(0, 12, go=0.4, take=0.2, open=0.4),
        look(5, 10, reward=0.6, go=0.5, take=0.1, open=0.4),
        look(10, 0, reward=0.9, go=0.95, take=0.0, open=0.05),
    ]
    assert runs_away(looks[:2]) == ""
    why = runs_away(looks)
    for part in ("step 10", "30.0%", "0.0%", "0.60", "0.90", "'go' went from 40% to 95%", "'take' went from 20% to 0%"):
        assert part in why


def test_a_run_goes_on_where_its_reward_falls_too_or_success_does_not():
    start = look(0, 12)
    assert runs_away([start, look(5, 12, reward=0.8), look(10, 0, reward=0.7)]) == ""
    assert runs_away([start, look(5, 12, reward=0.6), look(10, 14, reward=0.9)]) == ""
    assert runs_away([start]) == ""


def test_a_run_without_rewards_ends_by_its_success_alone():
    assert "fell from 30.0% to 0.0%" in runs_away([look(0, 12), look(5, 0)])


def test_tasks_without_an_outcome_count_for_nothing():
    start = Look(0, {"a": 1.0, "b": 0.0}, {})
    assert best([Look(0, {}, {}), Look(4, {}, {})]) is None
    assert change(start, Look(4, {"c": 1.0}, {})) is None
    interval = change(start, Look(4, {"b": 1.0, "c": 0.0}, {}))
    assert interval is not None and interval.mean == 1.0


@given(st.lists(st.integers(0, 10), min_size=1, max_size=6))
def test_the_best_look_is_the_first_of_the_highest_success(wins):
    looks = [look(step, won, of=10) for step, won in enumerate(wins)]
    found = best(looks)
    assert found is not None and found.step == wins.index(max(wins))
