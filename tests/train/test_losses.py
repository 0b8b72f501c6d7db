"""The loss term by term, against numbers written out by hand and an enumerated softmax."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from turntree.core.config import from_mapping
from turntree.core.errors import ConfigError, InputError
from turntree.core.labels import Rewards
from turntree.core.tree import NodeKind, RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.credit.config import CreditConfig
from turntree.credit.credit import CreditRule, hard, hard_dedup, soft
from turntree.pack.packing import PackedBatch, PackingStats, pack
from turntree.train.losses import (
    LossConfig,
    LossSums,
    kl_estimates,
    loss_normalizer,
    policy_loss,
    probability_ratio,
)

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
        node_A=torch.arange(len(actions)),
        is_flat=True,
        longest=1,
        stats=stats or PackingStats(trees=1, rollouts=len(actions), rollout_tokens=tokens),
        reference_logprobs_S=None if reference is None else torch.tensor(reference, dtype=double),
    )


def forked() -> tuple[RolloutTree, Rewards]:
    """A shared first turn of two tokens, then tails of three and two; one wins."""
    tree = RolloutTree("fork")
    root = tree.add(None, NodeKind.PROMPT, (1,)).id
    first = tree.add(root, NodeKind.COMPLETION, (2, 3), logprobs=(0.0, 0.0)).id
    seen = tree.add(first, NodeKind.OBSERVATION, (4,)).id
    tails = [tree.add(seen, NodeKind.COMPLETION, ids, logprobs=(0.0,) * len(ids)).id for ids in ((5, 6, 7), (8, 9))]
    for tail in tails:
        tree.stop(tail, StopReason.COMPLETED)
    return tree, Rewards({tails[0]: Verdict(1.0, ""), tails[1]: Verdict(0.0, "")})


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


@pytest.mark.parametrize("ratio", [0.3, 0.75, 1.0, 1.15, 1.3, 9.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_clip_has_two_bounds_of_its_own(ratio: float, advantage: float) -> None:
    """DAPO's asymmetric range."""
    low, high = 0.2, 0.28
    ppo = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    batch = batch_of([(max(advantage, 0.0), min(advantage, 0.0), 1.0)], [0], [0.0])
    config = dataclasses.replace(NO_KL, clip_low=low, clip_high=high)
    found, _ = policy_loss(leaf([math.log(ratio)]), batch, config, normalizer=1.0)
    assert -float(found.detach()) == pytest.approx(ppo)


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


@pytest.mark.parametrize("ratio", ["token", "action"])
def test_truncated_importance_weights_carry_no_gradient(ratio: str) -> None:
    """Three probabilities: sampled at -1.5 (engine), -1.2 when the update began (trainer), -1.1 now. The slope by the
    policy's log-probability is w r A with w = e^0.3 while below its cap, and cap r A above it."""
    batch = batch_of([(1.0, 0.0, 1.0)], [0], [-1.2], sampling=[-1.5])
    for cap, weight in ((2.0, math.exp(0.3)), (1.1, 1.1)):
        policy = leaf([-1.1])
        config = dataclasses.replace(NO_KL, ratio=ratio, importance_cap=cap)
        policy_loss(policy, batch, config, normalizer=1.0)[0].backward()
        assert policy.grad.item() == pytest.approx(-weight * math.exp(0.1))


def test_the_k2_term_is_half_the_squared_log_ratio_weighted_by_multiplicity() -> None:
    batch = batch_of([(0.0, 0.0, 3.0)], [0], [-1.0], reference=[-1.4])
    found, sums = policy_loss(leaf([-1.0]), batch, LossConfig(kl_coefficient=0.1), normalizer=6.0)
    assert float(found.detach()) == pytest.approx(0.1 * 3.0 * 0.5 * 0.4**2 / 6.0)
    assert sums.metrics()["kl"] == pytest.approx(0.5 * 0.4**2)


def test_zero_variance_trees_pull_towards_the_reference() -> None:
    batch = batch_of([(0.0, 0.0, 1.0)], [0], [-1.0], reference=[-2.0], zero_variance=[True])
    found, sums = policy_loss(leaf([-1.0]), batch, LossConfig(kl_coefficient=1.0), normalizer=1.0)
    assert float(found.detach()) == 0.5
    assert sums.metrics()["dilution"] == 1.0


