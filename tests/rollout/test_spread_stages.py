"""Stages that give their work out as units: what comes back, what is asked ahead, and what a resumed run repeats."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from inline_pool import InlinePool
from test_rollout_workers import ONLINE, TWO, artifacts, differences, updates_before, versions

from turntree.core.config import Part
from turntree.core.errors import ConfigError
from turntree.credit.config import CreditConfig
from turntree.rollout.cluster.config import WorkersConfig
from turntree.rollout.cluster.pool import UnitLost
from turntree.stages import workers
from turntree.stages.train_online import run_train_online
from turntree.train.checkpoints import Checkpoints


@pytest.fixture(autouse=True)
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "WorkerPool", InlinePool)


def ahead(steps: int, iterations: int = 4, **settings: Any) -> Any:
    train = replace(ONLINE.train, iterations=iterations, max_off_policy_steps=steps)
    return replace(ONLINE, cluster=TWO, train=train, **settings)


@pytest.mark.parametrize("steps", [0, 2])
def test_an_iteration_is_sampled_with_the_weights_of_so_many_updates_before(tmp_path: Path, steps: int) -> None:
    run_train_online(ahead(steps), tmp_path / "run")
    rows = [row for row in artifacts(tmp_path / "run")["metrics.jsonl"] if row["step"]]
    done = updates_before(tmp_path / "run")
    wanted = [{done[max(0, number - steps)]} for number in range(len(rows))]
    assert sum(row["trained_groups"] > 0 for row in rows) >= 3 and versions(tmp_path / "run") == wanted
    for number, row in enumerate(rows):
        if steps and row["trained_groups"]:
            age = done[number] - done[max(0, number - steps)]
            assert (row["staleness_mean"], row["staleness_max"]) == (age, age)
            assert (abs(row["importance_mean"] - 1) > 1e-6) == (age > 0), "old log-probabilities are the trainer's"
        assert steps or "staleness_max" not in row


def test_a_killed_asynchronous_run_repeats_none_of_what_was_played_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_train_online(ahead(1), tmp_path / "calm")
    save = Checkpoints.save

    def killed(self: Checkpoints, step: int, *state: Any) -> None:
        if step == 3:
            raise KeyboardInterrupt
        save(self, step, *state)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Checkpoints, "save", killed)
        run_train_online(ahead(1), tmp_path / "killed")
    run_train_online(ahead(1), tmp_path / "killed")
    assert artifacts(tmp_path / "killed") == artifacts(tmp_path / "calm")


def test_a_group_that_is_lost_with_its_workers_is_counted_with_its_reason_and_teaches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, given = InlinePool.submit, []

    def losing(self: InlinePool, unit: dict[str, Any], **settings: Any) -> Future[Any]:
        given.append(unit)
        if len(given) != 2:
            return submit(self, unit, **settings)
        future: Future[Any] = Future()
        future.set_exception(UnitLost("3 workers were lost over one unit of work; the last: killed"))
        return future

    monkeypatch.setattr(InlinePool, "submit", losing)
    run_train_online(ahead(0, iterations=1), tmp_path / "run")
    row = next(row for row in artifacts(tmp_path / "run")["metrics.jsonl"] if row["step"])
    assert row["censored_reasons"] == {"lost: 3 workers were lost over one unit of work; the last: killed": 1}
    assert row["groups"] == 4 and row["groups_censored"] >= 1
    tasks = [tree["tree"]["task_id"] for tree in artifacts(tmp_path / "run")["trees.jsonl"]]
    assert len(set(tasks)) == 4 and given[1]["tasks"][0][1] in tasks


def test_rewards_of_turns_are_the_same_on_workers(tmp_path: Path) -> None:
    train = replace(ONLINE.train, initial_rollouts=None, turn_rewards={"progress": 2.0})
    here = replace(ONLINE, environment=Part("household"), brancher=None, gate=None, train=train)
    run_train_online(here, tmp_path / "here")
    run_train_online(replace(here, cluster=TWO), tmp_path / "there")
    found = artifacts(tmp_path / "here")
    assert list(differences(found, artifacts(tmp_path / "there"))) == []
    told = [node for tree in found["trees.jsonl"] for node in tree["tree"]["nodes"] if "metrics" in node]
    assert all("progress" in node["metrics"] for node in told) and told


def test_the_greedy_rollout_of_remax_is_played_on_workers_too(tmp_path: Path) -> None:
    train = replace(ONLINE.train, initial_rollouts=None, credit=CreditConfig(advantages="remax"))
    here = replace(ONLINE, brancher=None, gate=None, train=train)
    run_train_online(here, tmp_path / "here")
    run_train_online(replace(here, cluster=TWO), tmp_path / "there")
    assert list(differences(artifacts(tmp_path / "here"), artifacts(tmp_path / "there"))) == []


def test_rollouts_ahead_need_workers() -> None:
    with pytest.raises(ConfigError, match="needs rollout workers"):
        replace(ahead(1), cluster=WorkersConfig())
    with pytest.raises(ConfigError, match="nothing would run there"):
        WorkersConfig(address="local")
