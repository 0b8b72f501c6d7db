"""bfloat16 weights with float32 masters: they learn what float32 weights learn, and the rest of the trainer holds."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_learner import learner, sampled
from test_lora import adapted

import turntree.train.forward as forward
from tiny_models import save_tiny_checkpoint, tiny_model, tiny_tokenizer
from turntree.core.errors import ConfigError
from turntree.engine.checkpoint import load_model, policy_hash, save_model
from turntree.engine.hf import HFEngine
from turntree.engine.tokenizer import load_tokenizer
from turntree.pack.attention import set_tree_attention
from turntree.pack.packing import pack
from turntree.render.template import ChatRenderer
from turntree.train.checkpoints import CheckpointConfig, Checkpoints
from turntree.train.forward import set_checkpointing
from turntree.train.likelihood import negative_log_likelihood
from turntree.train.losses import LossConfig
from turntree.train.optimizer import Optimizer, OptimizerConfig
from turntree.train.sft import Example
from turntree.train.trainer import Trainer, Trainers
from turntree.train.update import batch_loss, loss_normalizer

RENDERER = ChatRenderer(tiny_tokenizer())
RATE = 1e-4


class Unaided(Optimizer):
    """What bfloat16 weights are without masters: each is its own."""

    def __init__(self, parameters, config: OptimizerConfig) -> None:
        super().__init__(parameters, config)
        self._masters = self.parameters
        self._adamw = torch.optim.AdamW(self.parameters, lr=RATE, betas=config.betas, weight_decay=0.0)


def corpus() -> list[Example]:
    """Sequences with a rule to learn."""
    draw, rows = random.Random(0), []
    for _ in range(32):
        ids, step = [draw.randrange(1, 60)], draw.randrange(1, 7)
        for place in range(17):
            ids.append((ids[-1] * (3 if place % 3 else 1) + step) % 61)
        rows.append(Example(tuple(ids), (False,) * 4 + (True,) * 14))
    return rows


def losses(start, dtype: torch.dtype, kind: type[Optimizer], steps: int) -> list[float]:
    model = copy.deepcopy(start).to(dtype)
    optimizer = kind(model.parameters(), OptimizerConfig(learning_rate=RATE))
    rows, found = corpus(), []
    for step in range(steps):
        batch = [rows[(step * 4 + place) % len(rows)] for place in range(4)]
        loss = negative_log_likelihood(model, batch) / sum(sum(row.loss_mask) for row in batch)
        optimizer.backward(loss)
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def test_two_hundred_steps_follow_float32_within_a_hundredth_and_without_masters_they_do_not() -> None:
    start = tiny_model("qwen3", 64, hidden_size=32)
    wide = losses(start, torch.float32, Optimizer, 200)

    def furthest(kind: type[Optimizer]) -> float:
        found = losses(start, torch.bfloat16, kind, 200)
        off = max(abs(ours - theirs) / theirs for ours, theirs in zip(found, wide, strict=True))
        print(f"{kind.__name__}: last 8 losses {sum(found[-8:]) / 8:.4f} ({sum(wide[-8:]) / 8:.4f}), off by {off:.2%}")
        return off

    assert sum(wide[-8:]) < 0.9 * sum(wide[:8])  # there was something to follow
    assert furthest(Optimizer) < 0.01
    assert furthest(Unaided) > 0.1


def test_steps_too_small_for_a_weight_add_up_in_its_master() -> None:
    """Below 1 bfloat16 has a number every 2^-8, so that one step of 1e-4 leaves a weight of 1 where it is."""
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = Optimizer([weight], OptimizerConfig(learning_rate=1e-4))
    seen = []
    for _ in range(100):
        optimizer.backward(weight.float().sum())
        optimizer.step()
        seen.append(float(weight.detach()))
    assert seen[0] == 1.0 and seen[-1] == float(torch.tensor(0.99).bfloat16())


def test_gradients_of_many_passes_are_summed_in_float32() -> None:
    """In bfloat16 256 + 1 is 256."""
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = Optimizer([weight], OptimizerConfig())
    for _ in range(300):
        optimizer.backward(weight.float().sum())
    assert optimizer.step()["grad_norm"] == 300.0


def test_float16_weights_are_refused_because_their_small_gradients_vanish() -> None:
    with pytest.raises(ConfigError, match=r"field 'device\.dtype': 'float16' weights are not trained; use bfloat16"):
        Optimizer(tiny_model(dtype=torch.float16).parameters(), OptimizerConfig())


@pytest.mark.parametrize("kind", ["weights", "adapter"])
def test_the_engine_sees_the_rounded_weights_and_an_adapter_is_float32_itself(kind: str) -> None:
    model = tiny_model(dtype=torch.bfloat16)
    model = adapted(model, spread=0.1) if kind == "adapter" else model
    engine = HFEngine(model, RENDERER.stop_ids)
    taught = learner(model, engine, optimizer=OptimizerConfig(learning_rate=1e-3))
    before = policy_hash(model)
    taught.learn(*sampled(engine))
    assert engine.model is model and policy_hash(model) != before and model.dtype == torch.bfloat16
    optimizer = taught.trainers.own.optimizer
    for weight, master in zip(optimizer.parameters, optimizer.masters, strict=True):
        assert master.dtype == torch.float32
        if kind == "weights":
            assert weight.dtype == torch.bfloat16 and torch.equal(weight, master.bfloat16())
        else:
            assert weight is master


def checkpointed(model, monkeypatch) -> None:
    set_tree_attention(model)
    set_checkpointing(model)


def chunked(model, monkeypatch) -> None:
    monkeypatch.setattr(forward, "CHUNK_LOGITS", 5 * 384)


def both(model, monkeypatch) -> None:
    checkpointed(model, monkeypatch)
    chunked(model, monkeypatch)


MEMORY = [checkpointed, chunked, both]


@pytest.mark.parametrize("max_tokens", [4096, 24])  # whole trees, and cut ones
@pytest.mark.parametrize("memory", [None, both])
@pytest.mark.parametrize("kind", ["weights", "adapter"])
def test_no_policy_has_moved_before_its_first_update(kind: str, memory, max_tokens: int, monkeypatch) -> None:
    """Once the trainer has recomputed the old log-probabilities, every ratio of the first step is 1 within 1e-4."""
    model = tiny_model(dtype=torch.bfloat16)
    model = adapted(model, spread=0.1) if kind == "adapter" else model
    engine = HFEngine(model, RENDERER.stop_ids)
    if memory is not None:
        memory(model, monkeypatch)
    taught = learner(model, engine)
    taught.max_tokens = max_tokens
    metrics, _ = taught.learn(*sampled(engine))
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert (metrics["cut_trees"] > 0) == (max_tokens == 24)


@pytest.mark.parametrize("max_tokens", [4096, 24])
@pytest.mark.parametrize("memory", MEMORY)
def test_saving_memory_leaves_the_gradient_in_the_masters(
    memory: Callable, max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpointing, a head in chunks and cut trees give the gradient of one plain pass, as nearly as bfloat16 has
    it: no further from it than that pass is from float32's."""
    plain = tiny_model(dtype=torch.bfloat16)
    trees, credits = sampled(HFEngine(plain, RENDERER.stop_ids))
    expected, exact = gradient(plain, trees, credits, 4096), gradient(tiny_model(), trees, credits, 4096)
    model = tiny_model(dtype=torch.bfloat16)
    memory(model, monkeypatch)
    found = gradient(model, trees, credits, max_tokens)
    rounding = float((expected - exact).norm() / exact.norm())
    assert 1e-4 < rounding < 0.05
    assert float((found - expected).norm() / expected.norm()) < 2 * rounding
    assert float((found - exact).norm() / exact.norm()) < 2 * rounding


