"""What the oracle may know, and where it forks."""

import json

import ladder
import numpy as np
import pytest
from configs import LadderConfig
from ladder import Foresight, ForkAt, OracleBrancher
from moments import moments

from run import studies
from token_world import EPISODES, TokenRenderer, TokenWorld, WatchedEngine
from turntree.core.errors import InputError
from turntree.core.tree import RolloutTree
from turntree.decide.branching.rules import RandomBrancher
from turntree.rollout.scheduler import Scheduler, SchedulerConfig
from turntree_worlds.sandboxes.sandbox import Sandbox


def children(brancher, size: int) -> dict[str, list[tuple[int, ...]]]:
    """What the children of every first fork of a start sampled in the turn of the fork, by task and start."""
    rollouts = SchedulerConfig(episodes=EPISODES, group_size=size, initial_rollouts=2, refills=False)
    scheduler = Scheduler(WatchedEngine(), TokenRenderer(), rollouts, brancher=brancher)
    found: dict[str, list[tuple[int, ...]]] = {}
    for group in scheduler.run((TokenWorld(f"task {n}") for n in range(20)), seed=0):
        tree: RolloutTree = group.tree
        for number, point in enumerate(tree.branch_points()):
            found[f"{tree.task_id}/{number}"] = [tree[child].token_ids for child in tree.children(point)]
    return found


def test_the_children_that_an_oracle_saw_are_not_those_that_it_is_billed_for() -> None:
    """Draws are keyed by rollout, so a billed fork gets the first two children of the measured one, and those are left
    out of what is known."""
    billed = children(RandomBrancher(rate=1.0, probe_tokens=1), 4)
    known = children(ForkAt(2, 4, 0), 8)
    shared = [name for name in billed if name in known and len(known[name]) == 4]
    assert len(shared) > 10
    assert all(known[name][: ladder._BILLED] == billed[name] for name in shared)
    assert any(each not in billed[name] for name in shared for each in known[name][ladder._BILLED :])


def values(seen) -> dict[tuple[str, int, int], float]:
    draws = np.random.default_rng(0)
    return {(one.task_id, one.key[0], one.turn): float(draws.uniform()) for one in seen}


@pytest.mark.parametrize("pooled", [False, True])
def test_the_oracle_forks_where_the_value_is_high_at_the_coin_s_rate(pooled) -> None:
    first, second = moments(60), moments(60, seed=0, iteration=1)
    known = values(first)
    oracle, coin = OracleBrancher(known, branches=2, shared=0, pooled=pooled), RandomBrancher(rate=None, probe_tokens=1)
    for one in first:
        oracle.decide(one)
        coin.decide(one)
    forked, passed, tossed = [], [], 0
    for one in second:
        value = known.get((one.task_id, one.key[0], one.turn))
        if value is None or one.budget == 0:
            continue
        decision, control = oracle.decide(one), coin.decide(one)
        assert decision is not None and control is not None
        (forked if decision.branches > 1 else passed).append(value)
        tossed += control.branches > 1
    assert np.mean(forked) > np.mean(passed) + 0.15
    assert abs(len(forked) - tossed) < 0.25 * len(forked) + 10


def test_foresight_forks_a_rollout_once_at_its_best_moment() -> None:
    seen = [one for one in moments(10) if one.budget]
    known = values(seen)
    brancher = Foresight(known, branches=2, shared=0)
    forks = [one for one in seen if (found := brancher.decide(one)) is not None and found.branches > 1]
    by_rollout = {(one.task_id, one.key): known[one.task_id, one.key[0], one.turn] for one in forks}
    assert len(by_rollout) == len(forks) == len({(one.task_id, one.key) for one in seen})
    for (task, key), value in by_rollout.items():
        assert value == max(v for (name, start, _), v in known.items() if (name, start) == (task, key[0]))


def test_the_regression_recovers_what_generated_the_variance() -> None:
    draws = np.random.default_rng(0)
    inputs = draws.normal(size=(400, 3))
    found = ladder.posterior(inputs, inputs @ np.array([0.5, 0.0, -0.2]) + 0.1 * draws.normal(size=400))
    assert found == pytest.approx([0.5, 0.0, -0.2], abs=0.03)


def row(task: str, turn: int, rewards: list[float], entropy: float) -> dict:
    features = {"probe_entropy": entropy, "calls": float(turn)}
    return {
        "task": task,
        "turn": turn,
        "rewards": rewards,
        "variance": float(np.var(rewards, ddof=1)),
        "features": features,
    }


def test_a_predictor_is_held_against_questions_that_it_never_saw() -> None:
    draws = np.random.default_rng(0)
    rows = []
    for task in range(20):
        for turn in (2, 3):
            entropy = float(draws.uniform())
            successes = round(2 * entropy)
            rows.append(row(f"q{task}", turn, [1.0] * successes + [0.0] * (4 - successes), entropy))
    found = ladder.predictors(rows)
    assert found["entropy"]["spearman"] > 0.8
    assert found["learned"]["spearman"] > 0.8
    assert found["history"] is None  # there is one seed


def test_a_question_s_history_is_of_other_seeds() -> None:
    rows = [{**row("q", 2, rewards, 0.0), "seed": seed} for seed, rewards in ((0, [0.0, 1.0]), (1, [1.0, 1.0]))]
    assert ladder._history(rows).tolist() == [0.0, 0.5]


def test_a_policy_that_never_comes_to_a_fork_is_refused_before_its_arms_are_played(monkeypatch) -> None:
    monkeypatch.setattr(ladder, "measured", lambda *_: iter(()))
    stage = ladder._Stage(LadderConfig(), None, None)  # nothing else is looked at
    with pytest.raises(InputError, match="no rollout comes to a moment"):
        ladder._seed(stage, 0, np.zeros(1, dtype=np.float32))


@pytest.fixture
def sandboxed() -> None:
    try:
        Sandbox().close()
    except InputError as error:
        pytest.skip(str(error))


def test_the_ladder_is_climbed_in_miniature_and_goes_on_where_it_stopped(sandboxed, tmp_path, capsys) -> None:
    small = ("--iterations", "2", "--groups", "1", "--children", "2", "--arms", "coin,oracle,foresight")
    sizes = ("--set", "group_size=4", "--set", "reference=2", "--set", "episodes.max_turns=4")
    studies.main(["ladder", "--out", str(tmp_path), "--seeds", "0", *small, *sizes], standalone_mode=False)
    before = (tmp_path / "seed0.json").stat().st_mtime_ns
    studies.main(["ladder", "--out", str(tmp_path), "--seeds", "0,1", *small, *sizes], standalone_mode=False)
    assert (tmp_path / "seed0.json").stat().st_mtime_ns == before
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert "oracle - coin" in capsys.readouterr().out
    assert {"cosine", "mixed_groups"} <= set(summary["differences"]["oracle - coin"])
    for arm in summary["arms"].values():
        assert arm["leaves"]["mean"] == 4
    with pytest.raises(InputError, match="another configuration"):  # seeds of two configurations are never averaged
        studies.main(
            ["ladder", "--out", str(tmp_path), "--seeds", "0", *small, *sizes, "--children", "3"], standalone_mode=False
        )
