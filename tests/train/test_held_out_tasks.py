"""What `train pivot` is checked on is not what it is trained on, and is of the environment that it trains in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from turntree.core.completion import Sampling
from turntree.core.config import Part
from turntree.core.cost import NO_COST
from turntree.core.errors import ConfigError, InputError
from turntree.core.messages import Message
from turntree.core.protocols import Observation
from turntree.env.tasks import TaskSet, environment_record
from turntree.rollout.live import EpisodeConfig
from turntree.run.folder import RunDirectory
from turntree.stages import held_out
from turntree.stages.config import CheckConfig, OwnPathConfig, TrainPivotConfig
from turntree.stages.demonstrate import demonstrate
from turntree.stages.evaluate import Evaluation
from turntree.stages.held_out import HeldOutTasks, _Seen, open_held_out
from turntree.stages.policy import Device, Policy, load_policy
from turntree.stages.train_pivot import trained_on
from turntree.traces.schema import Trace, read_traces, write_traces
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
    with open_held_out(config.check, trained_on(config, str(traces)), policy) as found:
        assert found is not None
        return [task.task_id for task in found.opened.of("dev")]


def test_turns_of_the_check_are_as_long_as_training_lets_them_be(policy: Policy) -> None:
    """A policy that learns to say more than 24 tokens would be cut, and fail."""
    for tokens in (48, 256):
        config = TrainPivotConfig(
            pivots="pivots.jsonl",
            environment=HERE,
            check=CheckConfig(tasks=1, max_turns=9),
            train=PivotConfig(sampling=Sampling(max_tokens=tokens)),
        )
        with open_held_out(config.check, trained_on(config, ""), policy) as found:
            assert found is not None
            assert (found.episodes.max_turns, found.episodes.sampling.max_tokens) == (9, tokens)


def recorded(path: Path, ids: list[int], count: int) -> Path:
    said = (Message("user", "?"), Message("assistant", "!"))
    traces = [
        Trace(id=f"{n}/0", messages=said, environment=environment_record(HERE, "train", count, 0, str(n))) for n in ids
    ]
    write_traces(path, traces)
    return path


def test_the_tasks_of_own_states_are_not_those_of_the_checks(policy: Policy) -> None:
    own = TrainPivotConfig(
        states="own", environment=HERE, verifier=Part("strict"), own=OwnPathConfig(count=4), check=CheckConfig(tasks=3)
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
    told = ({"count": "many"}, {"count": None}, {"count": 10**9}, {"name": ["household"]}, {"name": "household"})
    traces = [Trace(id=str(n), messages=said, environment=record) for n, record in enumerate(told)]
    write_traces(tmp_path / "own.jsonl", traces)
    seen = _Seen(trained_on(TrainPivotConfig(pivots="p"), str(tmp_path / "own.jsonl")))
    assert seen.ids_in("household") == set("01234") and seen.count_in("household") == 5
    assert seen.environment(None) is None and seen.environment(HERE) == HERE


@pytest.mark.parametrize(
    "record",
    [
        {**environment_record(Part("household"), "train", 4, 0, "x"), "games": "/nowhere/games.jsonl"},
        {**environment_record(Part("household"), "train", 4, 0, "x"), "difficulty": "none"},
        {**environment_record(Part("gymnasium"), "train", 4, 0, "x")},
    ],
    ids=["a file of another machine", "an option of another version", "a package that is not here"],
)
def test_tasks_that_cannot_be_opened_end_no_training_that_did_not_ask_for_them(
    record: Any, policy: Policy, tmp_path: Path, capsys: Any
) -> None:
    said = (Message("user", "?"), Message("assistant", "!"))
    write_traces(tmp_path / "t.jsonl", [Trace(id="x", messages=said, environment=record)])
    trained = trained_on(TrainPivotConfig(pivots="pivots.jsonl"), str(tmp_path / "t.jsonl"))
    with open_held_out(CheckConfig(), trained, policy) as found:
        assert found is None
    assert "success is not looked at" in capsys.readouterr().err
    with pytest.raises(InputError), open_held_out(CheckConfig(tasks=1), trained, policy):
        raise AssertionError


def test_several_traces_of_a_task_are_one_task_and_other_splits_are_not_trained_on(tmp_path: Path) -> None:
    said = (Message("user", "?"), Message("assistant", "!"))
    record = {task: environment_record(HERE, "train", 2, 0, task) for task in ("0", "1", "7")}
    traces = [Trace(id=f"{n}", messages=said, environment=record[str(n % 2)], split="train") for n in range(16)]
    held = Trace(id="dev", messages=said, environment=record["7"], split="dev")
    write_traces(tmp_path / "t.jsonl", [*traces, held])
    seen = _Seen(trained_on(TrainPivotConfig(pivots="p"), str(tmp_path / "t.jsonl"), "train"))
    assert seen.count_in(HERE.name) == 2 and seen.ids_in(HERE.name) == {"0", "1"}


def test_the_environment_that_all_traces_name_is_played_with_its_options(policy: Policy, tmp_path: Path) -> None:
    demonstrate(Part("household", {"count": 3, "environment": {"difficulty": "hard"}}), tmp_path / "hard.jsonl")
    config = TrainPivotConfig(pivots="pivots.jsonl", check=CheckConfig(tasks=2))
    found = checked(config, policy, tmp_path / "hard.jsonl")
    assert len(found) == 2 and all(task.startswith("hard/") for task in found)
    assert not set(found) & {trace.id for trace in read_traces(tmp_path / "hard.jsonl")}
    named = replace(config, environment=Part("household"))
    assert checked(named, policy, tmp_path / "hard.jsonl") == found, "what the user names keeps the traces' options"


def test_traces_run_no_code_and_without_an_environment_there_is_no_check(policy: Policy, tmp_path: Path) -> None:
    """Traces that name a module, or two environments, or none."""
    traces = recorded(tmp_path / "some.jsonl", [0], count=1)
    config = TrainPivotConfig(pivots="pivots.jsonl")
    with open_held_out(config.check, trained_on(config, str(traces)), policy) as found:
        assert found is None
    with pytest.raises(ConfigError) as error, open_held_out(CheckConfig(tasks=1), trained_on(config, ""), policy):
        raise AssertionError
    assert error.value.field == "check.tasks"
    assert checked(replace(config, check=CheckConfig(tasks=1, environment=HERE)), policy, traces) == ["1"]


class Saved:
    """A policy that is a file."""

    def save(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "weights").write_text("new")


def test_weights_that_a_kill_left_half_saved_are_no_best(monkeypatch: Any, tmp_path: Path) -> None:
    """And an arm of an experiment keeps none."""
    wins = {"outcomes": [{"task": "a", "rewards": [1.0]}], "success": 1.0, "censored": 0, "unknown": 0}
    played = Evaluation(wins, NO_COST, [])
    monkeypatch.setattr(held_out, "Evaluator", lambda *_: SimpleNamespace(play=lambda *_, **__: played, tasks=[None]))
    opened = TaskSet(tasks={"dev": []})
    for stops in (True, False):
        run = RunDirectory(tmp_path / str(stops))
        (run.path / "best").mkdir(parents=True)
        (run.path / "best" / "half").touch()
        tasks: Any = HeldOutTasks(HERE, opened, EpisodeConfig(), stops)
        algorithm: Any = SimpleNamespace(check_every=1, steps=2)
        policy: Any = Saved()
        held_out.SuccessCheck(run, policy, tasks, algorithm)(1, {"reward_mean": 1.0})
        files = sorted(path.name for path in run.path.glob("best/*"))
        assert files == (["step.json", "weights"] if stops else [])


@pytest.mark.parametrize(("unknown", "censored", "looks"), [(3, 0, 1), (2, 1, 1), (0, 3, 2), (1, 0, 2)])
def test_where_an_environment_says_nothing_of_success_it_is_looked_for_once(
    unknown: int, censored: int, looks: int, monkeypatch: Any, tmp_path: Path, capsys: Any
) -> None:
    """In a run that a process went on with, too. And where all episodes failed, or some say it, it is looked for
    again."""
    said = [[]] * (unknown + censored) + [[1.0]] * (3 - unknown - censored)
    outcomes = [{"task": f"{n}", "rewards": rewards} for n, rewards in enumerate(said)]
    summary = {"outcomes": outcomes, "success": None, "censored": censored, "unknown": unknown}
    plays: list[int] = []

    def play(*_: Any, **__: Any) -> Evaluation:
        plays.append(1)
        return Evaluation(summary, NO_COST, [])

    monkeypatch.setattr(held_out, "Evaluator", lambda *_: SimpleNamespace(play=play, tasks=[None] * 3))
    opened = TaskSet(tasks={"dev": []})
    tasks: Any = HeldOutTasks(HERE, opened, EpisodeConfig(), True)
    algorithm: Any = SimpleNamespace(check_every=1, steps=2)
    policy: Any = Saved()
    run = RunDirectory(tmp_path)
    for step in (0, 1):
        check = held_out.SuccessCheck(run, policy, tasks, algorithm)  # as after a kill
        checked = check(step, {"reward_mean": 1.0})
        assert not checked.stop
        run.log({"step": step, **checked.figures})
    assert len(plays) == looks
    assert ("check.tasks=0" in capsys.readouterr().err) == (looks == 1)
