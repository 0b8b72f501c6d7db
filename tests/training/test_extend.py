"""A run of N steps that is extended to M is, bit for bit, the run of M steps, or it is refused in one line."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from killed_runs import artifacts

from turntree.core.completion import Sampling
from turntree.core.config import Part
from turntree.core.errors import InputError
from turntree.filters.dapo import DapoFilter
from turntree.filters.greso import GresoConfig
from turntree.profiling.profile import ProfileConfig
from turntree.profiling.select import SelectConfig
from turntree.rollouts.live import EpisodeConfig
from turntree.rollouts.rewards import Episode
from turntree.rollouts.scheduler import SchedulerConfig
from turntree.stages.config import (
    CheckConfig,
    ProfileStageConfig,
    SFTStageConfig,
    TrainOnlineConfig,
    TrainPivotConfig,
)
from turntree.stages.demonstrate import demonstrate
from turntree.stages.profile import run_profile
from turntree.stages.select import run_select
from turntree.stages.sft import run_sft
from turntree.stages.train_online import run_train_online
from turntree.stages.train_pivot import run_train_pivot
from turntree.training.checkpoints import Checkpoints, extent
from turntree.training.config import (
    CheckpointConfig,
    CurriculumConfig,
    DriftConfig,
    OnlineConfig,
    OptimizerConfig,
    PivotConfig,
    SFTConfig,
)


def wordy(episode: Episode) -> float:
    """Differs between rollouts of a policy that never wins, so that there is something to learn."""
    return len(repr(episode.messages)) % 7 / 7


COMMAND = Sampling(max_tokens=12)
WARM = OptimizerConfig(learning_rate=1e-3, warmup_steps=3)
SHORT, LONG = 2, 3
Run = Callable[..., None]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Every trainer as `run(out, total, **changes)`, with everything on that has a memory or an end."""
    folder = tmp_path_factory.mktemp("data")
    traces, pivots = str(folder / "traces.jsonl"), folder / "pivots.jsonl"
    demonstrate(Part("household", {"games": {"count": 4}}), folder / "traces.jsonl")
    profiling = ProfileConfig(rollouts=4, sampling=COMMAND)
    run_profile(ProfileStageConfig(traces=traces, limit=12, profile=profiling), folder / "profile.jsonl")
    run_select(folder / "profile.jsonl", SelectConfig(threshold=1.0), pivots)

    def pivot(out: Path, total: int, optimizer: OptimizerConfig = WARM, **changes: Any) -> None:
        train = PivotConfig(
            steps=total,
            states=3,
            group_size=4,
            sampling=COMMAND,
            optimizer=optimizer,
            curriculum=CurriculumConfig(retire_after=1, revisit_after=1, replacement_rounds=1),
            drift=DriftConfig(window=8),
        )
        check = CheckConfig(states=2, samples=2, tasks=1, max_turns=2, max_tokens=12)
        run_train_pivot(TrainPivotConfig(pivots=str(pivots), train=train, check=check, **changes), out)

    def online(out: Path, total: int, optimizer: OptimizerConfig = WARM, **changes: Any) -> None:
        episodes = EpisodeConfig(max_turns=2, sampling=COMMAND)
        train = OnlineConfig(
            iterations=total,
            groups=2,
            check_every=0,
            rollouts=SchedulerConfig(episodes=episodes, group_size=3, initial_rollouts=2),
            dapo=DapoFilter(refill_cap=1.0),
            greso=GresoConfig(),
            optimizer=optimizer,
        )
        parts: dict[str, Any] = {"brancher": Part("entropy", {"probe_tokens": 2}), "gate": Part("random", {"turn": 1})}
        rewards = (Part("test_extend:wordy"),)
        run_train_online(
            TrainOnlineConfig(count=3, held_out_count=1, train=train, rewards=rewards, **parts, **changes), out
        )

    def sft(out: Path, total: int, optimizer: OptimizerConfig = WARM, **changes: Any) -> None:
        settings = SFTConfig(epochs=total, batch=2, optimizer=optimizer)
        run_sft(SFTStageConfig(traces=traces, sft=settings, **changes), out)

    return {"pivot": pivot, "online": online, "sft": sft}


@pytest.fixture(scope="module")
def finished(runs: dict[str, Run], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Path]:
    folder = tmp_path_factory.mktemp("finished")
    for name, run in runs.items():
        for total in (SHORT, LONG):
            run(folder / f"{name}-{total}", total)
    return {(name, total): folder / f"{name}-{total}" for name in runs for total in (SHORT, LONG)}


def made(out: Path) -> dict[str, Any]:
    """All that a run left: policy, logs, bill, and the checkpoint it can be extended from (its state tells seconds)."""
    found = artifacts(out)
    found["config.json"].pop("history", None)
    return {name: value for name, value in found.items() if not name.endswith("state.json")}


