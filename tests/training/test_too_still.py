"""A run that goes nowhere says so early."""

import pytest

from turntree.training.drift import STILL, too_still


@pytest.mark.parametrize(
    ("step", "steps", "said"), [(3, 8, True), (2, 8, False), (4, 40, True), (3, 40, False), (5, 40, False)]
)
def test_it_is_said_once_at_a_tenth_of_the_steps_and_not_before_the_third(step, steps, said):
    assert (too_still({"step": step, "kl": STILL / 2}, steps) is not None) == said


@pytest.mark.parametrize("row", [{"step": 4, "kl": STILL}, {"step": 4, "kl": None}, {"step": 4}, {"step": 0}])
def test_a_policy_that_moves_and_one_that_was_not_measured_are_not_warned_of(row):
    assert too_still(row, 40) is None
