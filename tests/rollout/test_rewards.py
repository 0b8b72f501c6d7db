"""Rewards of an episode: the weighted sum of functions, each value apart; a function that fails censors."""

from __future__ import annotations

import json
import math
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fault_drill import Corridor, FaultPlan, Faulty
from scripted_engine import ScriptedEngine
from tiny_models import tiny_tokenizer
from turntree.core.completion import Sampling
from turntree.core.config import Part
from turntree.core.errors import ConfigError, InputError
from turntree.core.labels import Rewards
from turntree.core.messages import Message
from turntree.core.protocols import Gate, GateDecision, GroupProgress, Observation
from turntree.core.scalars import MOST_WEIGHT
from turntree.core.tree import RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.logs.trees import KeptTree
from turntree.render.template import ChatRenderer
from turntree.rollout.groups import GrownGroup
from turntree.rollout.live import EpisodeConfig
from turntree.rollout.rewards import (
    Episode,
    RewardFunction,
    RewardSum,
    WeightedReward,
    build_rewards,
    figures,
    parse_reward,
)
from turntree.rollout.scheduler import Scheduler, SchedulerConfig

TOKENIZER = tiny_tokenizer()
RENDERER = ChatRenderer(TOKENIZER)
WORDS = [RENDERER.completion(Message("assistant", word)) for word in ("left", "right")]
FINISHED = Episode(
    task_id="t",
    task_type=None,
    messages=(),
    tools=(),
    observations=(Observation((), done=True),),
    stop=StopReason.COMPLETED,
    reward=0.5,
    success=True,
)

values = st.one_of(st.none(), st.booleans(), st.floats(-1e6, 1e6), st.just(float("nan")), st.just("text"))


def summed(**functions: tuple[float, RewardFunction]) -> RewardSum:
    return RewardSum([WeightedReward(name, weight, function) for name, (weight, function) in functions.items()])


def gives(value: Any) -> RewardFunction:
    return lambda episode: value


def raises(episode: Episode) -> float:
    raise KeyError("nothing here")


def played(rewards: RewardSum | None, *tasks: Any, gate: Gate | None = None, **settings: Any) -> list[GrownGroup]:
    episodes = EpisodeConfig(max_turns=3, sampling=Sampling(max_tokens=16))
    config = SchedulerConfig(**{"episodes": episodes, "group_size": 6, "max_retries": 0, **settings})
    words = ScriptedEngine(lambda prompt, seed: WORDS[seed % 2], RENDERER.stop_ids, vocab_size=len(TOKENIZER))
    return list(Scheduler(words, RENDERER, config, gate=gate, rewards=rewards).run(tasks, seed=0))


@given(st.lists(st.tuples(st.floats(-10, 10), values), min_size=1, max_size=5))
def test_the_reward_is_the_weighted_sum_unless_one_function_failed(given_values: list[tuple[float, Any]]) -> None:
    functions = {f"f{number}": (weight, gives(value)) for number, (weight, value) in enumerate(given_values)}
    (verdict,) = summed(**functions).judge_all([FINISHED], [Verdict(1.0, "the episode is over", success=True)])
    bad = {
        name
        for name, (_, value) in zip(functions, given_values, strict=True)
        if not isinstance(value, (bool, float)) or value != value
    }
    assert list(verdict.parts) == list(functions) and verdict.success is True
    assert {name for name, value in verdict.parts.items() if value is None} == bad
    if bad:
        assert verdict.reward is None and all(f"reward '{name}' " in verdict.reason for name in bad)
    else:
        assert verdict.reward == pytest.approx(sum(weight * value for weight, value in given_values))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (raises, "reward 'mine' raised KeyError: 'nothing here'"),
        (gives(None), "reward 'mine' gave None"),
        (gives("high"), "reward 'mine' gave str, not a number"),
        (gives(float("inf")), "reward 'mine' gave inf"),
        (gives(1e200), "reward 'mine' gave 1e+200, which float32 does not hold"),
    ],
)
def test_a_function_that_fails_censors_the_leaf_and_is_named(function: RewardFunction, reason: str) -> None:
    rewards = summed(mine=(1.0, function), other=(1.0, gives(2)))
    for group in played(rewards, Corridor("a", 2)):
        for verdict in group.rewards.verdicts.values():
            assert (verdict.reward, verdict.reason, verdict.parts) == (None, reason, {"mine": None, "other": 2.0})


def test_an_episode_shows_what_was_said_and_what_the_environment_thinks_of_it() -> None:
    seen: list[Episode] = []
    look: Callable[[Episode], float] = lambda episode: float(bool(seen.append(episode)))  # noqa: E731
    (short, long) = played(summed(look=(1.0, look)), Corridor("short", 2), Corridor("long", 9))
    assert len(seen) == 12 == len(short.rewards.verdicts) + len(long.rewards.verdicts)
    for episode in seen:
        turns = [message.content for message in episode.turns]
        assert episode.messages[0].content == f"walk {'2' if episode.task_id == 'short' else '9'}"
        assert len(episode.observations) == len(turns) + 1 and episode.messages[-1].content == " ".join(turns)
        assert not episode.cut_turns and episode.progress is None
        if episode.task_id == "short":
            assert episode.stop is StopReason.COMPLETED and episode.success == (turns.count("left") % 2 == 0)
        else:
            assert episode.stop is StopReason.MAX_TURNS and len(turns) == 3 and not episode.success
        assert episode.reward == float(episode.success)


