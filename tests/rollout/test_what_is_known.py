"""What an evaluation says of tasks that do not fit and of environments that give a reward and no word on success."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from turntree.core.completion import Sampling
from turntree.core.config import Part
from turntree.core.errors import InputError
from turntree.core.messages import Message
from turntree.core.protocols import Observation
from turntree.rollout.live import EpisodeConfig
from turntree.rollout.players import Setting
from turntree.stages.config import Device
from turntree.stages.evaluate import EvaluateConfig, Evaluator, evaluate
from turntree.stages.policy import Policy, load_policy


@dataclass
class Graded:
    """Two turns (`length`); a reward at the end."""

    task_id: str
    words: int = 1
    success: bool | None = None
    reward: float | None = 0.9
    turns: int = 0
    length: int = 2
    tools: tuple[()] = ()

    def reset(self) -> tuple[Message, ...]:
        self.turns = 0
        return (Message("user", "look " * self.words),)

    def step(self, action: Message) -> Observation:
        self.turns += 1
        if self.turns < self.length:
            return Observation((Message("user", "on"),), done=False)
        return Observation((Message("user", "over"),), done=True, success=self.success, reward=self.reward)

    def fork(self) -> Graded:
        return replace(self)


def tasks(*, split: str, count: int, **_: Any) -> list[Graded]:
    """For the command line: all of them are too long."""
    return [Graded(f"{split}/{number}", words=500) for number in range(count)]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy("default", Device())


def evaluated(
    policy: Policy, environments: Sequence[Graded], samples: int = 3, places: int = 256, **limits: Any
) -> dict[str, Any]:
    episodes = EpisodeConfig(sampling=Sampling(max_tokens=4), cut_turns="judge", **limits)
    return Evaluator(policy, environments, Setting(places=places)).play(episodes, samples, quiet=True).summary


def test_success_that_nobody_told_is_unknown_and_not_failure(policy: Policy) -> None:
    told = evaluated(policy, [Graded("a"), Graded("b")])
    assert (told["success"], told["episodes"], told["unknown"], told["censored"]) == (None, 0, 6, 0)
    assert told["reward_mean"] == pytest.approx(0.9)
    mixed = evaluated(policy, [Graded("a"), Graded("b", success=True), Graded("c", success=False)])
    assert (mixed["success"], mixed["episodes"], mixed["unknown"]) == (0.5, 6, 3)


def test_a_limit_is_no_failure_where_the_environment_calls_nothing_a_success(policy: Policy) -> None:
    """It would be the only thing that counts: ten episodes with the full reward, and a success of 0%."""
    told = evaluated(policy, [Graded("a", reward=1.0), Graded("b", length=9)], max_turns=3)
    assert (told["success"], told["episodes"], told["unknown"], told["censored"]) == (None, 0, 6, 0)
    assert told["reward_mean"] == 0.5
    heard = evaluated(policy, [Graded("a", success=True), Graded("b", length=9)], max_turns=3)
    assert (heard["success"], heard["unknown"]) == (0.5, 0)


def test_an_end_without_a_word_and_without_a_reward_is_censored_and_one_that_a_limit_makes_has_failed(policy) -> None:
    told = evaluated(policy, [Graded("a", reward=None)])
    assert (told["success"], told["episodes"], told["censored"], told["reward_mean"]) == (None, 0, 3, None)
    (reason,) = told["censored_reasons"]
    assert "neither reward nor success" in reason
    cut = evaluated(policy, [Graded("a")], max_turns=1)
    assert (cut["success"], cut["episodes"], cut["unknown"]) == (0.0, 3, 0)


def test_tasks_that_do_not_fit_are_counted_as_the_rollouts_that_they_were_to_have(policy: Policy) -> None:
    told = evaluated(policy, [Graded("a", success=True), Graded("b", words=500)], max_context=100)
    assert (told["success"], told["episodes"], told["censored"]) == (1.0, 3, 3)
    assert told["censored_reasons"] == {"the task alone leaves no room in 100 tokens of context": 3}


def test_an_evaluation_of_tasks_that_do_not_fit_ends_with_the_reason() -> None:
    config = EvaluateConfig(environment=Part(f"{__name__}:tasks"), count=2, samples=2, max_context=100, max_tokens=4)
    with pytest.raises(InputError, match="4 x the task alone leaves no room in 100 tokens"):
        evaluate(config)


def test_no_more_episodes_are_open_than_asked_for(policy: Policy) -> None:
    """A copy of an environment may be a server, or a process of its own."""
    playing: set[str] = set()
    most = 0

    class Counted(Graded):
        def reset(self) -> tuple[Message, ...]:
            nonlocal most
            playing.add(self.task_id)
            most = max(most, len(playing))
            return super().reset()

        def step(self, action: Message) -> Observation:
            told = super().step(action)
            playing.difference_update({self.task_id} if told.done else ())
            return told

    tasks = [Counted(str(number)) for number in range(12)]
    few = evaluated(policy, tasks, samples=1, places=3)
    assert most == 3
    assert few == evaluated(policy, tasks, samples=1), "what is played does not depend on it"
