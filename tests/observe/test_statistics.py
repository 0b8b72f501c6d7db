"""Intervals against values worked out elsewhere."""

import pytest

from turntree.observe.statistics import paired_bootstrap, wilson


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


def test_no_difference_gives_a_point_at_zero():
    assert paired_bootstrap([1.0, 0.0], [1.0, 0.0]) == (0.0, 0.0, 0.0)


def test_unequal_lengths_are_refused():
    with pytest.raises(ValueError, match="pairs"):
        paired_bootstrap([1.0], [1.0, 0.0])
