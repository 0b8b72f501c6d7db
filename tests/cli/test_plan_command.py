"""What a run needs on every GPU, told from config.json alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from model_families import seeing_model
from tiny_models import tiny_model, tiny_tokenizer
from turntree.engine.checkpoint import load_model, save_model
from turntree.stages.config import Device, TrainOnlineConfig
from turntree.stages.plan import advice, asked, read_config
from turntree.train.config import LoRAConfig, OnlineConfig
from turntree.train.lora import add_adapter
from turntree.train.plan import Memory, Planned, held, memory

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 2000}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True}
TINY = OnlineConfig(groups=2, group_size=2, max_tokens=64, max_context=64)
SMALL = ("--set", "train.max_tokens=256", "--set", "train.max_context=128", "--groups", 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A config.json and nothing else."""
    path = tmp_path_factory.mktemp("outline")
    Qwen3Config(**SIZES, **HEADS).save_pretrained(path)
    return path


def test_a_plan_names_its_parts_and_says_whether_it_fits(turntree, folder) -> None:
    told = turntree.json("plan", folder, "--gpus", 2, "--memory", 1, *SMALL)["lines"]
    parts = dict(re.findall(r"(\w+) (\d+\.\d+)", told[1]))
    assert list(parts) == ["weights", "masters", "moments", "gradients", "reference", "passes"]
    assert re.search(r"together \d", told[2]) and "rank 0 samples" in told[3]
    assert "a step: 16 rollouts" in told[4] and "fits on 2 x 1 GB" in told[5]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_reference_of_a_fresh_adapter_is_its_base(ranks: int) -> None:
    """One process asked the adapter's values, of which a plan has none."""
    settings = {"ranks": ranks, "tokens": 64, "context": 64, "bfloat16": False}
    whole, adapter = (
        memory(Qwen3Config(**SIZES, **HEADS), Planned(lora=lora, referred=True, **settings))
        for lora in (None, LoRAConfig())
    )
    assert adapter.reference == 0 < whole.reference and adapter.moments < whole.moments


def needing(plan: Planned) -> Memory:
    """As if weights of 1 GB were all."""
    size = 10**9 * (1 if plan.bfloat16 else 2) // plan.ranks
    rest = {"masters": 0, "moments": 4 * size, "gradients": 2 * size, "reference": 0, "passes": 0, "caches": plan.rows}
    adapter = {"moments": 0, "gradients": 0} if plan.lora else {}
    return Memory(parameters=1, weights=size, whole=0, **{**rest, **adapter})


@pytest.mark.parametrize(
    ("room", "said"),
    [
        (100, "fits on 2 x"),
        (5, "fits with device.dtype=bfloat16: 3.50 GB"),
        (1, "device.gradient_checkpointing=true, device.engine=vllm"),
        (0.1, "nor with"),
    ],
)
def test_the_first_change_that_makes_a_run_fit_is_named(room: float, said: str) -> None:
    plan = Planned(ranks=2, bfloat16=False, rows=1, context=8192)
    lines = list(advice(plan, needing(plan), room, needing))
    assert said in lines[-1] and len(lines) == (1 if room == 100 else 2)
    assert "8 GPUs" not in lines[-1] or "4 GPUs" not in lines[-1]


def test_a_dry_run_tells_the_plan_of_a_named_model(turntree, folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("turntree.train.plan.memory", lambda config, plan: needing(plan))
    command = ("train", "online", "--environment", "household", "--out", tmp_path / "run", "--dry-run", *SMALL)
    told = turntree(*command, "--model", folder).stderr
    assert "M parameters, all weights, one process, passes of 256 tokens" in told
    assert "M parameters, " not in turntree(*command).stderr, "the embedded policies are small"


def test_a_folder_without_a_config_is_refused_in_one_line(turntree, tmp_path) -> None:
    assert "has no config.json" in turntree.error("plan", tmp_path)
    assert "MODEL" in turntree.error("plan")


@pytest.mark.parametrize("name", ["Qwen3-VL", "Gemma 3"])
def test_a_model_that_also_sees_is_planned_whole_and_as_it_was_saved(name: str, tmp_path) -> None:
    save_model(seeing_model(name).to(torch.bfloat16), tiny_tokenizer(), tmp_path / "model")
    model = load_model(tmp_path / "model", dtype="auto")
    config = TrainOnlineConfig(model=str(tmp_path / "model"), device=Device(dtype="auto"), train=TINY)
    found = read_config(config.model)
    planned = memory(found, asked(config, 1, str(found.dtype)))
    assert planned.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert planned.weights == held([*model.parameters(), *model.buffers()]) < planned.masters


def test_an_adapter_is_planned_as_an_adapter(tmp_path) -> None:
    save_model(tiny_model(), tiny_tokenizer(), tmp_path / "base")
    model = load_model(tmp_path / "base")
    add_adapter(model, LoRAConfig(rank=4))
    save_model(model, tiny_tokenizer(), tmp_path / "adapter")
    config = TrainOnlineConfig(model=str(tmp_path / "adapter"), train=TINY)
    planned = memory(read_config(config.model), asked(config, 1, "float32"))
    assert planned.gradients == held(p for p in model.parameters() if p.requires_grad)
