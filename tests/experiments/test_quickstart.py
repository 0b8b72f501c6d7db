"""The comparison that the quickstart prints: paired over games, billed to the arm that spent it."""

from pathlib import Path
from typing import Any

import pytest

from turntree.core import parts
from turntree.core.config import Part
from turntree.core.errors import ConfigError
from turntree.env.tasks import open_tasks
from turntree.experiments.quickstart import (
    GAMES,
    GAMES_PER_SEED,
    TEST,
    demonstrator,
    games_of,
    own_stage,
    table,
)
from turntree.report.read import ARMS, Arm, Run, Table
from turntree.report.results import arm_rows, differences
from turntree_worlds.household.entry import SPLIT_SIZE


def evaluation(rewards: list[list[float]]) -> dict[str, Any]:
    outcomes = {f"g{i}": sum(r) / len(r) for i, r in enumerate(rewards) if r}
    play = {"success": None, "low": 0, "high": 1, "episodes": 0, "outcomes": outcomes, "invalid_share": None}
    return {"config": {}, "sampled": play, "greedy": play, "retention": {}, "cost": {}}


def run_of(*arms: Arm, **tables: Table) -> Run:
    return Run("q", Path("q"), arms=arms, **tables)


def test_differences_are_paired_and_games_without_a_score_are_left_out():
    mine, theirs = evaluation([[1.0], [1.0], [0.0], []]), evaluation([[0.0], [1.0], [0.0], [1.0]])
    (found,) = differences(run_of(Arm("base", evaluation=theirs), Arm("pivotrl", evaluation=mine)))
    assert found.sampled.tasks == found.greedy.tasks == 3
    assert found.sampled.mean == pytest.approx(1 / 3)


def test_profiling_is_billed_to_pivotrl_and_to_nobody_else():
    profiled = {"turns": 80, "decoded_tokens": 400, "prefilled_tokens": 900}
    header = {"summary": {"cost": profiled}, "timing": {"engine_seconds": 5.0}}
    timing = {"engine_seconds": 1.0, "environment_seconds": 0.0, "training_seconds": 2.0}
    cost = {"turns": 10, "decoded_tokens": 50, "prefilled_tokens": 100, "trained_tokens": 7, "timing": timing}
    arms = [Arm("base"), *(Arm(name, cost=cost) for name in ("grpo", "pivotrl"))]
    base, grpo, pivotrl = (row["bill"] for row in arm_rows(run_of(*arms, profile=Table(header, ()))))
    assert base is None
    assert list(grpo.values()) == [10, 50, 100, 7, 3.0]
    assert list(pivotrl.values()) == [90, 450, 1000, 7, 8.0]


def test_the_first_lines_say_what_was_gained_sampled_and_what_was_lost_greedy():
    arm = {"success": 0.5, "low": 0.4, "high": 0.6, "greedy_success": 0.5, "retention_change": 0.0}
    arm |= {"turns": 1, "tokens": 1, "prefilled_tokens": 20, "trained_tokens": 300, "seconds": 1.0}
    base = {"mean": 0.11, "low": 0.052, "high": 0.17, "games": 400}
    base |= {"greedy_mean": -0.032, "greedy_low": -0.088, "greedy_high": 0.02}
    sft = {"mean": 0.038, "low": -0.018, "high": 0.095, "games": 400}
    sft |= {"greedy_mean": -0.075, "greedy_low": -0.13, "greedy_high": -0.02}
    summary = {
        "arms": dict.fromkeys(ARMS, arm),
        "differences": {"pivotrl-base": base, "pivotrl-sft": sft},
        "wall_seconds": 1.0,
        "report": "r.html",
    }
    first, second, *rows = table(summary)
    assert sum(" 321 " in row for row in rows) == len(ARMS)  # what each arm cost in all
    assert first.startswith("PivotRL, kinds balanced minus base") and " minus SFT" in second
    assert "+11.0 points [+5.2, +17.0] (better) sampled, -3.2 points [-8.8, +2.0] (not told apart) greedy" in first
    assert "+3.8 points [-1.8, +9.5] (not told apart) sampled, -7.5 points [-13.0, -2.0] (worse) greedy" in second


def test_no_seed_trains_on_games_that_another_trains_on_or_that_it_is_tested_on():
    """The first and the last games that the largest seed can train on, against those that every seed is tested on."""
    assert GAMES <= GAMES_PER_SEED == games_of(3)["offset"] - games_of(2)["offset"]
    with open_tasks(TEST.environment, {TEST.split: 20}) as opened:
        tested = {task.task_id for task in opened.of(TEST.split)}
    last = Part("household", {**games_of(0), "offset": SPLIT_SIZE - 20})
    for trained in (Part("household", games_of(0)), last):
        with open_tasks(trained, {"train": 20}) as opened:
            assert tested.isdisjoint(task.task_id for task in opened.of("train"))
    with pytest.raises(ConfigError, match="leave the split"), open_tasks(last, {"train": 21}):
        pass


def test_own_states_come_from_the_games_of_the_demonstrator():
    stage, told = own_stage(2), parts.resolve("demonstrators", demonstrator(2)).options
    shown = told["environment"]
    assert stage.environment is not None and stage.environment.options["offset"] == shown["offset"] == 2000
    assert stage.environment.options["difficulty"] == shown["difficulty"] == TEST.environment.options["difficulty"]
    assert stage.own.count == int(told["count"] * (1 - told["dev"])) == 102