LOGITS = [0.3, -0.2, 0.9, -1.1]
REFERENCE = [0.0, 0.4, -0.3, 0.2]
OLD = [0.1, 0.1, 0.2, -0.4]


VALUES = [1.0, -0.5, 0.25, -2.0]  # of the four tokens


def policy() -> tuple[Tensor, Tensor]:
    """Logits that want a gradient, and the log-probabilities of the whole vocabulary."""
    logits = leaf(LOGITS)
    return logits, torch.log_softmax(logits, -1)


def log_softmax(logits: list[float]) -> Tensor:
    return torch.log_softmax(torch.tensor(logits, dtype=torch.float64), -1)


def gradient(value: Tensor, logits: Tensor) -> Tensor:
    return torch.autograd.grad(value, logits)[0]


def expected_kl_gradient(kl: str, sampler: list[float]) -> Tensor:
    """The expectation over the sampler of the loss's KL gradient: one term per token of the vocabulary, each with its
    probability of being drawn as its multiplicity."""
    old, (logits, new) = log_softmax(sampler), policy()
    batch = batch_of([(0.0, 0.0, q) for q in old.exp().tolist()], [0, 1, 2, 3], old.tolist(),
                     reference=log_softmax(REFERENCE).tolist())  # fmt: skip
    return gradient(policy_loss(new, batch, LossConfig(kl=kl, kl_coefficient=1.0), normalizer=1.0)[0], logits)


def kl_gradient(*, reverse: bool) -> Tensor:
    """d KL(pi || ref) / d logits, or d KL(ref || pi) / d logits, by summing over the vocabulary."""
    (logits, new), anchor = policy(), log_softmax(REFERENCE)
    p, q = (new, anchor) if reverse else (anchor, new)
    return gradient((p.exp() * (p - q)).sum(), logits)


on_and_off_policy = pytest.mark.parametrize("sampler", [LOGITS, OLD], ids=["on-policy", "off-policy"])


@on_and_off_policy
def test_k2_has_the_gradient_of_the_kl_to_the_reference(sampler: list[float]) -> None:
    expected = kl_gradient(reverse=True)
    assert torch.allclose(expected_kl_gradient("k2", sampler), expected, rtol=0, atol=1e-12)
    assert expected.norm() > 0.1


@on_and_off_policy
def test_k3_has_the_gradient_of_the_kl_from_the_reference_which_is_another_one(sampler: list[float]) -> None:
    found = expected_kl_gradient("k3", sampler)
    assert torch.allclose(found, kl_gradient(reverse=False), rtol=0, atol=1e-12)
    assert (found - kl_gradient(reverse=True)).norm() > 0.1 * found.norm()


@pytest.mark.parametrize("behind", [-1000.0, -100.0])
def test_every_kl_estimate_stays_finite_where_the_reference_is_far_more_certain(behind: float) -> None:
    """exp(100) is infinite in float32: one such token made the loss infinite, and NaN times a ratio of zero."""
    for kind in ("k2", "k3"):
        policy = torch.tensor([behind, -1.0, -0.9999], requires_grad=True)
        found = kl_estimates(policy, torch.tensor([0.0, -1.0, -1.0]), kind)
        (slope,) = torch.autograd.grad(found.sum(), policy)
        assert found.isfinite().all() and slope.isfinite().all()
        if kind == "k3":
            assert found[1].item() == 0 == slope[1].item() and abs(found[2].item()) < 1e-7


def test_k3_estimates_the_kl_to_the_reference_without_bias_and_k2_does_not() -> None:
    new, anchor = log_softmax(LOGITS), log_softmax(REFERENCE)
    exact = float((new.exp() * (new - anchor)).sum())
    assert float((new.exp() * kl_estimates(new, anchor, "k3")).sum()) == pytest.approx(exact)
    assert abs(float((new.exp() * kl_estimates(new, anchor, "k2")).sum()) - exact) > 0.01 * exact


