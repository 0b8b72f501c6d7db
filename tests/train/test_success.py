"""Success is looked at while turns are trained: a run whose reward runs away from it ends, and says why."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.train.success import FALSE_ALARMS, Look, best, change, fall, fewest_lost, has_fallen, moved_kinds

LEVEL = FALSE_ALARMS / 4

outcomes = st.dictionaries(st.sampled_from([f"t{i}" for i in range(30)]), st.sampled_from([0.0, 1.0]), min_size=1)


def look(step: int, won: int, of: int = 40, reward: float | None = None, **actions: float) -> Look:
    """The first `won` of `of` tasks are successes."""
    return Look(step, {f"t{i}": float(i < won) for i in range(of)}, actions, reward)


@given(outcomes)
def test_the_same_outcomes_are_no_fall(found):
    assert not has_fallen(Look(0, found, {}), Look(4, found, {}), LEVEL)


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 5))
def test_a_fall_is_a_sign_test_on_the_tasks_that_both_looks_played(lost, won, others):
    """Tasks that only one look has an outcome of say nothing."""
    before = {f"lost {i}": 1.0 for i in range(lost)} | {f"won {i}": 0.0 for i in range(won)}
    after = {task: 1.0 - outcome for task, outcome in before.items()} | {f"new {i}": 0.0 for i in range(others)}
    before |= {f"gone {i}": 1.0 for i in range(others)}
    p = sum(math.comb(lost + won, k) for k in range(lost, lost + won + 1)) / 2 ** (lost + won)
    assert has_fallen(Look(0, before, {}), Look(4, after, {}), LEVEL) == (p < LEVEL)


@pytest.mark.parametrize(("won", "fallen"), [(12, False), (6, False), (5, True), (0, True)])
def test_the_fewest_lost_tasks_that_are_a_fall(won, fallen):
    """7 of 12 lost and none won have p = 1/128; 6 have 1/64."""
    assert has_fallen(look(0, 12), look(4, won), LEVEL) is fallen
    assert fewest_lost(LEVEL) == 7


@pytest.mark.parametrize("planned", [4, 40])
def test_a_run_that_only_repeats_itself_is_hardly_ever_said_to_fall(planned):
    """The same policy plays 64 tasks anew at every look: at most 4% of runs see a fall, however often they look."""
    rng = np.random.default_rng(0)
    alarms, runs = 0, 300
    for _ in range(runs):
        chance_N = rng.beta(1, 3, 64)
        looks = [Look(n, dict(enumerate((rng.random(64) < chance_N) * 1.0)), {}) for n in range(planned + 1)]
        alarms += any(fall([looks[0], now], planned) is not None for now in looks[1:])
    assert alarms / runs <= FALSE_ALARMS + 0.02


def test_a_run_ends_where_success_falls_and_the_reward_rises_and_says_what_it_does_now():
    looks = [
        look(0, 12, reward=0.6, go=0.4, take=0.2, open=0.4),
        look(5, 10, reward=0.7, go=0.5, take=0.1, open=0.4),
        look(10, 0, reward=0.9, go=0.95, take=0.0, open=0.05),
    ]
    assert fall(looks[:2], 4) is None
    found = fall(looks, 4)
    assert found is not None and found.runs_away
    for part in ("step 10", "30.0%", "0.0%", "0.60", "0.90", "'go' went from 40% to 95%", "'take' went from 20% to 0%"):
        assert part in found.text


def test_a_fall_with_a_falling_reward_is_one_that_does_not_run_away():
    start = look(0, 12, reward=0.8)
    found = fall([start, look(10, 0, reward=0.7)], 4)
    assert found is not None and not found.runs_away
    hardly = fall([start, look(10, 0, reward=0.79)], 4)
    assert hardly is not None and hardly.runs_away, "a mean over other turns is no fall"
    assert fall([start, look(10, 14, reward=0.9)], 4) is None and fall([start], 4) is None


def test_without_rewards_success_alone_says_it():
    found = fall([look(0, 12), look(5, 0)], 4)
    assert found is not None and found.runs_away and "fell from 30.0% to 0.0%" in found.text


def test_shares_and_their_change_are_of_the_same_tasks():
    start = Look(0, {f"t{i}": float(i < 10) for i in range(20)}, {})
    now = Look(5, {f"t{i}": 0.0 for i in range(10)} | {f"new {i}": 1.0 for i in range(30)}, {})
    found = fall([start, now], 4)
    assert found is not None and "fell from 100.0% to 0.0% of 10 tasks (-100.0 points" in found.text


def test_a_look_at_few_tasks_is_not_the_best():
    """37 of 40 tasks were censored, and two of the other three were won."""
    few = Look(15, {"t0": 1.0, "t1": 1.0, "t2": 0.0}, {})
    found = best([look(0, 12), look(5, 20), few])
    assert found is not None and found.step == 5


def test_a_task_that_is_censored_makes_no_look_the_best():
    start, same = Look(0, {"a": 1.0, "b": 1.0, "c": 0.0}, {}), {"a": 1.0, "b": 1.0}
    tasks = {f"t{i}": 1.0 for i in range(30)}
    found = best([Look(0, start.outcomes | tasks, {}), Look(5, same | tasks, {}), Look(9, same | tasks, {})])
    assert found is not None and found.step == 0


def test_tasks_without_an_outcome_count_for_nothing():
    start = Look(0, {"a": 1.0, "b": 0.0}, {})
    assert best([Look(0, {}, {}), Look(4, {}, {})]) is None
    assert change(start, Look(4, {"c": 1.0}, {})) is None
    interval = change(start, Look(4, {"b": 1.0, "c": 0.0}, {}))
    assert interval is not None and interval[0] == 1.0


@given(st.lists(st.integers(0, 10), min_size=1, max_size=6))
def test_the_best_look_is_the_first_of_the_highest_success(wins):
    looks = [look(step, won, of=10) for step, won in enumerate(wins)]
    found = best(looks)
    assert found is not None and found.step == wins.index(max(wins))


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.none() | st.floats(0, 1)), max_size=12))
def test_a_kind_is_followed_over_the_steps_that_drew_it(steps):
    moved = moved_kinds([{"reward_by_kind": row} for row in steps])
    for kind in "abc":
        drawn = [row[kind] for row in steps if row.get(kind) is not None]
        assert (kind in moved) == (len(drawn) >= 6)
        if kind in moved:
            assert moved[kind] == pytest.approx((sum(drawn[:3]) / 3, sum(drawn[-3:]) / 3))
    changes = [now - was for was, now in moved.values()]
    assert changes == sorted(changes), "what was lost most comes first"
