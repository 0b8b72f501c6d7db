"""A policy that does one thing only is paid less than the embedded policy, at the states that are trained on.

At hard games two thirds of the mixed turns of an expert are searches. A policy of one kind of action wins no game, so
whatever pays it more than the policy that it began as destroys that policy (docs/results/hard.md).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from turntree.core.completion import Sampling
from turntree.core.config import Part
from turntree.core.messages import Message, answer_text
from turntree.core.protocols import TurnState
from turntree.pivots.profile import ProfileConfig
from turntree.pivots.select import SelectConfig, select
from turntree.run.artifacts import PROFILE
from turntree.stages.candidates import stream_candidates
from turntree.stages.demonstrate import demonstrate
from turntree.stages.profile import ProfileStageConfig, run_profile
from turntree.verify.strict import StrictMatch
from turntree_worlds.household.environment import generated, state_at
from turntree_worlds.household.verifier import HouseholdVerifier
from turntree_worlds.household.world import State

Habit = Callable[[State, Sequence[Message], random.Random], str]


def wander(state: State, history: Sequence[Message], rng: random.Random) -> str:
    """To a place that was not searched, where there is one: a search at its best."""
    places = [name for name in state.game.receptacles if name not in state.searched] or list(state.game.receptacles)
    return f"go to {rng.choice(places)}"


def walk(state: State, history: Sequence[Message], rng: random.Random) -> str:
    return f"go to {rng.choice(list(state.game.receptacles))}"


def repeat(state: State, history: Sequence[Message], rng: random.Random) -> str:
    said = [answer_text(message) for message in history if message.role == "assistant"]
    return said[-1] if said else "look"


def of_kind(kind: str) -> Habit:
    def habit(state: State, history: Sequence[Message], rng: random.Random) -> str:
        possible = [command for command in state.admissible() if command.startswith(kind)]
        return rng.choice(possible) if possible else kind

    return habit


HABITS: dict[str, Habit] = {
    "wander": wander, "walk": walk, "repeat": repeat, "open": of_kind("open"), "take": of_kind("take"),
    "look": of_kind("look"),
}  # fmt: skip


@dataclass(frozen=True)
class Profiled:
    """Turns of an expert at hard games, by their place, and their rows of a profile of the embedded policy."""

    states: dict[tuple[str, int], TurnState]
    rows: list[dict]


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    folder: Path = tmp_path_factory.mktemp("hard")
    hard = Part("household", {"count": 30, "environment": {"difficulty": "hard"}, "dev": 0.0})
    demonstrate(hard, folder / "traces.jsonl")
    profile = ProfileConfig(rollouts=8, sampling=Sampling(max_tokens=24))
    config = ProfileStageConfig(traces=str(folder / "traces.jsonl"), split="", limit=240, profile=profile)
    run_profile(config, folder / "profile.jsonl")
    states = {(state.trace_id, state.turn): state for state in stream_candidates(config.traces, "")}
    return Profiled(states, list(PROFILE.read(folder / "profile.jsonl")[1]))


def paid(profiled: Profiled, rows: Sequence[dict], habit: Habit, judge: Callable) -> float:
    """The mean reward of a habit over the draws of these rows."""
    rng, total, weights = random.Random(0), 0.0, 0.0
    for row in rows:
        turn = profiled.states[row["trace_id"], row["turn"]]
        action = Message("assistant", habit(state_at(turn), turn.history, rng))
        reward = judge(turn, action).reward
        weight = row["weight"]
        total, weights = total + weight * reward, weights + weight
    return total / weights


@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize("verifier", [HouseholdVerifier(), StrictMatch()], ids=lambda one: one.name)
def test_a_habit_is_paid_less_than_the_policy_at_the_turns_that_are_selected(profiled, habit, verifier) -> None:
    selected = select(profiled.rows, SelectConfig(threshold=1.0)).rows
    by_place = {(row["trace_id"], row["turn"]): row for row in profiled.rows}

    def start(row: dict) -> float:
        """What the embedded policy was paid in the profile."""
        told = by_place[row["trace_id"], row["turn"]]
        if verifier.name == StrictMatch.name:
            samples = sum(action["count"] for action in told["actions"])
            return sum(action["count"] * action["strict"] for action in told["actions"]) / samples
        return told["reward_mean"]

    weights = [row["weight"] for row in selected]
    policy = sum(w * start(row) for w, row in zip(weights, selected, strict=True)) / sum(weights)
    assert paid(profiled, selected, HABITS[habit], verifier.judge) < policy


def test_the_papers_mix_pays_a_policy_that_only_searches_more_than_the_one_that_it_began_as(profiled) -> None:
    """Why the mix is bounded."""
    mixed = select(profiled.rows, SelectConfig(threshold=1.0, max_per_kind=1.0, anchor_share=0.0)).rows
    policy = sum(row["reward_mean"] for row in mixed) / len(mixed)
    assert paid(profiled, mixed, wander, HouseholdVerifier().judge) > policy


@pytest.mark.parametrize("habit", HABITS)
def test_a_habit_wins_no_hard_game(habit) -> None:
    rng = random.Random(1)
    for number in range(12):
        state = generated(3_000_000 + number, "hard").reset()
        history: list[Message] = []
        for _ in range(40):
            history.append(Message("assistant", HABITS[habit](state, history, rng)))
            state.step(answer_text(history[-1]))
        assert not state.won