def expected_surrogate_gradient(sampler: list[float], cap: float) -> Tensor:
    """Tokens drawn from an engine's `sampler`, old log-probabilities of the trainer, no clipping: the expected
    gradient of the loss, again by enumeration."""
    (logits, new), drawn, old = policy(), log_softmax(sampler), log_softmax(OLD)
    batch = batch_of([(q * max(a, 0), q * min(a, 0), q) for q, a in zip(drawn.exp().tolist(), VALUES, strict=True)],
                     [0, 1, 2, 3], old.tolist(), sampling=drawn.tolist())  # fmt: skip
    config = LossConfig(kl_coefficient=0.0, clip_low=1.0, clip_high=99.0, importance_cap=cap)
    return gradient(policy_loss(new, batch, config, normalizer=1.0)[0], logits)


def test_importance_weights_make_the_gradient_of_another_sampler_s_tokens_that_of_the_policy() -> None:
    """E_sampler[w r A d log pi] = E_pi[A d log pi] without a cap; with one, its bias is that of the cut weights."""
    engine = [1.2, -0.9, 0.3, 0.4]  # an engine that rounds badly
    (logits, new), values = policy(), torch.tensor(VALUES, dtype=torch.float64)
    expected = gradient(-(new.exp() * values).sum(), logits)
    assert torch.allclose(expected_surrogate_gradient(engine, cap=1e9), expected, rtol=0, atol=1e-12)

    logits, new = policy()
    cut = (log_softmax(OLD) - log_softmax(engine)).exp().clamp(max=1.1) * log_softmax(engine).exp()
    by_hand = gradient(-(cut * torch.exp(new - log_softmax(OLD)) * values).sum(), logits)
    found = expected_surrogate_gradient(engine, cap=1.1)
    assert torch.allclose(found, by_hand, rtol=0, atol=1e-12)
    assert (found - expected).norm() > 0.01


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


@pytest.mark.parametrize("normalizer", ["tokens", "rollouts"])
def test_a_rollout_that_sampled_nothing_is_no_reason_to_refuse_the_credit(normalizer: Literal["tokens", "rollouts"]):
    tree = RolloutTree("task")
    prompt = tree.add(None, NodeKind.PROMPT, (1, 2)).id
    said = [tree.add(prompt, NodeKind.COMPLETION, (3, 4), logprobs=(-1.0, -1.0)).id for _ in range(2)]
    said.append(tree.add(prompt, NodeKind.OBSERVATION, ()).id)
    for leaf in said:
        tree.stop(leaf, StopReason.COMPLETED)
    config = dataclasses.replace(NO_KL, normalizer=normalizer)
    rewards = Rewards({leaf: Verdict(reward, "") for leaf, reward in zip(said, (1.0, 0.0, 0.0), strict=True)})
    credit = config.estimator(CreditConfig())(tree, rewards)
    assert loss_normalizer(pack([tree], [credit], max_tokens=100), config) == (4.0 if normalizer == "tokens" else 2.0)


def test_hard_dedup_normalises_by_unique_trained_tokens() -> None:
    """Rollouts of 5 and 4 trained tokens share two of them: seven unique ones."""
    tree, rewards = forked()
    config = dataclasses.replace(NO_KL, normalizer="tokens")
    for attribution, tokens in ((hard_dedup, 7.0), (hard, 9.0), (soft, 9.0)):
        credit = CreditRule(attribution=attribution)(tree, rewards)
        assert credit.rollout_tokens == tokens
        assert loss_normalizer(pack([tree], [credit], max_tokens=99), config) == tokens


@pytest.mark.parametrize(
    ("credit", "loss", "problem"),
    [
        ({"leaf_weights": "path_weighted", "comparison": "starts"}, {}, "realised sum of path weights"),
        ({"advantages": "dr_grpo"}, {"normalizer": "rollouts"}, "length bias"),
    ],
)
def test_credit_and_loss_that_do_not_go_together_are_refused(credit: dict, loss: dict, problem: str) -> None:
    chosen = CreditConfig(**credit)
    with pytest.raises(ConfigError, match=problem):
        LossConfig(**loss).estimator(chosen)
    LossConfig(normalizer="constant", constant=64.0).estimator(chosen)


