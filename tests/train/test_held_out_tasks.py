"""What `train pivot` is checked on is not what it is trained on, and is of the environment that it trains in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from turntree.core.config import Part
from turntree.core.cost import NO_COST
from turntree.core.errors import InputError
from turntree.core.messages import Message
from turntree.core.protocols import Observation
from turntree.env.tasks import TaskSet, environment_record
from turntree.stages import train_pivot
from turntree.stages.config import CheckConfig, OwnPathConfig, TrainPivotConfig
from turntree.stages.evaluate import Evaluation, Evaluator
from turntree.stages.policy import Device, Policy, load_policy
from turntree.stages.train_pivot import _development_tasks, _seen
from turntree.traces.schema import Trace, write_traces
from turntree.train.config import PivotConfig

HERE = Part("tests.train.test_held_out_tasks:Numbers")


@dataclass(frozen=True)
class Number:
    task_id: str
    tools: tuple[()] = ()

    def reset(self) -> tuple[Message, ...]:
        return (Message("user", self.task_id),)

    def step(self, action: Message) -> Observation:
        return Observation((), done=True, success=False)

    def fork(self) -> Number:
        return self


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Tasks of one list, as of a file: the first are trained on, the next ones checked on."""

    size: int = 10

    @contextlib.contextmanager
    def open(self, splits: Mapping[str, int], *, seed: int) -> Iterator[TaskSet]:
        found = [Number(str(number)) for number in range(self.size)]
        tasks, start = {}, 0
        for split in sorted(splits, key=lambda name: name != "train"):
            tasks[split] = found[start : start + splits[split]]
            start += splits[split]
        yield TaskSet(tasks=tasks)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy("default", Device())


def checked(config: TrainPivotConfig, policy: Policy, traces: Path | str = "") -> list[str]:
    with _development_tasks(config, policy, str(traces)) as opened:
        assert opened is not None
        return [task.task_id for task in opened.of("dev")]


def test_turns_of_the_check_are_as_long_as_training_lets_them_be(policy: Policy, monkeypatch: Any) -> None:
    """A policy that learns to say more than 24 tokens would be cut, and fail."""
    limits = []

    def played(self: Evaluator, *how: Any, **named: Any) -> Evaluation:
        limits.append(self.config.max_tokens)
        return Evaluation({"success": 0.0, "outcomes": []}, NO_COST, [])

    monkeypatch.setattr(Evaluator, "play", played)
    run: Any = SimpleNamespace(append=lambda name, rows: None)
    for own in (None, 48):
        config = TrainPivotConfig(pivots="pivots.jsonl", check=CheckConfig(tasks=1, max_tokens=own))
        check = train_pivot._check_tasks(config, policy, TaskSet(tasks={"dev": [Number("0")]}), run)
        assert check is not None and check(0).figures == {"held_out_success": 0.0}
        assert config.checked.max_tokens == limits[-1]
    assert limits == [PivotConfig().sampling.max_tokens, 48]


def recorded(path: Path, ids: list[int], count: int) -> Path:
    said = (Message("user", "?"), Message("assistant", "!"))
    traces = [
        Trace(id=f"{n}/0", messages=said, environment=environment_record(HERE, "train", count, 0, str(n))) for n in ids
    ]
    write_traces(path, traces)
    return path


def test_the_tasks_of_own_states_are_not_those_of_the_checks(policy: Policy) -> None:
    own = TrainPivotConfig(
        states="own", environment=HERE, verifier=Part("outcome"), own=OwnPathConfig(count=4), check=CheckConfig(tasks=3)
    )
    assert checked(own, policy) == ["4", "5", "6"]


def test_the_tasks_that_traces_were_drawn_from_are_not_those_of_the_checks(policy: Policy, tmp_path: Path) -> None:
    config = TrainPivotConfig(pivots="pivots.jsonl", environment=HERE, check=CheckConfig(tasks=3))
    assert checked(config, policy, recorded(tmp_path / "some.jsonl", [1, 3], count=5)) == ["5", "6", "7"]


def test_a_held_out_task_that_a_trace_has_seen_is_left_out(policy: Policy, tmp_path: Path) -> None:
    """Traces of another division of the file."""
    config = TrainPivotConfig(pivots="pivots.jsonl", environment=HERE, check=CheckConfig(tasks=3))
    traces = recorded(tmp_path / "other.jsonl", [3, 1], count=2)
    assert checked(config, policy, traces) == ["2", "4"]
    with pytest.raises(InputError, match="1 of 1 held-out tasks are among those of the traces"):
        checked(replace(config, check=CheckConfig(tasks=1)), policy, recorded(tmp_path / "all.jsonl", [2], count=2))


def test_environments_that_traces_of_ones_own_describe_in_another_way_are_no_error(tmp_path: Path) -> None:
    said = (Message("user", "?"), Message("assistant", "!"))
    traces = [Trace(id=str(told), messages=said, environment={"count": told}) for told in ("many", None, 4)]
    write_traces(tmp_path / "own.jsonl", traces)
    assert _seen(str(tmp_path / "own.jsonl"), "household") == ({"many", "None", "4"}, 4)


def test_the_embedded_games_are_played_where_no_environment_is_named(policy: Policy, tmp_path: Path) -> None:
    traces = recorded(tmp_path / "some.jsonl", [0], count=1)
    config = TrainPivotConfig(pivots="pivots.jsonl", check=CheckConfig(tasks=1))
    assert checked(config, policy, traces)[0].startswith("easy/")
    assert checked(replace(config, check=CheckConfig(tasks=1, environment=HERE)), policy, traces) == ["1"]
