"""Verdicts on the turns of an iteration: which are judged, how often, and what they cost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_train_online import CONFIG, WHOLE

from turntree.stages import verdicts
from turntree.stages.config import EpisodesCheckConfig
from turntree.stages.train_online import TrainOnlineConfig, run_train_online
from turntree.stages.verdicts import TurnVerdicts
from turntree_worlds.household.environment import HouseholdEnvironment


def one_task(**settings: Any) -> TrainOnlineConfig:
    """Every group of an iteration plays the same task."""
    train = replace(CONFIG.train, iterations=1, groups=3, check_every=0, **WHOLE, **settings)
    return replace(CONFIG, count=1, brancher=None, gate=None, train=train)


def test_what_labels_cost_is_on_the_bill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment is played again up to the labelled states."""
    steps = 0
    step = HouseholdEnvironment.step

    def counted(self: HouseholdEnvironment, action: Any) -> Any:
        nonlocal steps
        steps += 1
        return step(self, action)

    monkeypatch.setattr(HouseholdEnvironment, "step", counted)
    config = one_task(verdicts=1.0)
    run_train_online(replace(config, check=EpisodesCheckConfig(tasks=1)), tmp_path / "run")
    bill = json.loads((tmp_path / "run" / "cost.json").read_text(encoding="utf-8"))
    assert bill["tool_calls"] + bill["checks"]["tool_calls"] == steps > 27


def test_a_state_that_several_episodes_share_is_labelled_once_and_all_its_turns_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All episodes of a group begin at one state. Here the teacher says nothing there."""
    asked: list[int] = []

    def silent(trace: Any, task: Any, teacher: Any, turns: set[int]) -> Any:
        asked.extend(turns)
        return labelled(trace, task, lambda _, history: "no idea" if len(history) < 3 else teacher(_, history), turns)

    labelled = verdicts.labelled
    monkeypatch.setattr(verdicts, "labelled", silent)
    run_train_online(one_task(verdicts=1.0), tmp_path / "run")
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    told, episodes = row["local"], row["trees"]["leaves"]
    assert asked.count(0) == 3 < episodes and len(asked) == told["visited"]
    assert told["not_judged"]["dropped turn: no_label: no idea"] == 3
    assert told["not_judged"]["dropped turn: at a state that was dropped"] == episodes - 3
    assert told["turns_judged"] + sum(told["not_judged"].values()) == row["spent"]["turns"]


def test_a_turn_that_several_episodes_share_is_judged_and_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Episodes that forked after it took it once; its advantage counts for each of them."""
    asked: list[int] = []

    def counted(verifier: Any, pairs: Any, **options: Any) -> Any:
        asked.append(len(pairs))
        return judged(verifier, pairs, **options)

    judged = verdicts.judge_turns
    monkeypatch.setattr(verdicts, "judge_turns", counted)
    train = replace(CONFIG.train, iterations=1, check_every=0, verdicts=1.0)
    run_train_online(replace(CONFIG, gate=None, train=train), tmp_path / "run")
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    told, trees = row["local"], row["trees"]
    assert trees["turns_chain"] > trees["turns_fresh"] == told["turns_judged"] + sum(told["not_judged"].values())
    assert asked[1] == told["turns_judged"]


def test_a_kind_seen_only_in_groups_with_a_single_reward_weighs_as_all_kinds_together() -> None:
    """A single reward says nothing about what hangs on the kind, and its turns are judged all the same."""

    def group(*rewards: float) -> Any:
        scored = dict(enumerate(rewards))
        return SimpleNamespace(
            rewards=SimpleNamespace(scored=lambda: scored, of=scored.get), tree=SimpleNamespace(ends=lambda: [*scored])
        )

    def turn(kind: str, sample: int, reward: float) -> Any:
        return SimpleNamespace(kind=kind, turn=SimpleNamespace(sample=sample), reward=reward)

    judge = TurnVerdicts(CONFIG, *(SimpleNamespace(),) * 3)  # pyright: ignore[reportArgumentType]
    judge._learn(group(1.0, 0.0), turn("known", 0, 1.0))
    judge._learn(group(1.0, 0.0), turn("known", 1, 0.0))
    judge._learn(group(1.0), turn("new", 0, 1.0))
    judge._learn(group(1.0), turn("new", 0, 0.0))
    assert judge.acceptance.slopes(["known", "new"]) == pytest.approx({"known": 1.0, "new": 1.0})
