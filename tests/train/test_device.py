"""Everything is computed where the model lies: what mixes devices fails here as it would on a GPU."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from random_trees import scored_trees

import turntree.train.forward as forward
from other_device import CPU, OTHER, Elsewhere, other_device
from tiny_models import tiny_model
from turntree.core.completion import GenerationRequest, Sampling
from turntree.credit.credit import CreditRule
from turntree.engine.hf import HFEngine
from turntree.pack.attention import set_tree_attention
from turntree.pack.packing import flat_batches, pack
from turntree.train.config import LoRAConfig
from turntree.train.forward import set_checkpointing, with_old_logprobs
from turntree.train.likelihood import check_head, negative_log_likelihood
from turntree.train.lora import add_adapter, frozen_reference
from turntree.train.losses import LossConfig
from turntree.train.optimizer import Optimizer, OptimizerConfig
from turntree.train.sft import Example
from turntree.train.update import update_step


def on_both(compute):
    """What `compute(device)` gives on the other device and here."""
    with other_device():
        there = compute(OTHER)
    return there, compute(CPU)


def placed(device, dtype=torch.float32):
    """The tiny model on the device, with a head of its own: the stand-in cannot move tied weights together."""
    model = tiny_model("qwen3", 24, dtype=dtype, tied=False).to(device)
    assert model.device == device
    return model


def test_the_stand_in_refuses_what_a_gpu_refuses() -> None:
    with other_device():
        away, here = torch.ones(3, device=OTHER), torch.ones(3)
        assert isinstance(away, Elsewhere) and (away + torch.tensor(1.0)).tolist() == [2.0] * 3
        assert away[torch.tensor([0, 1])].sum().item() == 2 and away.cpu().numpy().sum() == 3
        for mixed in (lambda: away + here, lambda: here.index_select(0, away.long()), lambda: away.copy_(here) @ here):
            with pytest.raises(RuntimeError, match="two devices"):
                mixed()
        with pytest.raises(TypeError, match="another device"):
            away.numpy()


def test_sampling_with_kept_and_shared_prefixes() -> None:
    def ask(prompt, sampling, **more):
        return GenerationRequest(prompt_ids=prompt, sampling=sampling, **more)

    def sample(device):
        engine = HFEngine(placed(device), (5,))
        samplings = [
            Sampling(max_tokens=9),
            Sampling(temperature=0.0, max_tokens=5),
            Sampling(temperature=0.7, max_tokens=12),
        ]
        asked = [
            ask((1, 2, 3, 4, *range(number // 2)), sampling, seed=number, retain=True)
            for number, sampling in enumerate(samplings * 3)
        ]
        first = engine.generate(asked)
        longer = [
            ask((*one.prompt_ids, *said.token_ids, 7, 8), one.sampling, seed=9)
            for one, said in zip(asked, first, strict=True)
        ]
        return (*first, *engine.generate(longer))

    for there, here in zip(*on_both(sample), strict=True):
        assert there.token_ids == here.token_ids
        assert there.logprobs == pytest.approx(here.logprobs, abs=1e-5)
        assert there.entropies == pytest.approx(here.entropies, abs=1e-5)


@pytest.mark.parametrize(
    "setting",
    ["float32", "bfloat16", "adapter", "checkpointing", "chunks", "flat", "actions", "recomputed"],
)
def test_an_update(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if setting == "chunks":
        monkeypatch.setattr(forward, "CHUNK_LOGITS", 48)
    trees, rewards = scored_trees(random.Random(0))
    credits = [CreditRule()(tree, reward) for tree, reward in zip(trees, rewards, strict=True)]

    def update(device):
        model = placed(device, torch.bfloat16 if setting == "bfloat16" else torch.float32)
        if setting == "adapter":
            add_adapter(model, LoRAConfig(rank=2))
        set_tree_attention(model)
        if setting == "checkpointing":
            set_checkpointing(model)
        reference = frozen_reference(model)
        kind = {"ratio": "action"} if setting == "actions" else {}
        config = LossConfig(kl_coefficient=0.1, **kind)
        optimizer = Optimizer(model.parameters(), OptimizerConfig(learning_rate=1e-2))
        layout = flat_batches if setting == "flat" else pack
        batches = layout(trees, credits, max_tokens=60)
        if setting == "recomputed":
            batches = with_old_logprobs(model, batches)
        return [update_step(model, reference, optimizer, batches, config) for _ in range(2)]

    # here, too, trees get a dense mask: the kernel of the pieces runs on CPUs only
    monkeypatch.setattr("turntree.pack.attention.layouts", lambda model: ("dense",))
    there, here = on_both(update)
    assert there[0]["grad_norm"] > 0 and there[1]["kl"] > 0
    for found, expected in zip(there, here, strict=True):
        assert found == pytest.approx(expected, rel=3e-2 if setting == "bfloat16" else 1e-3, abs=1e-6)


def test_imitation() -> None:
    def imitate(device):
        model = placed(device)
        check_head(model)
        rows = [Example((1, 2, 3, 4), (False, True, True, False)), Example((5, 6), (False, True))]
        loss = negative_log_likelihood(model, rows)
        loss.backward()
        return float(loss.detach()), [weight.grad.cpu() for weight in model.parameters()]

    (there, gradient), (here, expected) = on_both(imitate)
    assert there == pytest.approx(here, rel=1e-5)
    assert all(map(partial(torch.allclose, atol=1e-5), gradient, expected))
