"""The clipped policy-gradient objective on packed terms, and its KL term. Pure functions of tensors.

With r = pi / pi_old and the three numbers (P, N, m) of a sampling event (docs/design/credit.md):

    loss = - sum w [P min(r, 1 + clip_high) + N max(r, 1 - clip_low)] / Z + beta sum m KL / Z

where w = min(exp(old - sampling), cap) is the truncated importance weight, without gradient. `ratio="token"` sums
over tokens, a documented deviation; `ratio="action"` takes the product of token ratios over one completion, one
summand per completion (PivotRL, Eq. 8).

Z, the normaliser, spans the whole accumulation window and is passed in:
    tokens    sum over trained tokens of their multiplicity m: the mean over trained tokens (with hard_dedup credit,
              where m = 1, over unique ones)
    rollouts  sum of leaf weights. With ratio="action" this is the 1/G of PivotRL, Eq. 7. With ratio="token" it
              needs credit made `per_rollout` (each leaf's weight over its length: Z_i = sum of w times length_i),
              which gives GRPO's mean over rollouts of token means
    constant  a given number, so that a tree's gradient does not depend on what else is in the batch; what Dr. GRPO
              and path-weighted credit need (whose sums come out on the scale of the number of starts)

KL estimators differ in the expectation of their *gradient*, with d = log pi - log ref at a token drawn
from pi (tokens drawn from pi_old are weighted by r, without gradient):
    k2    d^2 / 2              the gradient of KL(pi || ref)
    k3    exp(-d) - 1 + d      its *value* estimates KL(pi || ref), its gradient is that of KL(ref || pi), which pulls
                               towards covering the reference (GRPO's and verl's low_var_kl)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from turntree.core.cost import Additive
from turntree.core.errors import ConfigError
from turntree.pack.packing import PackedBatch, PackingStats
from turntree.train.loss_config import LossConfig
from turntree.train.ranks import SINGLE, ProcessGroup


@dataclass(frozen=True, kw_only=True)
class LossSums(Additive):
    """Additive parts of the logged metrics, detached; sums over the batches of a window are exact."""

    loss: float = 0.0
    multiplicity: float = 0.0  # sum of m over terms: the weight of the two means below
    kl: float = 0.0
    entropy: float = 0.0
    zero_variance_multiplicity: float = 0.0
    ratio: float = 0.0
    ratio_weight: float = 0.0  # sum of m over ratios (terms or actions)
    ratio_max: float = 0.0
    push: float = 0.0  # sum of P + |N| over ratios
    clipped_push: float = 0.0  # the part of it that has no gradient
    importance: float = 0.0  # sum of m times the truncated importance weight
    truncated: float = 0.0  # the part of `ratio_weight` whose importance weight was cut

    def __add__(self, other: Self) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        return dataclasses.replace(super().__add__(other), ratio_max=max(self.ratio_max, other.ratio_max))

    def metrics(self) -> dict[str, float]:
        """Means weighted by multiplicity, so that packed and flat batches report the same numbers.

        `clip_fraction` is the share of advantage mass without gradient; `importance_truncated` that of the ratios whose
        importance weight was truncated at the cap; `dilution` the share of the trained tokens in zero-variance trees.
        """
        weight = max(self.multiplicity, 1e-30)
        return {
            "loss": self.loss,
            "kl": self.kl / weight,
            "entropy": self.entropy / weight,
            "ratio_mean": self.ratio / max(self.ratio_weight, 1e-30),
            "ratio_max": self.ratio_max,
            "clip_fraction": self.clipped_push / self.push if self.push else 0.0,
            "importance_mean": self.importance / max(self.ratio_weight, 1e-30),
            "importance_truncated": self.truncated / max(self.ratio_weight, 1e-30),
            "dilution": self.zero_variance_multiplicity / weight,
        }


def loss_normalizer(batches: Sequence[PackedBatch], config: LossConfig, group: ProcessGroup = SINGLE) -> float:
    """Z over the whole accumulation window of all ranks (`LossConfig.divisor`)."""
    stats = window_stats(batches, group)
    terms = sum(group.collect(sum(float(batch.multiplicity_A[batch.action_T].sum()) for batch in batches)))
    return config.divisor(terms, rollout_tokens=stats.rollout_tokens, rollouts=stats.rollouts)


def window_stats(batches: Sequence[PackedBatch], group: ProcessGroup = SINGLE) -> PackingStats:
    """The counts of all batches of all ranks."""
    return sum(group.collect(sum((batch.stats for batch in batches), PackingStats())), PackingStats())


def policy_loss(
    policy_logprobs_S: Tensor,
    batch: PackedBatch,
    config: LossConfig,
    *,
    normalizer: float,
    entropies_S: Tensor | None = None,
) -> tuple[Tensor, LossSums]:
    """The loss of one batch (a scalar with gradient) and its metric sums. `batch.reference_logprobs_S` is not read at
    kl_coefficient 0."""
    policy_T = policy_logprobs_S[batch.slot_T]
    multiplicity_T = batch.multiplicity_A.to(policy_T)[batch.action_T]
    old_T = policy_T.detach() if batch.old_logprobs_T is None else batch.old_logprobs_T
    log_ratio_T = policy_T - old_T.to(policy_T)
    surrogate, sums = _surrogate(log_ratio_T, old_T - batch.sampling_logprobs_T, batch, config)
    loss = -surrogate / normalizer
    if config.kl_coefficient > 0:
        if batch.reference_logprobs_S is None:
            hint = "pass one, or set it to 0"
            raise ConfigError("a KL term needs a reference policy", field="kl_coefficient", hint=hint)
        reference_T = batch.reference_logprobs_S.to(policy_T)[batch.slot_T]
        kl_T = probability_ratio(log_ratio_T.detach()) * kl_estimates(policy_T, reference_T, config.kl)
        loss = loss + config.kl_coefficient * (multiplicity_T * kl_T).sum() / normalizer
        sums = dataclasses.replace(sums, kl=float((multiplicity_T * kl_T.detach()).sum()))
    if entropies_S is not None:
        sums = dataclasses.replace(sums, entropy=float((multiplicity_T * entropies_S[batch.slot_T]).sum()))
    return loss, dataclasses.replace(sums, loss=float(loss.detach()))


def kl_estimates(policy_T: Tensor, reference_T: Tensor, kind: Literal["k2", "k3"]) -> Tensor:
    """The estimator of KL(pi || ref) at each sampled token, [T], from log-probabilities; see the module docstring for
    what its gradient is."""
    distance_T = policy_T - reference_T
    if kind == "k2":
        return 0.5 * distance_T**2
    away_T, tail_T = -distance_T, probability_ratio(-distance_T) - 1  # exact near 0, and finite far from it
    return torch.where(away_T < 1, torch.expm1(away_T.clamp(max=1)), tail_T) + distance_T


def probability_ratio(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), kept finite: beyond the fourth root of the largest float (e^22 in float32) it continues along its
    tangent.

    A completion of 200 tokens reaches a log ratio of 100, where exp is infinite, and infinity times an advantage of
    zero, or times the zero gradient of a clipped ratio, is NaN. The fourth root leaves room for squaring in a norm.
    """
    bound = math.log(torch.finfo(log_ratio.dtype).max) / 4
    return log_ratio.clamp(max=bound).exp() * (1 + torch.relu(log_ratio - bound))


