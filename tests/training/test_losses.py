"""The loss term by term, against numbers written out by hand and an enumerated softmax."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from turntree.core.config import from_mapping
from turntree.core.errors import ConfigError, InputError
from turntree.training.losses import LossConfig, LossSums, exact_kl, loss_normalizer, policy_loss
from turntree.training.packing import PackedBatch, PackingStats

NO_KL = LossConfig(kl_coefficient=0.0)


def batch_of(
    actions: list[tuple[float, float, float]],
    action_T: list[int],
    old: list[float],
    *,
    sampling: list[float] | None = None,
    reference: list[float] | None = None,
    zero_variance: list[bool] | None = None,
    stats: PackingStats | None = None,
) -> PackedBatch:
    """A batch with one slot per term; the loss reads no tokens."""
    double = torch.float64
    nothing = torch.zeros(1, 1, dtype=torch.long)
    positive, negative, multiplicity = torch.tensor(actions, dtype=double).T
    tokens = sum(actions[a][2] for a in action_T)
    return PackedBatch(
        tokens_BL=nothing,
        positions_BL=nothing,
        last_BL=nothing,
        predecessor_S=torch.arange(len(old)),
        target_S=torch.arange(len(old)),
        slot_T=torch.arange(len(old)),
        action_T=torch.tensor(action_T),
        sampling_logprobs_T=torch.tensor(sampling if sampling is not None else old, dtype=double),
        old_logprobs_T=torch.tensor(old, dtype=double),
        positive_A=positive,
        negative_A=negative,
        multiplicity_A=multiplicity,
        zero_variance_A=torch.tensor(zero_variance or [False] * len(actions)),
        tree_A=torch.zeros(len(actions), dtype=torch.long),
        is_flat=True,
        stats=stats or PackingStats(trees=1, rollouts=len(actions), rollout_tokens=tokens),
        reference_logprobs_S=None if reference is None else torch.tensor(reference, dtype=double),
    )


def leaf(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    ("ratio", "loss", "slope"),  # of -[2 min(r, 1.2) - 1 max(r, 0.8)] by log r
    [
        (0.5, -(2 * 0.5 - 0.8), -2 * 0.5),  # the punished half is clipped, the rewarded half is not
        (1.0, -(2 * 1.0 - 1.0), -1.0),
        (1.5, -(2 * 1.2 - 1.5), 1.5),  # the other way round
    ],
)
def test_each_half_is_clipped_on_its_own_side(ratio: float, loss: float, slope: float) -> None:
    policy = leaf([math.log(ratio) - 3.0])
    found, _ = policy_loss(policy, batch_of([(2.0, -1.0, 3.0)], [0], [-3.0]), NO_KL, normalizer=1.0)
    found.backward()
    assert float(found.detach()) == pytest.approx(loss)
    assert policy.grad.item() == pytest.approx(slope)


def test_dual_clip_bounds_how_hard_a_punished_token_is_pushed() -> None:
    policy = leaf([math.log(10.0)])
    config = dataclasses.replace(NO_KL, dual_clip=3.0)
    found, _ = policy_loss(policy, batch_of([(0.0, -1.0, 1.0)], [0], [0.0]), config, normalizer=1.0)
    found.backward()
    assert float(found.detach()) == pytest.approx(3.0) and policy.grad.item() == 0.0


def test_action_ratio_is_the_product_over_one_completion_and_one_summand() -> None:
    """PivotRL, Eq. 7 and 8 with G = 2: completions of two and one tokens, advantages 1 and -1."""
    policy = leaf([-1.0, -1.0, -1.0])
    batch = batch_of([(1.0, 0.0, 1.0), (0.0, -1.0, 1.0)], [0, 0, 1], [-1.1, -1.2, -1.05])
    config = dataclasses.replace(NO_KL, ratio="action", normalizer="rollouts", clip_high=0.5)
    normalizer = loss_normalizer([batch], config)
    assert normalizer == 2.0
    found, sums = policy_loss(policy, batch, config, normalizer=normalizer)
    assert float(found.detach()) == pytest.approx(-(math.exp(0.3) - math.exp(0.05)) / 2)
    assert sums.metrics()["ratio_mean"] == pytest.approx((math.exp(0.3) + math.exp(0.05)) / 2)


def test_truncated_importance_weights_scale_the_surrogate_and_not_the_kl() -> None:
    batch = batch_of([(1.0, 0.0, 1.0)] * 2, [0, 1], [-1.0, -1.0], sampling=[-1.5, -9.0], reference=[-2.0, -2.0])
    config = LossConfig(kl_coefficient=1.0, importance_cap=2.0)
    found, _ = policy_loss(leaf([-1.0, -1.0]), batch, config, normalizer=1.0)
    assert float(found.detach()) == pytest.approx(-(math.exp(0.5) + 2.0) + 2 * 0.5)


def test_the_k2_term_is_half_the_squared_log_ratio_weighted_by_multiplicity() -> None:
    batch = batch_of([(0.0, 0.0, 3.0)], [0], [-1.0], reference=[-1.4])
    found, sums = policy_loss(leaf([-1.0]), batch, LossConfig(kl_coefficient=0.1), normalizer=6.0)
    assert float(found.detach()) == pytest.approx(0.1 * 3.0 * 0.5 * 0.4**2 / 6.0)
    assert sums.metrics()["kl"] == pytest.approx(0.5 * 0.4**2)


def test_zero_variance_trees_pull_towards_the_reference_only_when_asked() -> None:
    batch = batch_of([(0.0, 0.0, 1.0)], [0], [-1.0], reference=[-2.0], zero_variance=[True])
    for kept in (True, False):
        config = LossConfig(kl_coefficient=1.0, kl_on_zero_variance=kept)
        found, sums = policy_loss(leaf([-1.0]), batch, config, normalizer=1.0)
        assert float(found.detach()) == (0.5 if kept else 0.0)
        assert sums.metrics()["dilution"] == 1.0


LOGITS = [0.3, -0.2, 0.9, -1.1]
REFERENCE = [0.0, 0.4, -0.3, 0.2]
OLD = [0.1, 0.1, 0.2, -0.4]


def enumerated_gradients(sampler: list[float]) -> tuple[Tensor, Tensor, Tensor]:
    """d KL(pi || ref) / d logits exactly, from `full`, and the expectation of the k2 loss over the sampler."""
    logits = leaf(LOGITS)
    reference = torch.log_softmax(torch.tensor(REFERENCE, dtype=torch.float64), -1)
    sampled = torch.log_softmax(torch.tensor(sampler, dtype=torch.float64), -1)

    p = torch.softmax(logits, -1)
    (exact,) = torch.autograd.grad((p * (p.log() - reference)).sum(), logits)

    policy = torch.log_softmax(logits, -1)
    (full,) = torch.autograd.grad(exact_kl(policy[None], reference[None])[0], logits)

    # one term per token of the vocabulary, each with its probability of being drawn as its multiplicity
    draws = [(0.0, 0.0, q) for q in sampled.exp().tolist()]
    batch = batch_of(draws, [0, 1, 2, 3], sampled.tolist(), reference=reference.tolist())
    loss, _ = policy_loss(torch.log_softmax(logits, -1), batch, LossConfig(kl_coefficient=1.0), normalizer=1.0)
    (k2,) = torch.autograd.grad(loss, logits)
    return exact, full, k2


@pytest.mark.parametrize("sampler", [LOGITS, OLD], ids=["on-policy", "off-policy"])
def test_k2_and_full_have_the_gradient_of_the_kl_of_an_enumerated_softmax(sampler: list[float]) -> None:
    exact, full, k2 = enumerated_gradients(sampler)
    assert torch.allclose(full, exact, rtol=0, atol=1e-12)
    assert torch.allclose(k2, exact, rtol=0, atol=1e-12)
    assert exact.norm() > 0.1


def test_full_kl_is_read_at_the_slot_and_weighted_by_multiplicity() -> None:
    batch = batch_of([(0.0, 0.0, 2.0), (0.0, 0.0, 1.0)], [0, 1], [-1.0, -1.0])
    config = LossConfig(kl="full", kl_coefficient=0.5)
    kl = torch.tensor([0.3, 0.6], dtype=torch.float64)
    found, _ = policy_loss(leaf([-1.0, -1.0]), batch, config, normalizer=1.0, exact_kl_S=kl)
    assert float(found.detach()) == pytest.approx(0.5 * (2 * 0.3 + 0.6))


def test_metrics_of_two_batches_add_up_to_those_of_the_whole() -> None:
    actions = [(2.0, 0.0, 1.0), (0.0, -1.0, 2.0), (0.5, -0.5, 3.0)]
    old, new, reference = [-1.0, -1.0, -2.0], [-0.5, -1.5, -2.0], [-1.0, -1.0, -1.0]
    config = LossConfig(kl_coefficient=0.1)

    def sums(rows: list[int]) -> LossSums:
        part = batch_of([actions[i] for i in rows], list(range(len(rows))), [old[i] for i in rows],
                        reference=[reference[i] for i in rows])  # fmt: skip
        return policy_loss(leaf([new[i] for i in rows]), part, config, normalizer=4.0)[1]

    whole, parts = sums([0, 1, 2]).metrics(), (sums([0]) + sums([1, 2])).metrics()
    assert parts == {key: pytest.approx(value) for key, value in whole.items()}
    # the rewarded token rose by e^0.5, beyond 1.2; the punished one fell by e^-0.5, below 0.8; the last did not move
    assert whole["clip_fraction"] == pytest.approx((2.0 + 1.0) / 4.0)
    assert whole["ratio_max"] == pytest.approx(math.exp(0.5))


def test_normalizers() -> None:
    tokens = PackingStats(rollouts=2, rollout_tokens=5)
    summed = batch_of([(1.0, 0.0, 1.0), (0.0, -1.0, 1.0)], [0, 0, 1, 1, 1], [0.0] * 5, stats=tokens)
    per_rollout = batch_of([(0.5, 0.0, 0.5), (0.0, -1 / 3, 1 / 3)], [0, 0, 1, 1, 1], [0.0] * 5, stats=tokens)
    assert loss_normalizer([summed, summed], NO_KL) == 10.0
    assert loss_normalizer([per_rollout], dataclasses.replace(NO_KL, normalizer="rollouts")) == 2.0
    assert loss_normalizer([summed], dataclasses.replace(NO_KL, normalizer="constant", constant=7.0)) == 7.0
    assert loss_normalizer([summed], dataclasses.replace(NO_KL, normalizer="rollouts", ratio="action")) == 2.0
    with pytest.raises(InputError, match=r"CreditRule\(per_rollout=True\)"):
        loss_normalizer([summed], dataclasses.replace(NO_KL, normalizer="rollouts"))
    with pytest.raises(InputError, match=r"CreditRule\(per_rollout=False\)"):
        loss_normalizer([per_rollout], dataclasses.replace(NO_KL, ratio="action"))
    with pytest.raises(InputError, match="no trained token"):
        loss_normalizer([], NO_KL)


@pytest.mark.parametrize("kl", ["k2", "full"])
def test_a_kl_term_without_a_reference_is_an_error_and_never_silently_zero(kl: str) -> None:
    with pytest.raises(ConfigError):
        policy_loss(leaf([-1.0]), batch_of([(1.0, 0.0, 1.0)], [0], [-1.0]), LossConfig(kl=kl), normalizer=1.0)


@pytest.mark.parametrize(
    "values",
    [
        {"clip_low": -0.1},
        {"clip_low": 1.5},
        {"dual_clip": 0.5},
        {"kl_coefficient": -1.0},
        {"temperature": 0.0},
        {"importance_cap": 0.0},
        {"normalizer": "constant"},
        {"constant": 3.0},
        {"normalizer": "sequence"},
        {"clip_hi": 0.2},
    ],
)
def test_impossible_settings_are_refused(values: dict) -> None:
    with pytest.raises(ConfigError):
        from_mapping(LossConfig, values)
