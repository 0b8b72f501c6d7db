"""One optimizer step: what it reports, what it refuses, and that it moves the policy the right way."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from random_trees import add_completion

from tiny_models import tiny_model
from turntree.core.errors import ConfigError, TurntreeError
from turntree.core.labels import Rewards
from turntree.core.tree import NodeKind, RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.credit.credit import CreditRule
from turntree.pack.packing import PackedBatch, pack
from turntree.train.forward import slot_scores, with_old_logprobs, with_reference_logprobs
from turntree.train.losses import LossConfig
from turntree.train.optimizer import Optimizer, OptimizerConfig
from turntree.train.update import update_step

NO_KL = LossConfig(kl_coefficient=0.0)


def group(rewards: list[float], first: int = 5) -> tuple[RolloutTree, Rewards]:
    """One state, single-token actions first, first + 1, ... with the given rewards."""
    tree = RolloutTree("state")
    root = tree.add(None, NodeKind.PROMPT, (first, 2, 3)).id
    leaves = [add_completion(tree, root, (first + i,)) for i in range(len(rewards))]
    for leaf in leaves:
        tree.stop(leaf, StopReason.COMPLETED)
    return tree, Rewards({leaf: Verdict(r, "") for leaf, r in zip(leaves, rewards, strict=True)})


def batches_of(model, *groups: tuple[RolloutTree, Rewards], max_tokens: int = 6) -> list[PackedBatch]:
    trees = [tree for tree, _ in groups]
    packed = pack(trees, [CreditRule()(tree, rewards) for tree, rewards in groups], max_tokens=max_tokens)
    return with_old_logprobs(model, packed)


def test_rewarded_actions_become_likelier_and_punished_ones_rarer() -> None:
    model = tiny_model("qwen3", 24)
    batches = batches_of(model, group([1.0, 0.0, 0.0]))
    before = slot_scores(model, batches[0]).logprobs_S.detach()
    update_step(model, None, Optimizer(model.parameters(), OptimizerConfig(learning_rate=1e-3)), batches, NO_KL)
    after = slot_scores(model, batches[0]).logprobs_S.detach()
    assert after[0] > before[0] and after[1] < before[1] and after[2] < before[2]


def test_the_metrics_of_a_step() -> None:
    model, reference = tiny_model("qwen3", 24), tiny_model("qwen3", 24, seed=1)
    batches = batches_of(model, group([1.0, 0.0, 0.0]), group([1.0, 1.0, 1.0], first=9))
    assert len(batches) == 2
    optimizer = Optimizer(model.parameters(), OptimizerConfig(learning_rate=1e-3, warmup_steps=1))
    metrics = update_step(model, reference, optimizer, batches, LossConfig())
    assert metrics["trained_tokens"] == 12 and metrics["padding_tokens"] == 0
    assert metrics["rho"] == 24 / 12
    assert metrics["trees"] == 2 and metrics["zero_variance_fraction"] == 0.5 and metrics["dilution"] == 0.5
    assert metrics["ratio_mean"] == pytest.approx(1.0) and metrics["clip_fraction"] == 0.0
    assert metrics["learning_rate"] == 5e-4
    assert metrics["kl"] > 0 and 0 < metrics["entropy"] <= math.log(24) and metrics["grad_norm"] > 0
    assert all(isinstance(value, float) for value in metrics.values())
    assert metrics.keys() - update_step(model, reference, optimizer, batches, NO_KL).keys() == {"kl"}, "not measured"


def test_splitting_the_window_into_batches_changes_nothing() -> None:
    steps = []
    for max_tokens in (6, 99):
        model, reference = tiny_model("qwen3", 24, dtype=torch.float64), tiny_model("qwen3", 24, seed=1).double()
        groups = [group([1.0, 0.0, 0.0]), group([1.0, 0.0, 1.0], first=9), group([0.0, 0.0], first=2)]
        batches = batches_of(model, *groups, max_tokens=max_tokens)
        optimizer = Optimizer(model.parameters(), OptimizerConfig(learning_rate=1e-3))
        steps.append((len(batches), update_step(model, reference, optimizer, batches, LossConfig())))
    (many, split), (one, whole) = steps
    assert (many, one) == (3, 1)
    for key in ("loss", "grad_norm", "kl", "entropy", "ratio_mean", "dilution", "rho"):
        assert split[key] == pytest.approx(whole[key], rel=1e-6), key


def test_later_epochs_keep_the_old_logprobs_and_clip() -> None:
    model = tiny_model("qwen3", 24)
    batches = batches_of(model, group([1.0, 0.0, 0.0]))
    optimizer = Optimizer(model.parameters(), OptimizerConfig(learning_rate=1e-2))
    epochs = [update_step(model, None, optimizer, batches, NO_KL) for _ in range(4)]
    assert epochs[0]["ratio_mean"] == pytest.approx(1.0) and epochs[0]["clip_fraction"] == 0.0
    assert epochs[-1]["clip_fraction"] > 0.5 and epochs[-1]["ratio_max"] > 1.2


def test_the_kl_term_holds_the_policy_near_its_reference() -> None:
    distances = []
    for beta in (0.0, 1.0):
        model, reference = tiny_model("qwen3", 24), tiny_model("qwen3", 24)
        batches = with_reference_logprobs(reference, batches_of(model, group([1.0, 0.0, 0.0])))
        optimizer = Optimizer(model.parameters(), OptimizerConfig(learning_rate=1e-3))
        for _ in range(10):
            update_step(model, None, optimizer, batches, LossConfig(kl_coefficient=beta, clip_high=5.0, clip_low=1.0))
        now = slot_scores(model, batches[0]).logprobs_S.detach()
        distances.append(float((now - batches[0].reference_logprobs_S).square().sum()))
    assert distances[1] < 0.5 * distances[0]


def test_a_kl_coefficient_without_a_reference_is_refused() -> None:
    model = tiny_model("qwen3", 24)
    with pytest.raises(ConfigError, match="reference"):
        update_step(model, None, Optimizer(model.parameters(), OptimizerConfig()), batches_of(model, group([1.0, 0.0])),
                    LossConfig())  # fmt: skip


def test_a_loss_that_is_not_finite_stops_with_the_step_and_leaves_the_weights() -> None:
    model = tiny_model("qwen3", 24)
    optimizer = Optimizer(model.parameters(), OptimizerConfig())
    good = batches_of(model, group([1.0, 0.0]))
    update_step(model, None, optimizer, good, NO_KL)
    before = [p.detach().clone() for p in model.parameters()]
    broken = [dataclasses.replace(good[0], old_logprobs_T=torch.full_like(good[0].old_logprobs_T, math.nan))]
    with pytest.raises(TurntreeError, match="optimizer step 1: the loss of batch 2 of 2 is nan"):
        update_step(model, None, optimizer, good + broken, NO_KL)
    assert all(torch.equal(p, b) and p.grad is None for p, b in zip(model.parameters(), before, strict=True))


def test_a_gradient_that_is_not_finite_stops_with_the_step_and_leaves_the_weights() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = Optimizer([weight], OptimizerConfig())
    weight.grad = torch.tensor([1.0, math.inf])
    with pytest.raises(TurntreeError, match="optimizer step 0: the gradient norm is inf"):
        optimizer.step()
    assert weight.tolist() == [1.0, 1.0] and weight.grad is None and optimizer.steps == 0


def test_the_gradient_is_clipped_to_the_norm_and_reported_before_clipping() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = Optimizer([weight], OptimizerConfig(learning_rate=0.1, max_grad_norm=1.0, eps=1.0))
    weight.grad = torch.tensor([3.0, 4.0])
    assert optimizer.step() == {"grad_norm": pytest.approx(5.0), "learning_rate": 0.1}
    # AdamW's first step is lr g / (|g| + eps) with the clipped g = (0.6, 0.8)
    assert weight.tolist() == pytest.approx([-0.1 * 0.6 / 1.6, -0.1 * 0.8 / 1.8], rel=1e-5)


def test_learning_rate_schedules() -> None:
    constant = OptimizerConfig(warmup_steps=3)
    assert [constant.factor(step) for step in (0, 1, 2, 3, 1000)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    cosine = OptimizerConfig(schedule="cosine", warmup_steps=1, final_fraction=0.2)
    assert [cosine.factor(step, 6) for step in (0, 1, 3, 5, 9)] == pytest.approx([0.5, 1.0, 0.6, 0.2, 0.2])


@pytest.mark.parametrize("values", [{"learning_rate": 0.0}, {"max_grad_norm": 0.0}, {"warmup_steps": -1}])
def test_impossible_optimizer_settings_are_refused(values: dict) -> None:
    with pytest.raises(ConfigError):
        OptimizerConfig(**values)


def test_a_cosine_needs_to_know_its_end() -> None:
    with pytest.raises(ConfigError, match="number of steps"):
        Optimizer([torch.nn.Parameter(torch.zeros(1))], OptimizerConfig(schedule="cosine"))
