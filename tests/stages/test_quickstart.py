"""The comparison that the quickstart prints: paired over games, billed to the arm that spent it."""

from dataclasses import replace

import pytest

from turntree.core.errors import ConfigError
from turntree.observe.files import write_json
from turntree.stages.quickstart import QuickstartConfig, _bill, _difference, table
from turntree.stages.tasks import SPLIT_SIZE, games


def evaluation(rewards):
    outcomes = [{"task": f"g{i}", "rewards": r} for i, r in enumerate(rewards)]
    return {"sampled": {"outcomes": outcomes}, "greedy": {"outcomes": outcomes}}


def test_differences_are_paired_and_games_without_a_score_are_left_out():
    found = _difference(evaluation([[1.0], [1.0], [0.0], []]), evaluation([[0.0], [1.0], [0.0], [1.0]]), seed=0)
    assert found["games"] == 3
    assert found["mean"] == pytest.approx(1 / 3)


def test_evaluations_of_different_games_are_refused():
    other = evaluation([[1.0]])
    other["sampled"]["outcomes"][0]["task"] = "another"
    with pytest.raises(ValueError, match="different games"):
        _difference(evaluation([[1.0]]), other, seed=0)


def test_profiling_is_billed_to_pivotrl_and_to_nobody_else(tmp_path):
    profile = {"summary": {"cost": {"turns": 80, "decoded_tokens": 400}}, "timing": {"engine_seconds": 5.0}}
    timing = {"engine_seconds": 1.0, "environment_seconds": 0.0, "training_seconds": 2.0}
    for arm in ("random", "pivotrl"):
        cost = {"turns": 10, "decoded_tokens": 50, "trained_tokens": 7, "timing": timing}
        write_json(tmp_path / arm / "cost.json", cost)
    assert _bill(tmp_path, "base", profile)["turns"] == 0
    assert _bill(tmp_path, "random", profile) == {"turns": 10, "tokens": 50, "trained_tokens": 7, "seconds": 3.0}
    assert _bill(tmp_path, "pivotrl", profile) == {"turns": 90, "tokens": 450, "trained_tokens": 7, "seconds": 8.0}


def test_the_table_says_when_zero_is_inside():
    arm = {"success": 0.5, "low": 0.4, "high": 0.6, "greedy_success": 0.5, "retention_change": 0.0}
    arm |= {"turns": 1, "tokens": 1, "seconds": 1.0}
    row = {"mean": 0.01, "low": -0.02, "high": 0.04, "games": 400}
    summary = {
        "arms": dict.fromkeys(("base", "sft", "random", "pivotrl"), arm),
        "differences": {"pivotrl-base": row | {"low": 0.005}, "pivotrl-sft": row},
        "wall_seconds": 1.0,
        "report": "r.html",
    }
    told = {line.split()[0]: line for line in table(summary) if line.startswith("pivotrl-")}
    assert told["pivotrl-base"].endswith("above zero") and told["pivotrl-sft"].endswith("zero is inside")


def test_no_seed_trains_on_games_that_it_is_tested_on():
    """The first and the last games that the largest seed can train on, against those that every seed is tested on."""
    played = QuickstartConfig().traces.games
    last = replace(played, offset=SPLIT_SIZE - 20, count=20)
    tested = {game.id for game, _ in games(replace(QuickstartConfig().evaluate.games, count=20))}
    for trained in (replace(played, count=20), last):
        assert tested.isdisjoint(game.id for game, _ in games(trained))
    with pytest.raises(ConfigError, match="leave the split"):
        replace(last, count=21)
