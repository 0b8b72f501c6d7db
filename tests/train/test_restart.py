"""kill -9 at any point of sft and train, several times in one run: nothing in the artifacts tells."""

import functools
import random
from dataclasses import replace

import pytest
from killed_runs import artifacts, finished, killed_after, killed_at

from turntree.core.completion import Sampling
from turntree.core.config import Part
from turntree.pivots.profile import ProfileConfig
from turntree.pivots.select import SelectConfig
from turntree.stages.config import CheckConfig, SFTCheckConfig, TrainPivotConfig
from turntree.stages.demonstrate import demonstrate
from turntree.stages.policy import Device
from turntree.stages.profile import ProfileStageConfig, run_profile
from turntree.stages.select import run_select
from turntree.stages.sft import SFTStageConfig, run_sft
from turntree.stages.train_pivot import run_train_pivot
from turntree.train.checkpoints import CheckpointConfig
from turntree.train.lora import LoRAConfig
from turntree.train.optimizer import OptimizerConfig
from turntree.train.pivot import PivotConfig
from turntree.train.sft import SFTConfig

COMMAND = Sampling(max_tokens=24)
OFTEN = CheckpointConfig(every=1, keep=1)
CHECK = SFTCheckConfig(tasks=1, max_turns=3, max_tokens=24)


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """Both training stages with everything on that has a memory: schedules, draws, checks."""
    folder = tmp_path_factory.mktemp("restart")
    traces = str(folder / "traces.jsonl")
    demonstrate(Part("household", {"count": 10}), folder / "traces.jsonl")
    profiling = ProfileConfig(rollouts=4, sampling=COMMAND)
    run_profile(ProfileStageConfig(traces=traces, limit=24, profile=profiling), folder / "profile.jsonl")
    run_select(folder / "profile.jsonl", SelectConfig(threshold=1.0, anchor_share=0.2), folder / "pivots.jsonl")
    optimizer = OptimizerConfig(learning_rate=1e-3, warmup_steps=2, schedule="cosine")
    pivot = TrainPivotConfig(
        pivots=str(folder / "pivots.jsonl"),
        train=PivotConfig(
            steps=5,
            groups=4,
            group_size=4,
            check_every=3,
            sampling=COMMAND,
            optimizer=optimizer,
        ),
        check=CheckConfig(states=4, samples=2, tasks=1, max_turns=3),
        checkpoints=OFTEN,
    )
    sft = SFTStageConfig(
        traces=traces, sft=SFTConfig(epochs=2, batch=2, optimizer=optimizer), checkpoints=OFTEN, check=CHECK
    )
    adapter = replace(sft, device=Device(lora=LoRAConfig(rank=2), dtype="bfloat16"))
    return {
        "pivot": functools.partial(run_train_pivot, pivot),
        "sft": functools.partial(run_sft, sft),
        "sft of an adapter in bfloat16": functools.partial(run_sft, adapter),
    }


@pytest.fixture(scope="module")
def uninterrupted(stages, tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    for name, stage in stages.items():
        assert finished(stage, folder / name)
    return {name: artifacts(folder / name) for name in stages}


@pytest.mark.parametrize("name", ["pivot", "sft", "sft of an adapter in bfloat16"])
def test_kills_before_file_operations_leave_no_trace(stages, uninterrupted, tmp_path, name) -> None:
    """Between any two files of a checkpoint, of the model, of the bill: wherever the draws fall."""
    draw = random.Random(name)
    kills = 0
    while killed_at(draw.randint(15, 80), stages[name], tmp_path / "run"):
        kills += 1
    assert kills >= 2
    assert artifacts(tmp_path / "run") == uninterrupted[name]


def test_kills_at_random_times_leave_no_trace(stages, uninterrupted, tmp_path) -> None:
    """Also in the middle of a file."""
    name = "pivot"  # what is drawn and logged by a loop that the stages share
    draw = random.Random(name)
    kills, patience = 0, 0.3  # shorter than the fastest run, then longer until one comes to its end
    while killed_after(draw.uniform(0.05, patience), stages[name], tmp_path / "run"):
        kills += 1
        patience *= 1.5
    assert kills >= 1
    assert artifacts(tmp_path / "run") == uninterrupted[name]


def test_the_drill_saves_an_adapter(uninterrupted) -> None:
    assert "model/adapter_model.safetensors" in uninterrupted["sft of an adapter in bfloat16"]


def test_the_drill_checks_on_the_way_and_keeps_the_trees_of_every_step(uninterrupted) -> None:
    rows = uninterrupted["pivot"]["metrics.jsonl"]
    assert all("held_out_success" in row for row in rows if row["step"] in (0, 3, 5))
    kept = uninterrupted["pivot"]["trees.jsonl"]
    assert {tree["iteration"] for tree in kept} == {1, 2, 3, 4, 5}
    assert not any(name.startswith("checkpoints") for name in uninterrupted["pivot"])