def gradient(model, trees, credits, max_tokens: int) -> torch.Tensor:
    """Of one step, as the masters have it; float32."""
    batches = pack(trees, credits, max_tokens=max_tokens)
    config = LossConfig(kl_coefficient=0.0)
    optimizer = Optimizer(model.parameters(), OptimizerConfig())
    for batch in batches:
        optimizer.backward(batch_loss(model, None, batch, config, loss_normalizer(batches, config))[0])
    return torch.cat([held.grad.flatten() for held in optimizer.masters])


def test_a_run_that_goes_on_has_its_masters_again(tmp_path: Path) -> None:
    """Bit for bit, in weights that move only every few steps."""

    def start():
        model = tiny_model("llama", 40, layers=1, dtype=torch.bfloat16)
        return model, Optimizer(model.parameters(), OptimizerConfig(learning_rate=3e-5))

    def go_on(model, optimizer) -> None:
        for _ in range(6):
            ids = torch.tensor([[optimizer.steps + 1, 3, 5, 7]])
            optimizer.backward(model(input_ids=ids, labels=ids).loss)
            optimizer.step()

    model, optimizer = start()
    go_on(model, optimizer)
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(6, Trainers(Trainer(model, None, optimizer)), {})
    go_on(model, optimizer)
    again, its_optimizer = start()
    checkpoints.restore(Trainers(Trainer(again, None, its_optimizer)))
    go_on(again, its_optimizer)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    names = [name for name, _ in model.named_parameters()]
    ours, theirs = its_optimizer.tensors(names), optimizer.tensors(names)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_the_exported_model_has_the_type_that_it_was_loaded_in(tmp_path: Path) -> None:
    base = save_tiny_checkpoint(tmp_path / "base")
    model = load_model(base, dtype="bfloat16")
    optimizer = Optimizer(model.parameters(), OptimizerConfig(learning_rate=1e-3))
    optimizer.backward(model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss)
    optimizer.step()
    folder = save_model(model, load_tokenizer(base), tmp_path / "trained")
    assert {value.dtype for value in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert policy_hash(load_model(folder, dtype="auto")) == policy_hash(model)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_masters_lie_there_and_go_on_bit_for_bit(tmp_path: Path) -> None:
    model = tiny_model(dtype=torch.bfloat16).to("cuda")
    engine = HFEngine(model, RENDERER.stop_ids)
    taught = learner(model, engine, optimizer=OptimizerConfig(learning_rate=1e-3))
    metrics, _ = taught.learn(*sampled(engine))
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    names, optimizer = taught.trainers.own.names, taught.trainers.own.optimizer
    held = optimizer.tensors(names)
    assert {held[key].device.type for key in held if key.startswith(("weight.", "exp_avg."))} == {"cuda"}
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(1, taught.trainers, {})
    again = tiny_model(dtype=torch.bfloat16, seed=1).to("cuda")
    its_optimizer = Optimizer(again.parameters(), OptimizerConfig(learning_rate=1e-3))
    checkpoints.restore(Trainers(Trainer(again, None, its_optimizer)))
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    assert all(torch.equal(value, held[key]) for key, value in its_optimizer.tensors(names).items())