@pytest.mark.parametrize("name", ["pivot", "online", "sft"])
def test_a_run_that_is_extended_is_the_run_of_the_larger_total_bit_for_bit(
    runs: dict[str, Run], finished: dict[tuple[str, int], Path], tmp_path: Path, name: str
) -> None:
    out = shutil.copytree(finished[name, SHORT], tmp_path / "run")
    runs[name](out, LONG)
    found, expected = made(out), made(finished[name, LONG])
    assert set(found) == set(expected)
    assert [each for each in expected if found[each] != expected[each]] == []
    assert all(row["grad_norm"] > 0 for row in found["metrics.jsonl"] if row["step"]), "there was something to learn"


@pytest.mark.parametrize("name", ["pivot", "online", "sft"])
def test_the_configuration_tells_what_the_run_was_before(
    runs: dict[str, Run], finished: dict[tuple[str, int], Path], tmp_path: Path, name: str
) -> None:
    out = shutil.copytree(finished[name, SHORT], tmp_path / "run")
    ended = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    runs[name](out, LONG)
    config = json.loads((out / "config.json").read_text())
    key = {"pivot": "train.steps", "online": "train.iterations", "sft": "sft.epochs"}[name]
    (before,) = config["history"]
    assert before == {key: SHORT, "done": ended["step"], "finished": True, "last": ended}
    section, _, last = key.partition(".")
    assert config["config"][section][last] == LONG
    with pytest.raises(InputError, match=rf"holds this run, finished; .* ask for more {key} to extend it"):
        runs[name](out, LONG)
    assert json.loads((out / "config.json").read_text()) == config


@pytest.mark.parametrize("name", ["pivot", "online", "sft"])
def test_fewer_steps_than_were_done_are_refused_and_nothing_changes(
    runs: dict[str, Run], finished: dict[tuple[str, int], Path], name: str
) -> None:
    out = finished[name, LONG]
    before = artifacts(out)
    with pytest.raises(InputError, match=r"holds a run that has done \d+ steps, more than the .*; ask for more than"):
        runs[name](out, SHORT)
    assert artifacts(out) == before


FALLING = replace(WARM, schedule="cosine", warmup_steps=1)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"optimizer": FALLING}, r"its learning rate was lowered over all of it \(schedule 'cosine'\)"),
        ({"keep_trees": 1}, r"the 1 steps whose trees are kept were spread over all of it"),
    ],
)
def test_what_depends_on_the_total_is_refused_in_one_line_that_says_why(
    runs: dict[str, Run], tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    runs["pivot"](tmp_path, SHORT, **changes)
    assert not (tmp_path / "checkpoints").exists(), "it could not be extended from it"
    before = artifacts(tmp_path)
    with pytest.raises(InputError, match=f"{why}.*; start a new run from its policy: --model {tmp_path}/model") as told:
        runs["pivot"](tmp_path, LONG, **changes)
    assert "\n" not in str(told.value)
    assert artifacts(tmp_path) == before


def test_another_setting_is_refused_also_where_the_total_grows(
    runs: dict[str, Run], finished: dict[tuple[str, int], Path]
) -> None:
    with pytest.raises(InputError, match=re.escape("differs in train.optimizer.learning_rate (0.001, not 0.5)")):
        runs["pivot"](finished["pivot", SHORT], LONG, optimizer=replace(WARM, learning_rate=0.5))


def test_a_finished_run_that_kept_no_checkpoint_says_so(runs: dict[str, Run], tmp_path: Path) -> None:
    runs["sft"](tmp_path, 1, checkpoints=CheckpointConfig(extendable=False))
    assert not (tmp_path / "checkpoints").exists()
    with pytest.raises(InputError, match=r"kept no checkpoint to be extended from .*; start a new run from its policy"):
        runs["sft"](tmp_path, 2)
    assert (tmp_path / "cost.json").exists()


@given(st.integers(0, 5), st.integers(0, 20), st.integers(1, 30), st.integers(1, 30), st.sampled_from([None, 0, 3]))
def test_a_schedule_that_can_be_extended_does_not_look_at_the_total(
    warmup: int, step: int, total: int, other: int, keep: int | None
) -> None:
    for optimizer in (OptimizerConfig(warmup_steps=warmup, schedule=s) for s in ("constant", "cosine")):
        if extent("train.steps", total, optimizer, keep_trees=keep).fixed is None:
            assert optimizer.factor(step, total) == optimizer.factor(step, other)


@pytest.mark.parametrize("name", ["pivot", "online"])
def test_a_killed_run_cannot_be_ended_at_a_step_whose_closing_check_it_never_made(
    runs: dict[str, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    save = Checkpoints.save

    def killed(self: Checkpoints, step: int, *rest: Any) -> None:
        save(self, step, *rest)
        if step == SHORT:
            raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoints, "save", killed)
    often = {"checkpoints": CheckpointConfig(every=1)}
    with pytest.raises(KeyboardInterrupt):
        runs[name](tmp_path, LONG, **often)
    before = artifacts(tmp_path)
    refused = rf"unfinished run of .* {LONG} that cannot end with step {SHORT}.*; ask for more than {SHORT}, or"
    with pytest.raises(InputError, match=refused):
        runs[name](tmp_path, SHORT, **often)
    assert artifacts(tmp_path) == before
