"""The class of TRL's `environment_factory`, unchanged, with its rows in a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from turntree.core.errors import InputError
from turntree.core.messages import Message, ToolCall
from turntree.env.check import check_environment
from turntree_interop import trl

CLASS = '''
class Counting:
    def reset(self, goal: int, **kwargs) -> str:
        self.count, self.goal, self.reward = 0, goal, 0.0
        return f"Count to {goal}."

    def add(self, number: int) -> str:
        """
        Add to the counter.

        Args:
            number: What to add.
        """
        if number < 0:
            raise ValueError("not below 0")
        self.count += number
        self.reward = float(self.count == self.goal)
        return str(self.count)


def half(environments, **kwargs):
    return [environment.reward / 2 for environment in environments]


async def later(environments, **kwargs):
    return half(environments)


class Reading(Counting):
    def reset(self, prompt: list, goal: int) -> None:
        super().reset(goal)
        self.heard = prompt[0]["content"]
'''


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "trl_counting.py").write_text(CLASS)
    rows = [{"prompt": [{"role": "user", "content": "Play. "}], "goal": goal} for goal in range(1, 41)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "trl_counting", raising=False)
    return "trl_counting:Counting"


def add(number: int) -> Message:
    return Message("assistant", "", (ToolCall("add", {"number": number}, "1"),))


def test_the_class_plays_its_rows(files: str) -> None:
    made = trl.tasks("train", 5, seed=0, argument=files, tasks="rows.jsonl")
    opening = made[0].reset()
    goal = int(opening[0].content.removeprefix("Play. Count to ").removesuffix("."))
    assert made[0].step(add(-1)).messages[0].content == "error: not below 0"
    told = made[0].step(add(goal))
    assert (told.messages[0].content, told.reward) == (str(goal), 1.0)
    assert made[0].step(Message("assistant", "done")).success is True
    assert [finding for finding in check_environment(made[1]) if finding.grave] == []


def test_a_reward_function_of_trl_takes_the_place_of_the_attribute(files: str) -> None:
    task = trl.tasks("train", 1, seed=0, argument=files, tasks="rows.jsonl", reward="trl_counting:half")[0]
    goal = int(task.reset()[0].content.removeprefix("Play. Count to ").removesuffix("."))
    task.fork().step(add(1000))
    assert task.step(add(goal)).reward == 0.5
    over = task.step(Message("assistant", "done"))
    assert (over.reward, over.success) == (0.5, False)


def test_a_reward_function_may_be_asynchronous_and_leaves_the_state_to_be_compared(files: str) -> None:
    """Without `state` the verifier `executed` would pay an action that is answered alike but does something else."""
    task = trl.tasks("train", 1, seed=0, argument=files, tasks="rows.jsonl", reward="trl_counting:later")[0]
    task.reset()
    other = task.fork()
    assert task.step(add(1)).reward is not None
    assert other.state() != task.state()
    assert check_environment(task) == []


def test_reset_gets_the_prompt_where_it_takes_one(files: str) -> None:
    task = trl.tasks("train", 1, seed=0, argument="trl_counting:Reading", tasks="rows.jsonl")[0]
    assert task.reset() == (Message("user", "Play. "),)
    assert task.object.heard == "Play. "


def test_splits_of_one_file_never_meet(files: str) -> None:
    made = {s: trl.tasks(s, 40, seed=0, argument=files, tasks="rows.jsonl") for s in ("train", "dev", "test")}
    ids = [task.task_id for some in made.values() for task in some]
    assert len(ids) == len(set(ids)) == 40


def test_what_is_not_a_class_is_refused(files: str) -> None:
    with pytest.raises(InputError, match="not a class"):
        trl.tasks("train", 1, seed=0, argument="trl_counting:half", tasks="rows.jsonl")
    with pytest.raises(InputError, match="write trl:module:Class"):
        trl.tasks("train", 1, seed=0, argument=None, tasks="rows.jsonl")
