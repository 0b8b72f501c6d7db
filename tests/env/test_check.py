"""`check environment` finds the law that an environment breaks, and finds nothing in one that keeps them all."""

from __future__ import annotations

import random
import sys
import threading
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from turntree.core.messages import Message
from turntree.core.protocols import Observation
from turntree.env.check import check_environment
from turntree.env.tasks import Replayed
from turntree_worlds.household.environment import HouseholdEnvironment, generated


class Good:
    """Says back what it was told, three times."""

    tools = ()

    def __init__(self, task_id: str = "one") -> None:
        self.task_id, self.said = task_id, []

    def reset(self) -> tuple[Message, ...]:
        self.said = []
        return (Message("user", "say something"),)

    def step(self, action: Message) -> Observation:
        self.said.append(action.content)
        done = len(self.said) == 3
        return Observation((Message("user", " ".join(self.said)),), done=done, success=done or None)


class Draws(Good):
    def step(self, action: Message) -> Observation:
        return Observation((Message("user", str(random.random())),), done=False)


class Retells(Good):
    def reset(self) -> tuple[Message, ...]:
        return (Message("user", str(random.random())),)


class Raises(Good):
    def step(self, action: Message) -> Observation:
        raise KeyError(action.content)


class Exits(Good):
    def step(self, action: Message) -> Observation:
        sys.exit(2)


class Shared(Good):
    """All copies write to one list."""

    log: ClassVar[list[str]] = []

    def step(self, action: Message) -> Observation:
        self.log.append(action.content)
        return Observation((Message("user", str(len(self.log))),), done=False)


class Early(Good):
    """A reward at every step, which ends the rollout unless it is said to be the sum so far."""

    def step(self, action: Message) -> Observation:
        return replace(super().step(action), reward=float(len(self.said)))


class Untold(Good):
    def step(self, action: Message) -> Observation:
        return Observation((Message("user", "over"),), done=True)


class Surrogate(Good):
    def reset(self) -> tuple[Message, ...]:
        return (Message("user", "\ud800"),)


class Beyond(Good):
    def step(self, action: Message) -> Observation:
        return replace(super().step(action), progress=len(self.said))


class Locked(Good):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def __deepcopy__(self, memo: object) -> Locked:
        return Locked()


class BadTools(Good):
    tools = ({"type": "function", "function": {"name": "a", "parameters": {"type": "nonsense"}}},)


def grave(environment: object) -> set[str]:
    return {finding.law for finding in check_environment(Replayed(environment)) if finding.grave}


def test_an_environment_that_keeps_the_laws_is_found_without_fault() -> None:
    assert check_environment(Replayed(Good())) == []
    game = generated(1_000_000, "easy")
    assert check_environment(HouseholdEnvironment(game)) == []


@pytest.mark.parametrize(
    ("environment", "law"),
    [
        (Retells(), "a task is the same every time"),
        (Raises(), "an action that a policy may sample is answered"),
        (Exits(), "an action that a policy may sample is answered"),
        (Shared(), "a fork answers as the original"),
        (Surrogate(), "JSON carries every message"),
        (Early(), "a reward is 0 until the end, or the sum so far (total_reward)"),
        (BadTools(), "parameters are a JSON schema"),
        (Beyond(), "progress is from 0 to 1"),
    ],
)
def test_the_law_that_is_broken_is_named(environment: Good, law: str) -> None:
    assert law in grave(environment)


@pytest.mark.parametrize(
    ("tool", "law"),
    [
        ("f", "every tool has a name of its own"),
        ({"name": "f"}, "every tool has a name of its own"),
        (
            {"type": "function", "function": {"name": "f", "parameters": {"properties": []}}},
            "parameters are a JSON schema",
        ),
        ({"type": "function", "function": {"name": "f", "parameters": None}}, None),
        (
            {
                "type": "function",
                "function": {"name": "f", "parameters": {"properties": {"x": True, "y": {"enum": []}}}},
            },
            None,
        ),
    ],
)
def test_tools_of_any_form_are_checked_without_an_error(tool: Any, law: str | None) -> None:
    environment = Good()
    environment.tools = (tool,)
    assert grave(environment) == ({law} if law else set())


def test_what_only_costs_something_is_a_note() -> None:
    laws = {finding.law: finding for finding in check_environment(Replayed(Draws()))}
    assert not laws["a fork stands where the original stood"].grave
    assert "without branching" in str(laws["a fork stands where the original stood"])
    assert not check_environment(Replayed(Untold()))[0].grave
    assert [finding.law for finding in check_environment(Replayed(Locked()))] == [
        "a task can be sent to a worker process"
    ]


def test_a_reward_at_every_step_is_lawful_where_it_is_the_sum_so_far() -> None:
    task = Early()
    task.total_reward = True
    assert check_environment(Replayed(task)) == []


def test_gold_that_does_not_solve_its_task_is_a_note() -> None:
    task = Good()
    task.gold = [Message("assistant", word) for word in "abc"]
    assert check_environment(Replayed(task)) == []
    task.gold = [Message("assistant", "a")]
    (note,) = check_environment(Replayed(task))
    assert note.law == "the task's own gold solves it" and not note.grave
