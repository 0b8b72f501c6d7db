"""What arms spend for the same success: between checks, before anything is learned, and where seeds differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from turntree.core.config import Part
from turntree.core.errors import ConfigError
from turntree.experiments import compose
from turntree.experiments.compose import Point, at_equal_cost, to_target
from turntree.experiments.config import ComposeConfig
from turntree.filters.dapo import DapoFilter

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


@pytest.mark.parametrize(
    ("name", "value"),
    [("gate", Part("random")), ("held_out_count", 7), ("train.dapo", DapoFilter(refill_cap=1.0))],
)
def test_settings_that_the_arms_replace_are_refused_and_not_ignored(name: str, value: Any) -> None:
    online = ComposeConfig().online
    *inside, last = name.split(".")
    changed = replace(online.train if inside else online, **{last: value})
    with pytest.raises(ConfigError, match=f"online.{name}.*replaced by what the arms say"):
        ComposeConfig(online=replace(online, train=changed) if inside else changed)


def test_seeds_share_no_task_however_many_tasks_each_has() -> None:
    online = replace(ComposeConfig().online, count=1500)
    offsets = [compose._environment(ComposeConfig(online=online), seed).options["offset"] for seed in range(3)]
    assert offsets == [0, 1500, 3000]
