"""`turntree traces gold`: the experts that tasks hold, of any environment."""

from __future__ import annotations

import functools
import sys
from types import ModuleType

import pytest

from turntree.core.config import Part
from turntree.core.errors import InputError
from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import Observation, Task
from turntree.env.tool_environment import ToolEnvironment
from turntree.rollout.executed import Executed
from turntree.stages.gold import Gold
from turntree.traces.candidates import candidates
from turntree.traces.schema import read_traces, write_traces


class Counter:
    def reset(self, goal: int) -> str:
        self.count, self.goal, self.reward, self.done = 0, goal, 0.0, False
        return f"Count to {goal}."

    def add(self, number: int) -> str:
        """Add to the counter.

        Args:
            number: What to add.
        """
        self.count += number
        self.reward = float(self.count == self.goal)
        self.done = self.count >= self.goal
        return str(self.count)


def adds(*numbers):
    calls = [ToolCall("add", {"number": number}, f"c{place}") for place, number in enumerate(numbers)]
    return [Message("assistant", "", (call,)) for call in calls]


GOLD = [adds(1, 2), adds(3), adds(1, 1), [], [Message("assistant", "three")]]


@pytest.fixture
def counters(monkeypatch):
    """Tasks to count to three: two with an expert, one whose expert gets to two, one without, one that talks."""

    def tasks(split: str, count: int, *, seed: int):
        rows = enumerate(GOLD[:count])
        return [ToolEnvironment(Counter, task_id=f"t{n}", arguments={"goal": 3}, gold=gold) for n, gold in rows]

    module = ModuleType("counters_of_ones_own")
    module.tasks, module.__file__ = tasks, __file__
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return Part(f"{module.__name__}:tasks")


def test_an_expert_that_succeeds_is_a_trace_and_any_other_is_a_reason(counters):
    first, second, *others = Gold(environment=counters, count=9)
    assert others == ["not solved by its gold", "no gold", "not solved by its gold"]
    assert [message.content for message in first.messages if message.role == "tool"] == ["1", "3"]
    assert (first.success, second.success) == (True, True)
    assert (first.id, len(first.turn_positions), len(second.turn_positions)) == ("t0", 2, 1)


class Silent(Task):
    """Says what it is worth, and not whether it succeeded."""

    gold, tools = (Message("assistant", "done"),), ()

    def __init__(self, task_id):
        self.task_id = task_id

    def reset(self):
        return (Message("user", "Do it."),)

    def step(self, action):
        return Observation((), done=True, reward=1.0)

    def fork(self):
        return self


def test_an_environment_that_says_nothing_of_success_is_not_called_unsolved(monkeypatch):
    module = ModuleType("silent_tasks")
    module.tasks, module.__file__ = lambda split, count, *, seed: [Silent(f"{n}") for n in range(count)], __file__
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert list(Gold(environment=Part(f"{module.__name__}:tasks"), count=2)) == ["no word on its success"] * 2


def test_half_a_character_in_an_answer_is_written_as_the_policy_is_shown_it(counters, monkeypatch, tmp_path):
    add = functools.wraps(Counter.add)(lambda self, number, real=Counter.add: f"caf\udce9 {real(self, number)}")
    monkeypatch.setattr(Counter, "add", add)
    write_traces(tmp_path / "t.jsonl", [next(iter(Gold(environment=counters, count=1)))])
    (trace,) = read_traces(tmp_path / "t.jsonl")
    assert trace.messages[2].content == "caf\ufffd 1"


def test_traces_of_held_out_tasks_stay_in_their_split(counters):
    first, second, *_ = Gold(environment=counters, split="test", count=2)
    assert (first.split, second.split) == ("test", "test")
    drawn = {trace.split for trace in Gold(environment=counters, count=2, dev=0.99)}
    assert drawn == {"dev"}  # of tasks to train on, a share is for development


def test_an_environment_whose_tasks_hold_no_expert_is_refused(counters, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "GOLD", [[]])
    with pytest.raises(InputError, match="hold no expert"):
        list(Gold(environment=counters, count=1))


def test_its_traces_can_be_judged_by_execution(counters):
    """They say how their task is rebuilt, as recorded ones do."""
    first, *_ = Gold(environment=counters, count=2)
    verifier = Executed(counters)
    states = candidates(first)
    try:
        (same,) = adds(1)
        other = Message("assistant", "", (ToolCall("add", {"number": 2}, "x"),))
        assert verifier.judge(states[0], same).reward == 1.0
        assert verifier.judge(states[0], other).reward == 0.0
        assert verifier.judge(states[1], other).reward == 1.0
    finally:
        verifier.close()