def test_the_rewards_environment_and_success_are_what_training_uses_without_any() -> None:
    tasks = [Corridor("a", 2), Corridor("b", 3), Corridor("c", 9)]
    without = [list(group.rewards.verdicts.values()) for group in played(None, *tasks)]
    rewards = build_rewards([Part("environment", {"weight": 0.5}), Part("success", {"weight": 2})])
    with_both = [list(group.rewards.verdicts.values()) for group in played(rewards, *tasks)]
    found = [[(verdict.reward, verdict.success, verdict.reason) for verdict in row] for row in with_both]
    assert found == [[(v.reward and v.reward * 2.5, v.success, v.reason) for v in row] for row in without]
    assert {verdict.reward for row in with_both for verdict in row} == {0.0, 2.5}


def test_what_did_not_come_to_an_end_is_not_judged() -> None:
    (group,) = played(summed(one=(1.0, gives(1))), Faulty(Corridor("a", 2), FaultPlan(seed=0, raising=1.0)))
    assert {verdict.reward for verdict in group.rewards.verdicts.values()} == {None}
    assert all(not verdict.parts for verdict in group.rewards.verdicts.values())


@dataclass
class Cuts:
    """A gate that cuts the groups of one task at a turn."""

    task: str
    turn: int

    def decide(self, group: GroupProgress) -> GateDecision | None:
        now = group.task_id == self.task and max(map(len, group.actions)) == self.turn
        return GateDecision(cut=True, reason="enough", numbers={}, final=True) if now else None


@dataclass
class LeftEnds:
    """An episode ends at the first "left"."""

    task_id: str
    tools: tuple[()] = ()

    def reset(self) -> tuple[Message, ...]:
        return (Message("user", "walk"),)

    def step(self, action: Message) -> Observation:
        done = action.content == "left"
        return Observation((Message("user", "left" if done else "go on"),), done=done, success=True if done else None)

    def fork(self) -> LeftEnds:
        return self


@pytest.mark.parametrize("turn", [1, 2])
@pytest.mark.parametrize("concurrency", [1, 6])
def test_no_function_sees_a_group_that_a_gate_cut_not_even_its_finished_episodes(turn: int, concurrency: int) -> None:
    """Which rollouts had finished before the cut depends on their outcome: a reward for those alone would be biased,
    and a judge on a server would be paid for nothing."""
    seen: list[str] = []

    def look(episode: Episode) -> Verdict:
        seen.append(episode.task_id)
        return Verdict(1.0, "seen", parts={"part": 1.0})

    look.concurrency = concurrency  # type: ignore[attr-defined]
    rewards = summed(look=(1.0, look), bad=(1.0, raises))
    cut, whole = played(rewards, LeftEnds("gated"), LeftEnds("whole"), gate=Cuts("gated", turn))
    assert StopReason.COMPLETED in {cut.tree.stop_reason(leaf) for leaf in cut.rewards.verdicts}, (
        "some had finished, not all"
    )
    assert cut.cut == turn and seen == ["whole"] * 6
    assert list(cut.rewards.verdicts.values()) == [Verdict(None, f"the group was cut at turn {turn}")] * 6
    assert figures(cut.rewards.verdicts.values()) == {}, "no failure of a function is counted"
    judged = {"rewards": {"look": 1.0, "look.part": 1.0, "bad": None}, "rewards_failed": {"bad": 6}}
    assert figures(whole.rewards.verdicts.values()) == judged


def test_parts_are_plain_numbers_and_unknown_where_they_are_not_finite() -> None:
    def graded(_: Episode) -> Verdict:
        return Verdict(0.5, "", parts={"style": np.float32(0.25), "odd": math.nan})

    (group,) = played(summed(graded=(1.0, graded)), Corridor("a", 9))
    for verdict in group.rewards.verdicts.values():
        assert json.loads(json.dumps(dict(verdict.parts), allow_nan=False)) == {
            "graded": 0.5, "graded.style": 0.25, "graded.odd": None,
        }  # fmt: skip


class Server:
    """A function that waits for a server: it answers when the whole group has asked."""

    concurrency = 6

    def __init__(self) -> None:
        self.asked = threading.Barrier(6, timeout=20)

    def __call__(self, episode: Episode) -> Verdict:
        self.asked.wait()
        return Verdict(len(episode.turns) / 4, "graded", parts={"turns": float(len(episode.turns))})


