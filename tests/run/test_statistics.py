"""Intervals against values worked out elsewhere."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.run.statistics import (
    clopper_pearson_high,
    clopper_pearson_low,
    paired_bootstrap,
    successes_needed,
    wilson,
)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(31, 100, 0.2278, 0.4063), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (0, 0, 0.0, 1.0)],
)
def test_wilson_matches_published_values(successes, trials, low, high):
    assert wilson(successes, trials) == pytest.approx((low, high), abs=1e-4)


def test_a_paired_difference_cancels_what_both_share():
    easy_and_hard = [0.0, 1.0] * 100
    better = [min(1.0, value + 0.1) for value in easy_and_hard]
    mean, low, high = paired_bootstrap(better, easy_and_hard)
    assert mean == pytest.approx(0.05)
    assert 0.03 < low < 0.05 < high < 0.07


def test_no_difference_at_all_leaves_room_for_tasks_not_seen():
    alike = paired_bootstrap([1.0, 0.0] * 200, [1.0, 0.0] * 200)
    assert alike == pytest.approx((0.0, -0.0092, 0.0092), abs=1e-4)


@pytest.mark.parametrize(("tasks", "told"), [(1, False), (3, False), (5, False), (6, True), (20, True)])
def test_equal_differences_on_a_few_tasks_show_nothing(tasks: int, told: bool):
    """Six of six is where a sign test at 5% begins to tell anything, too."""
    mean, low, high = paired_bootstrap([1.0] * tasks, [0.0] * tasks)
    assert mean == high == 1.0 and (low > 0) is told


def test_unequal_lengths_are_refused():
    with pytest.raises(ValueError, match="pairs"):
        paired_bootstrap([1.0], [1.0, 0.0])


@pytest.mark.parametrize("floor", [0.5, 0.8, 0.95])
def test_the_exact_lower_bound_is_where_the_binomial_tail_equals_the_error(floor):
    successes, trials = 9, 10
    low = clopper_pearson_low(successes, trials, confidence=floor)
    tail = sum(math.comb(trials, k) * low**k * (1 - low) ** (trials - k) for k in range(successes, trials + 1))
    assert tail == pytest.approx(1 - floor)


def test_successes_alone_support_a_floor_of_80_percent_from_14_on():
    assert clopper_pearson_low(13, 13) < 0.8 < clopper_pearson_low(14, 14)
    assert clopper_pearson_low(0, 5) == 0.0 and clopper_pearson_high(5, 5) == 1.0
    assert clopper_pearson_high(0, 61) == pytest.approx(1 - 0.05 ** (1 / 61))


@given(st.integers(0, 60), st.floats(0.05, 0.98), st.floats(0.5, 0.99))
def test_the_fewest_successes_are_those_whose_bound_first_reaches_the_floor(trials, floor, confidence):
    needed = int(successes_needed(trials, floor, confidence)[trials])
    if needed <= trials:
        assert clopper_pearson_low(needed, trials, confidence) >= floor - 1e-9
    assert clopper_pearson_low(min(needed - 1, trials), trials, confidence) < floor + 1e-9