def _surrogate(log_ratio_T: Tensor, drift_T: Tensor, batch: PackedBatch, config: LossConfig) -> tuple[Tensor, LossSums]:
    """sum w [P min(r, 1+hi) + N max(r, 1-lo)], over terms or over actions (R stands for either). `drift_T` is
    log w before truncation: by how much the engine's log-probabilities are below pi_old's."""
    drift_T = drift_T.to(log_ratio_T)
    if config.ratio == "action":
        zeros_A = log_ratio_T.new_zeros(len(batch.positive_A))
        log_ratio_R = zeros_A.index_add(0, batch.action_T, log_ratio_T)
        drift_R = zeros_A.index_add(0, batch.action_T, drift_T)
        owner_R = torch.arange(len(zeros_A), device=zeros_A.device)
    else:
        log_ratio_R, drift_R, owner_R = log_ratio_T, drift_T, batch.action_T
    positive_R, negative_R = (x.to(log_ratio_R)[owner_R] for x in (batch.positive_A, batch.negative_A))
    weight_R = drift_R.clamp(max=math.log(config.importance_cap)).exp()
    ratio_R = probability_ratio(log_ratio_R)
    raised_R = ratio_R.clamp(max=1 + config.clip_high)
    lowered_R = ratio_R.clamp(min=1 - config.clip_low)
    surrogate = (weight_R * (positive_R * raised_R + negative_R * lowered_R)).sum()
    multiplicity_T = batch.multiplicity_A[batch.action_T]
    with torch.no_grad():
        multiplicity_R = batch.multiplicity_A[owner_R]
        clipped = (positive_R * (raised_R != ratio_R)).sum() - (negative_R * (lowered_R != ratio_R)).sum()
        sums = LossSums(
            multiplicity=float(multiplicity_T.sum()),
            zero_variance_multiplicity=float(multiplicity_T[batch.zero_variance_A[batch.action_T]].sum()),
            ratio=float((multiplicity_R * ratio_R).sum()),
            ratio_weight=float(multiplicity_R.sum()),
            ratio_max=float((ratio_R * (multiplicity_R > 0)).max()),
            push=float((positive_R - negative_R).sum()),
            clipped_push=float(clipped),
            importance=float((multiplicity_R * weight_R).sum()),
            truncated=float(multiplicity_R[drift_R > math.log(config.importance_cap)].sum()),
        )
    return surrogate, sums