def test_a_judge_that_is_a_server_gets_the_episodes_of_a_group_at_the_same_time() -> None:
    (group,) = played(summed(judge=(2.0, Server())), Corridor("a", 9))
    assert [verdict.reward for verdict in group.rewards.verdicts.values()] == [1.5] * 6
    assert [verdict.parts for verdict in group.rewards.verdicts.values()] == [{"judge": 0.75, "judge.turns": 3.0}] * 6


def test_a_task_that_leaves_no_room_is_not_judged() -> None:
    tight = EpisodeConfig(max_turns=3, max_context=4, sampling=Sampling(max_tokens=2))
    (group,) = played(summed(one=(0.25, gives(1))), Corridor("a", 2), episodes=tight)
    assert [(verdict.reward, verdict.parts) for verdict in group.rewards.verdicts.values()] == [(None, {})]


def test_every_value_is_kept_with_its_leaf_on_disk() -> None:
    (group,) = played(summed(odd=(1.0, lambda e: len(e.turns) % 2), bad=(1.0, raises)), Corridor("a", 9))
    kept = KeptTree(id="1.0", iteration=1, tree=group.tree, rewards=group.rewards)
    assert KeptTree.from_json(kept.to_json()).rewards == group.rewards
    assert all(row["parts"] == {"odd": 1.0, "bad": None} for row in kept.to_json()["verdicts"].values())
    plain = KeptTree(id="1.0", iteration=1, tree=RolloutTree("t"), rewards=Rewards({0: Verdict(1.0, "why")}))
    assert plain.to_json()["verdicts"] == {"0": {"reward": 1.0, "reason": "why"}}


def test_figures_are_means_over_the_leaves_that_a_function_judged() -> None:
    verdicts = [
        Verdict(None, "", parts={"a": 1.0, "b": None, "c": None}),
        Verdict(2.0, "", parts={"a": 0.0, "b": 3.0, "c": None}),
        Verdict(None, "the group was cut at turn 2"),
    ]
    assert figures(verdicts) == {"rewards": {"a": 0.5, "b": 3.0, "c": None}, "rewards_failed": {"b": 1, "c": 2}}
    assert figures([Verdict(1.0, "")]) == {}


MODULE = '''
async def slow(episode):
    return 1.0

class Late:
    async def __call__(self, episode):
        return 1.0

class AtMost:
    """Built with its options; what it builds is the function."""
    def __init__(self, turns: int = 2):
        self.turns = turns
    def __call__(self, episode):
        return len(episode.turns) <= self.turns

def short(episode, *, most: int = 5):
    return len(episode.turns) <= most

number = 3
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "reward_module.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("reward_module", None)
    return tmp_path


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ([Part("reward_module:slow")], "'reward_module:slow' is asynchronous"),
        ([Part("reward_module:Late")], "'reward_module:Late' is asynchronous"),
        ([Part("reward_module:number")], "is int, not a function"),
        ([Part("reward_module:absent")], "has no 'absent'"),
        ([Part("reward_module:short", {"mst": 3})], "did you mean 'most'"),
        ([Part("reward_module:short", {"weight": "high"})], "rewards.0.weight"),
        ([Part("reward_module:short"), Part("reward_module:short")], "two functions have the name 'short'"),
        ([Part("sucess")], "registered: environment, rubric, success"),
    ],
)
def test_what_cannot_judge_is_refused_before_anything_is_played(folder: Path, named: list[Part], said: str) -> None:
    with pytest.raises((InputError, ConfigError)) as caught:
        build_rewards(named)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_options_and_weights_reach_the_functions(folder: Path) -> None:
    rewards = build_rewards([Part("reward_module:short", {"most": 0, "weight": 3}), Part("reward_module:AtMost")])
    assert rewards is not None
    assert [(one.name, one.weight, one.function(FINISHED)) for one in rewards.functions] == [
        ("short", 3.0, True),
        ("AtMost", 1.0, True),
    ]


def test_a_reward_of_the_command_line_is_a_name_and_a_weight() -> None:
    assert parse_reward("m:short") == Part("m:short")
    assert parse_reward("m:short=-0.5") == Part("m:short", {"weight": -0.5})
    with pytest.raises(ConfigError, match="the weight of 'm:short' is 'much', not a number"):
        parse_reward("m:short=much")


@given(st.floats() | st.sampled_from([1e300, -1e300, 1e7, 1e6, -1e6, 0.0, float("nan"), float("inf")]))
def test_a_weight_is_finite_and_small_enough_that_float32_holds_the_product(weight: float) -> None:
    """On the command line and in a file."""
    if abs(weight) <= MOST_WEIGHT:
        assert parse_reward(f"m:f={weight!r}").options == {"weight": weight}
        return
    with pytest.raises(ConfigError) as refused:
        parse_reward(f"m:f={weight!r}")
    assert refused.value.field == "--reward m:f"
    with pytest.raises(ConfigError) as refused:
        build_rewards([Part("success", {"weight": weight})])
    assert refused.value.field == "rewards.0.weight"
