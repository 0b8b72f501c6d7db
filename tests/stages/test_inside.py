"""Local rollouts in the trees of an iteration: which states, which draws, what they cost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_train_online import CONFIG, WHOLE

from turntree.core.cost import NO_COST
from turntree.rollouts import local
from turntree.stages import inside
from turntree.stages.inside import InsideTurns
from turntree.stages.train_online import TrainOnlineConfig, run_train_online
from turntree.training.config import LocalConfig
from turntree_worlds.household.environment import HouseholdEnvironment


def one_task(**settings: Any) -> TrainOnlineConfig:
    """Every group of an iteration plays the same task."""
    train = replace(CONFIG.train, iterations=1, groups=3, check_every=0, rollouts=WHOLE, **settings)
    return replace(CONFIG, count=1, brancher=None, gate=None, train=train)


def test_every_local_rollout_has_draws_of_its_own_also_where_a_task_is_played_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two groups of one task the first state is the same: equal draws would give the same samples twice."""
    asked: list[Any] = []

    def request(*args: Any, **options: Any) -> Any:
        asked.append(made(*args, **options))
        return asked[-1]

    made = local.local_request
    monkeypatch.setattr(local, "local_request", request)
    run_train_online(one_task(local=LocalConfig(states=27, samples=3, choose="uniform")), tmp_path / "run")
    first = min((one.prompt_ids for one in asked), key=len)
    assert sum(one.prompt_ids == first for one in asked) == 9
    assert len({one.seed for one in asked}) == len(asked)


def test_what_labels_cost_is_on_the_bill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment is played again up to the labelled states."""
    steps = 0
    step = HouseholdEnvironment.step

    def counted(self: HouseholdEnvironment, action: Any) -> Any:
        nonlocal steps
        steps += 1
        return step(self, action)

    monkeypatch.setattr(HouseholdEnvironment, "step", counted)
    config = one_task(local=LocalConfig(states=4, samples=3))
    run_train_online(replace(config, held_out_count=1), tmp_path / "run")
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

    labelled = inside.labelled
    monkeypatch.setattr(inside, "labelled", silent)
    run_train_online(one_task(local=LocalConfig(verdicts=1.0)), tmp_path / "run")
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

    judged = inside.judge_turns
    monkeypatch.setattr(inside, "judge_turns", counted)
    train = replace(CONFIG.train, iterations=1, check_every=0, local=LocalConfig(verdicts=1.0))
    run_train_online(replace(CONFIG, gate=None, train=train), tmp_path / "run")
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    told, trees = row["local"], row["trees"]
    assert trees["turns_chain"] > trees["turns_fresh"] == told["turns_judged"] + sum(told["not_judged"].values())
    assert asked[1] == told["turns_judged"]


def test_states_are_chosen_by_their_weights_relative_to_each_other() -> None:
    """However little hangs on all of them: with keys u^(1/w) small weights would all tie, and the first would win."""
    found: list[Any] = [SimpleNamespace(kind=number) for number in range(20)]
    chosen = []
    for scale in (1.0, 1e-6):
        weights = [scale * (1 + number % 3) for number in range(20)]
        seen: Any = SimpleNamespace(weights=lambda kinds, by_gain, weights=weights: weights)
        config = replace(CONFIG, train=replace(CONFIG.train, local=LocalConfig(states=5)))
        turns = InsideTurns(config, *(SimpleNamespace(),) * 3, seen=seen)  # pyright: ignore[reportArgumentType]
        chosen.append([[one.kind for one in turns._choose(found, seed)] for seed in range(20)])
    assert chosen[0] == chosen[1]
    assert len({kind for one in chosen[1] for kind in one}) > 15


def test_a_kind_seen_only_in_groups_with_a_single_reward_weighs_as_all_kinds_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A single reward says nothing about what hangs on the kind, and its turns are judged all the same."""

    def group(*rewards: float) -> Any:
        scored = dict(enumerate(rewards))
        return SimpleNamespace(
            rewards=SimpleNamespace(scored=lambda: scored, of=scored.get), tree=SimpleNamespace(ends=lambda: [*scored])
        )

    def turn(kind: str, number: int, sample: int, node: int, taken: float) -> Any:
        place = SimpleNamespace(group=number, sample=sample, nodes=[SimpleNamespace(id=node)])
        return SimpleNamespace(kind=kind, place=place, taken=taken)

    found = [turn("known", 0, 0, 1, 1.0), turn("known", 0, 1, 2, 0.0), turn("new", 1, 0, 3, 1.0)]
    found.append(turn("new", 1, 0, 4, 0.0))
    config = replace(CONFIG, train=replace(CONFIG.train, local=LocalConfig(verdicts=1.0)))
    turns = InsideTurns(config, *(SimpleNamespace(),) * 3)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(turns, "labelled", lambda groups, iteration: (found, 4, {}, NO_COST))
    grown = turns.grow([group(1.0, 0.0), group(1.0)], 1)
    assert grown.figures["importance"] == pytest.approx({"known": 1.0, "new": 1.0})
    assert [dict(one) for one in grown.taken] == [{1: 0.5, 2: -0.5}, {3: 0.5, 4: -0.5}]
