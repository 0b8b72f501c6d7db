"""The one-file GRPO recipe and the library are the same algorithm: same tokens, same loss, same gradient."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path

import pytest
import torch
from random_trees import sampled_near, scored_trees

from rollout_view import rollout_of
from tiny_models import tiny_model
from turntree.credit.credit import CreditRule
from turntree.pack.packing import pack
from turntree.train.losses import LossConfig, loss_normalizer
from turntree.train.update import batch_loss

PATH = Path(__file__).resolve().parents[2] / "recipes" / "grpo_one_file.py"


@pytest.fixture(scope="module")
def recipe():
    spec = importlib.util.spec_from_file_location("grpo_one_file", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["grpo_one_file"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def flat_rows(recipe, trees, rewards):
    """Every scored rollout as the recipe wants it."""
    rows = []
    for tree, labels in zip(trees, rewards, strict=True):
        scored = labels.scored()
        for leaf, advantage in zip(scored, recipe.group_advantages(list(scored.values())), strict=True):
            rollout = rollout_of(tree, leaf)
            old = [logprob or 0.0 for logprob in rollout.logprobs]
            rows.append(recipe.Row(list(rollout.token_ids), [int(m) for m in rollout.loss_mask], old, advantage))
    return rows


def test_the_recipe_and_the_library_agree_on_loss_and_gradient(recipe) -> None:
    draw = random.Random(5)
    model = tiny_model("qwen3", 24, hidden_size=32, dtype=torch.float64)
    reference = tiny_model("qwen3", 24, hidden_size=32, seed=1, dtype=torch.float64)
    shapes, rewards = scored_trees(draw)
    trees = [sampled_near(model, tree, draw, spread=0.3) for tree in shapes]

    flat = recipe.grpo_loss(model, reference, flat_rows(recipe, trees, rewards), kl_coefficient=0.05)
    flat.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}

    model.zero_grad()
    config = LossConfig(clip_low=0.2, clip_high=0.2, kl_coefficient=0.05)
    credits = [CreditRule()(tree, labels) for tree, labels in zip(trees, rewards, strict=True)]
    batches = pack(trees, credits, max_tokens=4096)
    normalizer = loss_normalizer(batches, config)
    losses = [batch_loss(model, reference, batch, config, normalizer)[0] for batch in batches]
    sum(losses).backward()

    assert float(sum(losses).detach()) == pytest.approx(float(flat.detach()), rel=1e-6)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, expected[name], rtol=1e-5, atol=1e-7), name


def test_the_recipe_learns_its_toy_task(recipe) -> None:
    rewards = recipe.train(steps=30, learning_rate=3e-3, seed=0, log=lambda line: None)
    assert rewards[0] < 0.2
    assert sum(rewards[-5:]) / 5 > 0.25


def test_the_recipe_stands_alone() -> None:
    source = PATH.read_text()
    assert "import turntree" not in source and "from turntree" not in source
    assert len(source.splitlines()) <= 250