def test_the_loss_says_whether_credit_is_divided_by_length() -> None:
    tree, rewards = forked()
    for ratio, divided in (("token", True), ("action", False)):
        config = LossConfig(kl_coefficient=0.0, normalizer="rollouts", ratio=ratio)
        rule = config.estimator(CreditConfig())
        assert rule.per_rollout is divided
        assert loss_normalizer(pack([tree], [rule(tree, rewards)], max_tokens=99), config) == 2.0


def test_a_kl_term_without_a_reference_is_an_error_and_never_silently_zero() -> None:
    with pytest.raises(ConfigError):
        policy_loss(leaf([-1.0]), batch_of([(1.0, 0.0, 1.0)], [0], [-1.0]), LossConfig(), normalizer=1.0)


@pytest.mark.parametrize(
    "values",
    [
        {"clip_low": -0.1},
        {"clip_low": 1.5},
        {"kl_coefficient": -1.0},
        {"temperature": 0.5},
        {"normalizer": "constant"},
        {"constant": 3.0},
        {"normalizer": "sequence"},
        {"clip_hi": 0.2},
        {"kl": "k1"},
    ],
)
def test_impossible_settings_are_refused(values: dict) -> None:
    with pytest.raises(ConfigError):
        from_mapping(LossConfig, values)


def surrogate(log_ratio: Tensor, positive: float, negative: float, config: LossConfig) -> Tensor:
    """-[P min(r, 1 + hi) + N max(r, 1 - lo)] and its slope by the log ratio, case by case in double precision."""
    x = log_ratio.double()
    rises = x <= math.log(1 + config.clip_high)  # not clipped above
    falls = x >= math.log(1 - config.clip_low) if config.clip_low < 1 else torch.ones_like(rises)
    return -(positive * rises + negative * falls) * x.exp()


@settings(max_examples=60, deadline=None)
@given(
    log_ratio=st.floats(-150.0, 150.0),
    tokens=st.integers(1, 200),
    positive=st.sampled_from([0.0, 0.5, 2.0]),
    negative=st.sampled_from([0.0, -1.5]),
    kl=st.sampled_from([0.0, 0.1]),
)
def test_no_log_ratio_of_an_action_overflows_and_a_clipped_one_has_no_gradient(
    log_ratio: float, tokens: int, positive: float, negative: float, kl: float
) -> None:
    """At log ratio 100 exp is infinite in float32, and infinity times a zero advantage is no number. In the limit a
    clipped half is a constant without gradient; an unclipped one pushes the way that the formula says."""
    config = LossConfig(ratio="action", kl_coefficient=kl, importance_cap=3.0)
    policy = torch.full((tokens,), log_ratio / tokens, requires_grad=True)
    batch = batch_of([(positive, negative, 1.0)], [0] * tokens, [0.0] * tokens, sampling=[-1.0] * tokens,
                     reference=policy.tolist())  # fmt: skip
    loss, sums = policy_loss(policy, batch, config, normalizer=1.0)
    loss.backward()
    weight = min(math.exp(tokens), config.importance_cap)  # its exponent overflows too
    assert torch.isfinite(loss) and torch.isfinite(policy.grad).all()
    assert all(math.isfinite(value) for value in sums.metrics().values())
    total = policy.detach().sum()
    if min(abs(float(total) - math.log(edge)) for edge in (0.8, 1.2, 3.0)) < 1e-3:
        return  # on an edge of the clip rounding decides
    exact = weight * surrogate(total, positive, negative, config)
    if total < 22.0 or exact == 0.0:
        assert policy.grad.double() == pytest.approx(exact.expand(tokens).numpy(), rel=1e-3, abs=1e-30)
    else:
        assert (policy.grad.sign() == exact.sign()).all() and policy.grad.abs().min() > 1e9


def test_a_token_ratio_is_exact_far_beyond_what_any_clip_lets_through() -> None:
    x = torch.linspace(-200.0, 170.0, 500, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(probability_ratio(x).sum(), x)
    assert torch.equal(probability_ratio(x), x.exp()) and torch.equal(slope, x.exp())
