"""What the adapters share: forks stand where they were taken, draws are an episode's own, splits never meet."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.core.errors import InputError
from turntree.core.foreign import EnvironmentFault
from turntree.core.messages import Message
from turntree.core.protocols import Environment, Observation
from turntree.env.adapted import AdaptedEnvironment, Scored, held_apart, key_of, of_split, rows_of
from turntree.env.check import check_environment
from turntree.env.local import LocalPool
from turntree.env.tasks import Replayed
from turntree.env.tools.runtime import ToolRuntime
from turntree_interop.mcp import McpGame


class Draws:
    """Tells a number of either global generator at every turn."""

    def begin(self) -> tuple[Message, ...]:
        return (Message("user", str(random.random())),)

    def act(self, action: Message) -> Observation:
        return Observation((Message("user", f"{random.random()} {np.random.random()}"),), done=False)


class Locked(Draws):
    def __init__(self) -> None:
        self.lock = threading.Lock()


class Remembers(Locked):
    """A server that all episodes share."""

    heard: ClassVar[list[str]] = []

    def act(self, action: Message) -> Observation:
        self.heard.append(action.content)
        return Observation((Message("user", str(len(self.heard))),), done=False)


class Opened:
    """A game, and an environment of a user, that holds something open."""

    task_id, open = "a", 0

    def begin(self) -> tuple[Message, ...]:
        Opened.open += 1
        return (Message("user", "go"),)

    def act(self, action: Message) -> Observation:
        if action.content == "fall":
            raise EnvironmentFault("it fell")
        return Observation((Message("user", "on"),), done=False)

    def __deepcopy__(self, memo: object) -> Opened:
        raise TypeError("a connection")

    def close(self) -> None:
        Opened.open -= 1

    reset, step = begin, act


class Fresh(Opened):
    def __deepcopy__(self, memo: object) -> Opened:
        return Opened()


@pytest.mark.parametrize("task", [AdaptedEnvironment(Opened, task_id="a"), Replayed(Fresh())], ids=["game", "user's"])
def test_what_an_episode_holds_is_closed_when_it_is_over_fails_or_is_dropped(task: Environment) -> None:
    pool = LocalPool()
    first = pool.open(task)
    pool.reset(first), pool.poll()
    twin = pool.fork(first)
    pool.step(twin, Message("assistant", "on")), pool.poll()
    assert Opened.open == 2, "a fork holds its own"
    pool.step(first, Message("assistant", "fall"))
    assert pool.poll()[first].fault == "it fell" and Opened.open == 1
    pool.close(twin)
    assert Opened.open == 0


def said(environment: AdaptedEnvironment, times: int = 1) -> list[str]:
    return [environment.step(Message("assistant", "x")).messages[0].content for _ in range(times)]


@pytest.mark.parametrize("game", [Draws, Locked])
def test_a_fork_stands_where_it_was_taken_by_copy_or_by_replay(game: type[Draws]) -> None:
    environment = AdaptedEnvironment(game, task_id="a", seed=3)
    environment.reset()
    said(environment, 2)
    twin = environment.fork()
    assert said(twin, 3) == said(environment, 3)
    assert [f for f in check_environment(AdaptedEnvironment(game, task_id="a")) if f.grave] == []


def test_a_game_that_answers_by_what_others_did_cannot_be_forked_and_says_so() -> None:
    environment = AdaptedEnvironment(Remembers, task_id="a")
    environment.reset()
    said(environment)
    with pytest.raises(EnvironmentFault, match="answered differently"):
        environment.fork()


def test_the_draws_of_an_episode_are_its_own_and_change_no_other() -> None:
    one, other = (AdaptedEnvironment(Draws, task_id="a", seed=7) for _ in range(2))
    random.seed(1), np.random.seed(1)
    expected = random.random(), np.random.random()
    random.seed(1), np.random.seed(1)
    one.reset(), other.reset()
    assert said(one, 2) == [*said(other), *said(other)]
    assert (random.random(), np.random.random()) == expected


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=60, max_size=120))
def test_a_row_is_in_one_split_whatever_other_rows_there_are(numbers: list[int]) -> None:
    def ids(rows: list[int], split: str) -> set[str]:
        try:
            return {key for key, _ in of_split(rows, split, 1000, seed=0, where="x")}
        except InputError:
            return set()

    found = {split: ids(numbers, split) for split in ("train", "dev", "test")}
    assert sum(len(some) for some in found.values()) == len(set(numbers))
    assert set().union(*found.values()) == {key_of(number) for number in numbers}
    for split in found:
        assert ids(numbers[:30], split) <= found[split]


@settings(max_examples=50, deadline=None)
@given(st.sets(st.integers(0, 10_000), min_size=3, max_size=12))
def test_no_split_of_a_closed_set_is_empty_and_only_the_empty_ones_change(numbers: set[int]) -> None:
    rows = sorted(numbers)
    splits = {
        split: [row for _, row in of_split(rows, split, 99, seed=0, where="x", closed=True)]
        for split in ("train", "dev", "test")
    }
    assert sorted(row for some in splits.values() for row in some) == rows
    for split in splits:
        with contextlib.suppress(InputError):
            alone = {row for _, row in of_split(rows, split, 99, seed=0, where="x")}
            assert set(splits[split]) <= alone, "one that had rows takes none"
    first = of_split(rows, "dev", 1, seed=0, where="x", closed=True)
    assert [row for _, row in first] == splits["dev"][:1]


def test_some_rows_of_a_sorted_file_are_a_random_choice_of_them() -> None:
    rows = list(range(400))
    drawn = [[row for _, row in of_split(rows, "train", 40, seed=seed, where="x")] for seed in range(10)]
    assert len(set(map(tuple, drawn))) == 10
    assert 150 < sum(map(sum, drawn)) / 400 < 250, "the first 40 would have a mean of 20"
    assert [row for _, row in of_split(rows[::-1], "train", 40, seed=3, where="x")] == drawn[3]


def test_what_is_held_out_is_never_trained_on() -> None:
    rows, kept = list(range(50)), list(range(40, 70))
    given_rows = partial(held_apart, rows, kept, count=100, seed=0, where="a", where_held="b")
    splits = {split: {row for _, row in given_rows(split)} for split in ("train", "dev", "test")}
    assert splits["train"] == set(range(40))
    assert splits["dev"] | splits["test"] == set(kept) and not splits["dev"] & splits["test"]


def test_a_split_without_rows_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"goal": 1}) + "\n")
    splits = []
    for split in ("train", "dev", "test"):
        try:
            splits += rows_of(str(path), None, split, 5, 0)
        except InputError as error:
            assert "held_out" in str(error)
    assert len(splits) == 1


def test_a_reward_function_is_asked_at_every_turn_and_its_failure_censors() -> None:
    def turns(completions: list, environments: list, goal: list[int], **_: object) -> list[float]:
        assert isinstance(environments[0], AdaptedEnvironment)
        return [float(sum(message["role"] == "assistant" for message in completions[0]) >= goal[0])]

    environment = Scored(AdaptedEnvironment(Draws, task_id="a"), turns, {"goal": 2, "prompt": "not given"})
    environment.reset()
    twin = environment.fork()
    assert [environment.step(Message("assistant", "x")).reward for _ in range(3)] == [0.0, 1.0, 1.0]
    assert twin.step(Message("assistant", "x")).reward == 0.0
    fails = Scored(AdaptedEnvironment(Draws, task_id="a"), lambda **_: [None], {})
    fails.reset()
    with pytest.raises(EnvironmentFault, match="NoneType, not a number"):
        fails.step(Message("assistant", "x"))


def test_a_reward_function_replaces_the_reward_and_keeps_what_else_the_environment_tells() -> None:
    class Counts:
        task_id, tools = "a", ()

        def reset(self) -> tuple[Message, ...]:
            return (Message("user", "Begin."),)

        def step(self, action: Message) -> Observation:
            return Observation((), False, progress=0.5, reward=0.25, metrics={"impossible": 1.0})

    environment = Scored(Counts(), lambda **_: [2.0], {})
    environment.reset()
    assert environment.step(Message("assistant", "x")) == Observation(
        (), False, progress=0.5, reward=2.0, metrics={"impossible": 1.0}
    )


@pytest.mark.parametrize(("text", "right"), [(" 42 ", True), ("<think>41?</think>\n\n42", True), ("<think>42", False)])
def test_an_answer_is_what_stands_behind_the_thought(text: str, right: bool) -> None:
    """A template that has no place for thoughts leaves them in the content."""
    game = McpGame(ToolRuntime([]), weakref.WeakSet(), [], (), "42")
    assert game.act(Message("assistant", text)).success is right
