"""`train online --reward`: functions of one's own decide what an episode is worth, in training and nowhere else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from turntree.stages import train_online
from turntree.train.checkpoints import Checkpoints

SMALL = (
    *("--iterations", 2, "--groups", 2, "--group-size", 3, "--max-turns", 3, "--max-tokens", 16, "--count", 4),
    *("--learning-rate", 3e-4, "--set", "check.tasks=2", "--set", "train.check_every=1"),
)
MODULE = '''
def brief(episode, *, most: int = 100):
    """Rewards few characters; differs between almost any two episodes."""
    return -sum(len(turn.content) for turn in episode.turns) / most

def fussy(episode):
    if len(episode.turns[0].content) % 2:
        raise ValueError("odd")
    return True

def broken(episode):
    return None

async def slow(episode):
    return 0.0
'''
MINE = ("--reward", "reward_functions:brief=0.5", "--reward", "environment=2")


@pytest.fixture(scope="module")
def folder(turntree, tmp_path_factory):
    """A folder with the functions, and two runs of the same settings: `plain` without them, `mine` with some."""
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "reward_functions.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [*sys.path])
        sys.modules.pop("reward_functions", None)
        turntree("train", "online", "--out", "plain", *SMALL)
        turntree("train", "online", "--out", "mine", *SMALL, *MINE)
        yield folder


def rows(run: str | Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (Path(run) / name).read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "timing"} for row in found]


def weights(run: str) -> bytes:
    return (Path(run) / "model" / "model.safetensors").read_bytes()


def test_the_weighted_sum_is_what_is_learned_from_and_each_mean_is_told(turntree, folder) -> None:
    start, *trained = rows("mine")
    assert start == rows("plain")[0], "what is held out is judged by the environment"
    for row in trained:
        assert set(row["rewards"]) == {"brief", "environment"} and "rewards_failed" not in row
        assert row["reward_mean"] == pytest.approx(0.5 * row["rewards"]["brief"] + 2 * row["rewards"]["environment"])
        assert row["rewards"]["brief"] < 0 and row["groups_mixed"] > 0
    assert all("rewards" not in row for row in rows("plain"))
    assert weights("mine") != weights("plain")
    config = json.loads((folder / "mine" / "config.json").read_text())
    assert config["config"]["rewards"][0] == {"name": "reward_functions:brief", "weight": 0.5}


def test_the_environment_alone_is_training_without_any_reward(turntree, folder) -> None:
    turntree("train", "online", "--out", "alone", *SMALL, "--reward", "environment")
    assert weights("alone") == weights("plain")


def test_a_killed_run_goes_on_to_the_same_weights_rows_and_values(turntree, folder, monkeypatch) -> None:
    command = ("train", "online", *SMALL, *MINE, "--set", "checkpoints.every=1", "--out")
    save = Checkpoints.save

    def killed(self: Checkpoints, step: int, *state: Any) -> None:
        if step == 2:
            raise KeyboardInterrupt
        save(self, step, *state)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", killed)
        turntree(*command, "killed", code=130)
    assert "resumes after step 1" in turntree(*command, "killed").stderr
    assert weights("killed") == weights("mine")
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert rows("killed", name) == rows("mine", name)


def test_a_run_does_not_go_on_with_a_function_that_was_changed(turntree, folder) -> None:
    (folder / "mine" / "cost.json").rename(folder / "cost.json")  # not finished
    (folder / "reward_functions.py").write_text(MODULE.replace("-sum", "+sum"))
    try:
        assert "differs in inputs.rewards" in turntree.error("train", "online", "--out", "mine", *SMALL, *MINE)
    finally:
        (folder / "reward_functions.py").write_text(MODULE)
        (folder / "cost.json").rename(folder / "mine" / "cost.json")


def test_a_function_that_fails_censors_is_counted_and_is_reported_once(turntree, folder) -> None:
    done = turntree("train", "online", "--out", "fussy", *SMALL, "--reward", "reward_functions:fussy")
    assert done.stderr.count("reward 'fussy' raised ValueError: odd") == 1
    for iteration, row in enumerate(rows("fussy")[1:], start=1):
        groups = [group for group in rows("fussy", "rollouts.jsonl") if group["iteration"] == iteration]
        leaves = [rollout for group in groups for rollout in group["rollouts"]]
        odd = [len(rollout["actions"][0]) % 2 == 1 for rollout in leaves]
        assert [rollout["reward"] for rollout in leaves] == [None if failed else 1.0 for failed in odd]
        assert row["rewards_failed"] == {"fussy": sum(odd)} and row["rewards"] == {"fussy": 1.0}
    assert "zero_variance_rate" in turntree.json("audit", "fussy", "--out", "audit.html")


def test_when_every_rollout_is_censored_nothing_is_learned_and_the_run_ends_in_an_error(turntree, folder) -> None:
    broken = ("--reward", "reward_functions:broken", "--reward", "environment")
    assert "no rollout of the run has a reward" in turntree.error("train", "online", "--out", "broken", *SMALL, *broken)
    for row in rows("broken")[1:]:
        assert row["reward_mean"] is None and row["groups_censored"] == 2 and row["trained_groups"] == 0
        assert row["rewards"]["broken"] is None and row["rewards"]["environment"] is not None


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ("reward_functions:slow", "'reward_functions:slow' is asynchronous"),
        ("reward_functions:brief=much", "the weight of 'reward_functions:brief' is 'much'"),
        ("nothing", "there is no reward 'nothing'; registered: environment, rubric, success"),
    ],
)
def test_what_cannot_judge_is_refused_in_one_line(turntree, folder, reward, said) -> None:
    assert said in turntree.error("train", "online", "--out", "refused", *SMALL, "--reward", reward)
    assert not (folder / "refused").exists()


def test_a_reward_that_there_is_not_is_refused_before_a_model_is_loaded(turntree, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(train_online, "load_policy", lambda *_: pytest.fail("a model is loaded"))
    message = turntree.error("train", "online", "--out", tmp_path / "run", "--reward", "sucess=2")
    assert "'sucess'" in message and "success" in message


def test_an_option_that_a_reward_lacks_is_named_by_the_key_that_sets_it(turntree, tmp_path) -> None:
    message = turntree.error("train", "online", "--out", tmp_path / "run", *SMALL, "--reward", "rubric")
    key = message.partition("--set ")[2].partition("=")[0]
    further = turntree.error(
        *("train", "online", "--out", tmp_path / "run", *SMALL, "--reward", "rubric"),
        *("--set", f"{key}=http://127.0.0.1:9/v1"),
    )
    assert key not in further and "rewards.0.model" in further
