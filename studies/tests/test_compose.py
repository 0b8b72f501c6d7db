"""What arms spend for the same success: between checks, before anything is learned, and where seeds differ."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import compose
import numpy as np
import pytest
from compose import UNITS, Point, at_equal_cost, to_target
from configs import ComposeConfig
from test_coverage import TASK_SD, chances, share

from run import studies
from turntree.core.config import Part
from turntree.core.errors import ConfigError, InputError
from turntree.stages.config import EpisodesCheckConfig

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
    [("gate", Part("random")), ("check", EpisodesCheckConfig(tasks=7)), ("filters", (Part("dapo"),))],
)
def test_settings_that_the_arms_replace_are_refused_and_not_ignored(name: str, value: Any) -> None:
    online = ComposeConfig().online
    with pytest.raises(ConfigError, match=f"online.{name}.*replaced by what the arms say"):
        ComposeConfig(online=replace(online, **{name: value}))


def test_seeds_share_no_task_however_many_tasks_each_has() -> None:
    online = replace(ComposeConfig().online, count=1500)
    offsets = [compose._environment(ComposeConfig(online=online), seed).options["offset"] for seed in range(3)]
    assert offsets == [0, 1500, 3000]


def cost_curve(draw: np.random.Generator, chance: np.ndarray, pace: float, paid: float, checks: int) -> list[dict]:
    """Success at every check of an arm that rises by 18 points, and what it had spent."""
    gained = 0.18 * (1 - np.exp(-pace * np.arange(checks) / 4))
    played = draw.random((checks, len(chance))) < np.clip(chance + gained[:, None], 0, 1)
    return [
        {"step": check, "success": float(row.mean()), **dict.fromkeys(UNITS, paid * (check + 1))}
        for check, row in enumerate(played)
    ]


@TASK_SD
def test_a_ratio_of_costs_is_covered_by_three_seeds(task_sd):
    """The truth is the mean logarithm over many seeds; arms differ in pace from seed to seed. A bootstrap over the
    three seeds covers 73% of the same samples."""
    draw, samples = np.random.default_rng(3), []
    for _ in range(600):
        chance = chances(draw, 0.41, task_sd, (100,))
        mine, first = (
            [cost_curve(draw, chance, np.exp(draw.normal(0, 0.3)), paid, 11) for _ in range(3)] for paid in (1.0, 4.0)
        )
        samples.append(to_target(mine, first, float(np.mean([points[-1]["success"] for points in first])), "turns"))
    shares = [one["share_of_first"] for one in samples]
    found = [row for row in shares if row is not None and len(row["values"]) == 3]
    truth = np.exp(np.mean([np.log(row["values"]).mean() for row in found]))
    assert len(found) > 300  # in the others an arm misses the target in a seed
    assert 0.93 <= share([one["low"] <= truth <= one["high"] for one in found]) <= 0.97


def ran(out: Path, *arguments: object) -> dict[str, Any]:
    command = ["compose", "--out", str(out), "--json", str(out / "printed.json"), *map(str, arguments)]
    studies.main(command, standalone_mode=False)
    return json.loads((out / "printed.json").read_text())


def test_composed_arms_share_their_first_stages_and_pay_for_all_of_them(tmp_path: Path) -> None:
    small = (
        "--seeds", 0, "--iterations", 2, "--steps", 2, "--groups", 2, "--set", "candidates=12", "--set", "held_out=2",
        "--set", "online.count=3", "--set", "online.train.check_every=1", "--set", "pivot.check_every=1",
        "--set", "pivot.groups=2", "--set", "pivot.group_size=2", "--set", "profile.rollouts=4",
        "--set", "online.train.group_size=4", "--set", "online.train.max_turns=3",
        "--set", "select.threshold=1.0", "--set", "select.max_per_kind=1.0", "--set", "own.tasks=3",
        "--set", "gate.turn=1",
        "--arms", "grpo,pivot,pivot/grpo+greso+gate+branching,own/grpo+dapo",
    )  # fmt: skip
    out = tmp_path / "compose"
    summary = ran(out, *small)
    curves = {arm: points for arm, (points,) in summary["curves"].items()}
    first, *rest = curves["pivot"]
    assert first["turns"] == 12 * 4, "the profile is paid before the first step"
    assert [point["turns"] - first["turns"] for point in rest] == [4, 4, 8, 8], "paid, then learned"
    assert [point["success"] for point in rest[::2]] == [first["success"], rest[1]["success"]]
    assert curves["grpo"][0]["turns"] == 0 and [point["step"] for point in curves["grpo"]] == [0, 1, 2]
    both = curves["pivot/grpo+greso+gate+branching"]
    assert both[:5] == curves["pivot"] and both[5]["turns"] > first["turns"] + 8, "one more stage on the same bill"
    own = curves["own/grpo+dapo"]
    assert own[1]["turns"] > 4, "the search for own states is paid"
    for points in curves.values():
        assert all(a[unit] <= b[unit] for unit in ("turns", "seconds") for a, b in itertools.pairwise(points))
    assert set(summary["arms"]["pivot"]) >= {"last", "best", "spent", "to_target", "minus_first", "at_equal_cost"}
    assert ran(out, *small) == summary
    with pytest.raises(InputError, match="another configuration"):
        ran(out, *small, "--set", "pivot.optimizer.learning_rate=0.1")
    made = {path.parent.relative_to(out).as_posix() for path in tmp_path.rglob("cost.json")}
    assert made == {
        f"seed0/{name}" for name in ("grpo", "pivot", "pivot/grpo+greso+gate+branching", "own", "own/grpo+dapo")
    }


@pytest.mark.parametrize("arm", ["grpo+turbo", "pivot+gate", "sft", "grpo+gate+gate"])
def test_an_arm_that_is_no_chain_of_stages_is_refused(arm: str) -> None:
    with pytest.raises(ConfigError, match="no stage"):
        ComposeConfig(arms=("grpo", arm))
