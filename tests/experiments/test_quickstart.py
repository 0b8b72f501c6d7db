"""The comparison that the quickstart prints: paired over games, billed to the arm that spent it."""

from dataclasses import replace
from pathlib import Path

import pytest

from turntree.core.config import Part
from turntree.core.errors import ConfigError
from turntree.env.tasks import open_tasks
from turntree.experiments.quickstart import (
    QuickstartConfig,
    demonstrator,
    own_stage,
    run_quickstart,
    table,
)
from turntree.report.read import ARMS, Arm, Evaluation, Play, Run, Share, Table
from turntree.report.results import Bill, arm_results, differences
from turntree_worlds.household.entry import SPLIT_SIZE, GamesConfig, games


def evaluation(rewards: list[list[float]]) -> Evaluation:
    outcomes = {f"g{i}": sum(r) / len(r) for i, r in enumerate(rewards) if r}
    play = Play(Share(None, 0, 1, 0), 1.0, {}, outcomes, censored=0, turns_per_episode=None, invalid_share=None)
    return Evaluation({}, "0", play, play, None, {}, {})


def run_of(*arms: Arm, **tables: Table) -> Run:
    return Run("q", Path("q"), **{"profile": None, "pivots": None, "random": None, **tables}, arms=arms, summary=None)


def test_differences_are_paired_and_games_without_a_score_are_left_out():
    mine, theirs = evaluation([[1.0], [1.0], [0.0], []]), evaluation([[0.0], [1.0], [0.0], [1.0]])
    (found,) = differences(run_of(Arm("base", evaluation=theirs), Arm("pivotrl", evaluation=mine)))
    assert found.sampled.tasks == found.greedy.tasks == 3
    assert found.sampled.mean == pytest.approx(1 / 3)


@pytest.mark.parametrize("without", [{"greedy": False}, {"skills_per_kind": 0}])
def test_an_evaluation_without_what_the_table_compares_is_refused_before_anything_runs(without):
    with pytest.raises(ConfigError, match="needs greedy=true and skills_per_kind above 0"):
        QuickstartConfig(evaluate=replace(QuickstartConfig().evaluate, **without))


def test_profiling_is_billed_to_pivotrl_and_to_nobody_else():
    header = {"summary": {"cost": {"turns": 80, "decoded_tokens": 400}}, "timing": {"engine_seconds": 5.0}}
    timing = {"engine_seconds": 1.0, "environment_seconds": 0.0, "training_seconds": 2.0}
    cost = {"turns": 10, "decoded_tokens": 50, "trained_tokens": 7, "timing": timing}
    arms = [Arm("base"), *(Arm(name, cost=cost) for name in ("random", "pivotrl"))]
    base, random, pivotrl = arm_results(run_of(*arms, profile=Table(header, ())))
    assert base.bill is None
    assert random.bill == Bill(10, 50, 7, 3.0)
    assert pivotrl.bill == Bill(90, 450, 7, 8.0)


def test_the_first_lines_say_what_was_gained_sampled_and_what_was_lost_greedy():
    """The figures of seed 0, whose gain is sampled only."""
    arm = {"success": 0.5, "low": 0.4, "high": 0.6, "greedy_success": 0.5, "retention_change": 0.0}
    arm |= {"turns": 1, "tokens": 1, "seconds": 1.0}
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
    first, second, *_ = table(summary)
    assert first.startswith("PivotRL (the paper's, kinds capped) minus base") and " minus SFT" in second
    assert "+11.0 points [+5.2, +17.0] (better) sampled, -3.2 points [-8.8, +2.0] (not told apart) greedy" in first
    assert "+3.8 points [-1.8, +9.5] (not told apart) sampled, -7.5 points [-13.0, -2.0] (worse) greedy" in second


def test_seeds_share_no_training_game_however_many_each_has():
    config = QuickstartConfig(seed=2, demonstrator=Part("household", {"games": {"count": 1500}}))
    assert demonstrator(config).options["games"]["offset"] == 3000


def test_a_demonstrator_that_does_not_say_its_games_is_refused_before_anything_runs(tmp_path, monkeypatch):
    """It was a KeyError, after its traces were written and the other arms had begun."""
    (tmp_path / "mine.py").write_text(
        "class Mine:\n    def __init__(self, *, games: dict, seed: int): ...\n    def __call__(self): return []\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="does not say on which games"):
        run_quickstart(QuickstartConfig(demonstrator=Part("mine:Mine")), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_no_seed_trains_on_games_that_it_is_tested_on():
    """The first and the last games that the largest seed can train on, against those that every seed is tested on."""
    played = GamesConfig(**{"split": "train", **demonstrator(QuickstartConfig()).options["games"]})
    last = replace(played, offset=SPLIT_SIZE - 20, count=20)
    config = QuickstartConfig().evaluate
    with open_tasks(config.environment, {config.split: 20}) as opened:
        tested = {task.task_id for task in opened.of(config.split)}
    for trained in (replace(played, count=20), last):
        assert tested.isdisjoint(game.id for game, _ in games(trained))
    with pytest.raises(ConfigError, match="leave the split"):
        replace(last, count=21)


@pytest.mark.parametrize(
    ("options", "games", "count"),
    [
        ({"games": {"count": 700}}, "generated", 560),
        ({"slips": 0.2}, "generated", 160),
        ({"games": {"count": 50, "source": "games.jsonl", "difficulty": "hard"}, "dev": 0.5}, "games.jsonl", 25),
    ],
)
def test_own_states_come_from_the_games_of_the_demonstrator(options, games, count):
    stage = own_stage(QuickstartConfig(demonstrator=Part("household", options)))
    assert (stage.environment.options["games"], stage.own.count) == (games, count)
    assert stage.environment.options["difficulty"] == options.get("games", {}).get("difficulty", "easy")
