"""The environment door: a function or a source of tasks, checked before anything is played."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from turntree.core.config import Part
from turntree.core.errors import InputError
from turntree.core.foreign import EnvironmentFault
from turntree.core.messages import Message
from turntree.env.tasks import identity, open_tasks

MODULE = '''
import contextlib
from dataclasses import dataclass, field
from turntree.core.messages import Message
from turntree.core.protocols import Observation
from turntree.env.tasks import TaskSet

class Echo:
    """No fork of its own."""
    tools = ()
    def __init__(self, task_id):
        self.task_id, self.said = task_id, []
    def reset(self):
        self.said = []
        return (Message("user", self.task_id),)
    def step(self, action):
        self.said.append(action.content)
        return Observation((Message("user", " ".join(self.said)),), done=False)

def tasks(split, count, *, seed, size: int = 1):
    return [Echo(f"{split}-{seed}-{size}-{n}") for n in range(count)]

def leaking(split, count, *, seed):
    return [Echo(f"{n}") for n in range(count)]

def twins(split, count, *, seed):
    return [Echo("same") for n in range(count)]

def nothing(split, count, *, seed):
    return []

class Bare(Echo):
    def reset(self):
        return Message("user", "without the comma")

def bare(split, count, *, seed):
    return [Bare("a")]

def wrong(split, count, *, seed):
    return [1]

def odd(split, count, *, seed, **said):
    made = Echo(f"{split}-0")
    for name, value in said.items():
        setattr(made, name, value)
    return [made]

def numbered(split, count, *, seed):
    return odd(split, count, seed=seed, task_id=1)

def toolless(split, count, *, seed):
    return odd(split, count, seed=seed, tools=None)

def flat(split, count, *, seed):
    return odd(split, count, seed=seed, tools=[{"type": "function", "name": "look"}])

def unworthy(split, count, *, seed):
    return odd(split, count, seed=seed, failure_reward=float("nan"))

OPENED = []

@dataclass(frozen=True)
class Source:
    size: int = 1
    @contextlib.contextmanager
    def open(self, splits, *, seed):
        OPENED.append("open")
        made = {split: tasks(split, count, seed=seed, size=self.size) for split, count in splits.items()}
        yield TaskSet(tasks=made, figures=lambda: {"a": 1})
        OPENED.append("closed")

class Doubled:
    @contextlib.contextmanager
    def open(self, splits, *, seed):
        yield TaskSet(tasks={split: [Echo("same")] * count for split, count in splits.items()})
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_game.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("my_game", None)


def test_a_function_gives_the_tasks_of_every_split() -> None:
    with open_tasks(Part("my_game:tasks", {"size": 2}), {"train": 3, "dev": 1}, seed=5) as opened:
        assert [task.task_id for task in opened.of("train")] == ["train-5-2-0", "train-5-2-1", "train-5-2-2"]
        assert [task.task_id for task in opened.of("dev")] == ["dev-5-2-0"]
        assert opened.pool is None


def test_a_source_is_closed_again() -> None:
    with open_tasks(Part("my_game:Source", {"size": 3}), {"test": 1}) as opened:
        assert opened.of("test")[0].task_id == "test-0-3-0"
        assert opened.figures() == {"a": 1}
        assert sys.modules["my_game"].OPENED == ["open"]
    assert sys.modules["my_game"].OPENED == ["open", "closed"]


def test_an_environment_without_a_fork_is_forked_by_replay() -> None:
    with open_tasks(Part("my_game:tasks"), {"train": 1}) as opened:
        (task,) = opened.of("train")
    first = task.fork()
    first.reset()
    first.step(Message("assistant", "a"))
    twin = first.fork()
    assert twin.step(Message("assistant", "b")).messages[0].content == "a b"
    assert first.step(Message("assistant", "c")).messages[0].content == "a c"


def test_a_reset_that_forgets_the_comma_of_its_tuple_is_told_so() -> None:
    with open_tasks(Part("my_game:bare"), {"train": 1}) as opened:
        (task,) = opened.of("train")
    with pytest.raises(EnvironmentFault, match=r"`reset` returned Message instead of a tuple of messages: .*the comma"):
        task.reset()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my_game:leaking", "gave task '0' to two splits, 'train' and 'dev'"),
        ("my_game:twins", "gave two tasks of split 'train' the id 'same'"),
        ("my_game:Doubled", "gave two tasks of split 'train' the id 'same'"),
        ("my_game:nothing", "gave no task for split 'train'"),
        ("my_game:wrong", "gave int, which has no task_id, reset, step"),
        ("my_game:numbered", "gave a task with the id 1; an id is a text"),
        ("my_game:toolless", r"gave task 'train-0' tools that are none \(None\)"),
        ("my_game:flat", "gave task 'train-0' tools that are none .*'look'"),
        ("my_game:unworthy", "gave task 'train-0' a failure_reward that is nan"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_before_anything_is_played(name: str, said: str) -> None:
    with pytest.raises(InputError, match=said), open_tasks(Part(name), {"train": 2, "dev": 2}):
        pass


def test_the_identity_changes_with_the_tasks_and_with_the_code() -> None:
    def told(part: Part, count: int = 2) -> dict[str, object]:
        with open_tasks(part, {"train": count}) as opened:
            return identity(part, opened)

    first = told(Part("my_game:tasks"))
    assert told(Part("my_game:tasks")) == first
    assert told(Part("my_game:tasks", {"size": 2})) != first
    assert told(Part("my_game:tasks"), 3) != first
