"""The policy that the KL term pulls towards: what training starts from, or another one, which then teaches."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fake_tinker import FakeTinker
from scripted_tinker import installed
from tiny_models import tiny_model, tiny_tokenizer
from turntree.core.completion import GenerationRequest, Sampling
from turntree.core.config import Part
from turntree.core.errors import ConfigError, InputError
from turntree.engine.checkpoint import save_model
from turntree.env.tasks import open_tasks
from turntree.stages.config import CheckConfig, Device, EpisodesCheckConfig, OwnPathConfig, TrainPivotConfig
from turntree.stages.plan import asked, read_config
from turntree.stages.policy import Policy, load_policy, resolve
from turntree.stages.train_online import TrainOnlineConfig, run_train_online
from turntree.stages.train_pivot import run_train_pivot
from turntree.train.config import OnlineConfig, OptimizerConfig, PivotConfig
from turntree.train.loss_config import LossConfig
from turntree.train.plan import held, memory

SHORT = Sampling(max_tokens=12)
SHARED: dict[str, Any] = {
    "group_size": 3,
    "sampling": SHORT,
    "loss": LossConfig(kl_coefficient=1.0),
    "optimizer": OptimizerConfig(learning_rate=1e-4),
}
ONLINE = TrainOnlineConfig(
    count=3, check=EpisodesCheckConfig(tasks=0), train=OnlineConfig(iterations=8, groups=2, max_turns=3, **SHARED)
)
PIVOT = TrainPivotConfig(
    states="own",
    environment=Part("household"),
    teacher=Part("household"),
    verifier=Part("household"),
    own=OwnPathConfig(tasks=4, count=4, rollouts=4, max_turns=4),
    check=CheckConfig(tasks=0),
    train=PivotConfig(steps=8, groups=4, **SHARED),
)
STAGES = {"online": (run_train_online, ONLINE), "pivot": (run_train_pivot, PIVOT)}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another policy of the same tokenizer, not far from the start."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    policy = load_policy("household", Device())
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter += 0.2 * parameter.std(correction=0) * torch.randn_like(parameter)
    policy.save(folder)
    return folder


def divergence(policy: Policy, other: Policy) -> float:
    """KL(policy || other) in nats a token, where the start of training would speak first in eight games."""
    total, count = 0.0, 0
    with open_tasks(Part("household"), {"train": 8}, seed=0) as opened:
        for number, task in enumerate(opened.of("train")):
            prompt = policy.renderer.prompt(task.reset())
            request = GenerationRequest(prompt_ids=prompt, sampling=SHORT, seed=number)
            said = load_policy("household", Device()).engine.generate([request])[0].token_ids
            tokens = torch.tensor([[*prompt, *said]])
            with torch.no_grad():
                ours, theirs = (
                    each.model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for each in (policy, other)
                )
            total, count = total + float((ours.exp() * (ours - theirs)).sum()), count + len(said)
    return total / count


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def distances(run: Path) -> list[float]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [row["kl"] for row in rows if row.get("kl") is not None]


@pytest.mark.parametrize("stage", STAGES)
def test_the_start_for_a_reference_is_no_reference_and_another_policy_pulls(
    stage: str, teacher: Path, tmp_path: Path
) -> None:
    run, config = STAGES[stage]
    run(config, tmp_path / "none")
    run(replace(config, reference=str(resolve("household"))), tmp_path / "start")
    found, wanted = weights(tmp_path / "start"), weights(tmp_path / "none")
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert distances(tmp_path / "none")[0] == 0
    run(replace(config, reference=str(teacher)), tmp_path / "taught")
    assert distances(tmp_path / "taught")[0] > 0.01
    start, taught, reference = (
        load_policy(str(each), Device()) for each in ("household", tmp_path / "taught" / "model", teacher)
    )
    assert divergence(taught, reference) < 0.95 * divergence(start, reference)


def test_a_reference_that_cannot_be_one_is_refused(teacher: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        replace(ONLINE, reference=str(teacher), train=replace(ONLINE.train, loss=LossConfig(kl_coefficient=0.0)))
    assert refused.value.field == "reference"
    save_model(tiny_model(), tiny_tokenizer(), tmp_path / "other")
    for folder in ("other", "none"):
        with pytest.raises(InputError) as wrong:
            run_train_online(replace(ONLINE, reference=str(tmp_path / folder)), tmp_path / "run")
        assert folder in str(wrong.value) and not (tmp_path / "run").exists()


def test_a_run_goes_on_with_the_same_reference_only(teacher: Path, tmp_path: Path) -> None:
    config = replace(ONLINE, reference=str(tmp_path / "teacher"))
    (tmp_path / "teacher").symlink_to(teacher)
    run_train_online(config, tmp_path / "run")
    (tmp_path / "teacher").unlink()
    (tmp_path / "teacher").symlink_to(resolve("household"))
    with pytest.raises(InputError, match="reference"):
        run_train_online(config, tmp_path / "run")


def test_a_plan_counts_the_reference_that_is_named(tmp_path: Path) -> None:
    small, large = tiny_model(), tiny_model(layers=8)
    for name, model in (("small", small), ("large", large)):
        save_model(model, tiny_tokenizer(), tmp_path / name)
    config = replace(ONLINE, model=str(tmp_path / "small"))
    plans = [asked(each, 1, "float32") for each in (config, replace(config, reference=str(tmp_path / "large")))]
    own, other = (memory(read_config(config.model), plan) for plan in plans)
    assert own.reference == held(small.parameters()) and other.reference == held(large.parameters())
    assert replace(other, reference=0, passes=0) == replace(own, reference=0, passes=0)


def test_what_a_carrier_trained_teaches_there(tmp_path: Path) -> None:
    carried = replace(ONLINE, device=Device(carrier=Part("tinker", {})), train=replace(ONLINE.train, iterations=2))
    with installed(FakeTinker(load_policy("household", Device()).model, ["default", "household"])):
        run_train_online(carried, tmp_path / "first")
        taught = replace(carried, reference=str(tmp_path / "first" / "model"))
        run_train_online(taught, tmp_path / "second")
        assert abs(distances(tmp_path / "first")[0]) < 1e-6 < distances(tmp_path / "second")[0]
        with pytest.raises(InputError) as refused:
            run_train_online(replace(carried, reference=str(resolve("qa"))), tmp_path / "third")
        assert refused.value.field == "reference"
