"""What arms spend for the same success: between checks, before anything is learned, and where seeds differ."""

from __future__ import annotations

import pytest

from turntree.core.errors import ConfigError
from turntree.experiments.compose import Point, at_equal_cost, to_target
from turntree.experiments.config import ComposeConfig

UNIT = "decoded_tokens"


def curve(*points: tuple[float, float]) -> list[Point]:
    return [{"step": step, UNIT: cost, "success": success} for step, (cost, success) in enumerate(points)]


GRPO = curve((0, 0.4), (50, 0.5), (100, 0.6))


def test_an_arm_that_spends_a_little_more_is_compared_where_the_cheaper_one_ended() -> None:
    dearer = curve((0, 0.4), (51, 0.5), (102, 0.6))
    assert at_equal_cost([dearer], [GRPO], UNIT)["mean"] == pytest.approx(0.5 + 0.1 * 49 / 51 - 0.6)


def test_the_cost_of_a_target_lies_between_checks() -> None:
    twice = curve((0, 0.4), (50, 0.6), (100, 0.6))
    found = to_target([twice], [GRPO], 0.6, UNIT)
    assert (found["reached"], found["share_of_mean"]) == (1, 0.5)
    assert to_target([twice], [GRPO], 0.55, UNIT)["share_of_mean"] == 0.5  # 37.5 of 75
    assert to_target([twice], [GRPO], 0.4, UNIT) == {"reached": 1, "share_of_first": None, "share_of_mean": None}


def test_what_was_paid_before_anything_was_learned_buys_nothing() -> None:
    """A search for 90 and ten updates: at 60 the policy is the one at the start."""
    own = curve((0, 0.4), (100, 0.4), (100, 0.8))
    other = curve((0, 0.4), (60, 0.5))
    assert at_equal_cost([own], [other], UNIT)["mean"] == pytest.approx(-0.1)
    assert to_target([own], [GRPO], 0.6, UNIT)["share_of_mean"] == 1.0


def test_seeds_that_were_not_checked_alike_have_no_mean_curve_and_keep_their_own() -> None:
    found = to_target([GRPO, GRPO[:2]], [GRPO, GRPO], 0.6, UNIT)
    assert (found["reached"], found["share_of_mean"], found["share_of_first"]["mean"]) == (1, None, 1.0)


@pytest.mark.parametrize("arm", ["grpo/pivot", "own/pivot", "pivot/pivot"])
def test_pivots_of_another_policy_than_the_one_that_trains_on_them_are_refused(arm: str) -> None:
    with pytest.raises(ConfigError, match="has pivot after another stage"):
        ComposeConfig(arms=(arm,))
