"""The settings of the loss, as plain values: all that the maths of `train.losses` knows of a run's configuration.

The line of text below a field is its documentation: `turntree config` and `--help` show it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from turntree.core.config import FIXED, Above0, Amount, Bounded, Share
from turntree.core.errors import ConfigError, InputError
from turntree.credit.config import CreditConfig, Normalizer
from turntree.credit.credit import CreditRule


@dataclass(frozen=True, kw_only=True)
class LossConfig(Bounded):
    """Defaults: PPO's symmetric clip, token ratios, a light KL pull towards the frozen reference."""

    clip_low: Share = 0.2
    """Ratios below 1 - clip_low of punished tokens have no gradient."""
    clip_high: Amount = 0.2
    """Ratios above 1 + clip_high of rewarded tokens have no gradient; independent of clip_low (DAPO's clip-higher)."""
    ratio: Literal["token", "action"] = "token"
    """The ratio of each token, or the product over one completion (PivotRL, Eq. 8)."""
    kl_coefficient: Amount = 0.01
    """Weight of the KL term towards the starting policy; 0 switches it off."""
    kl: Literal["k2", "k3"] = "k2"
    """The KL estimator (`train.losses` describes their gradients)."""
    normalizer: Normalizer = "tokens"
    """What the loss is divided by: trained tokens, rollouts, or the number `constant`."""
    constant: float | None = None
    """For normalizer "constant": the number of trained tokens that the loss is divided by."""
    old_logprobs: Literal["auto", "trainer", "engine"] = field(default="auto", metadata=FIXED)
    """Source of pi_old: the engine, the trainer before the update, or (auto) the trainer wherever the two can
    differ."""
    importance_cap: Above0 = field(default=2.0, metadata=FIXED)
    """Bounds exp(old - sampling), which is 1 with the engine's log-probabilities."""
    temperature: Above0 = field(default=1.0, metadata=FIXED)
    """The temperature that the engine sampled at. A run fills in that of its sampling."""

    @property
    def per_rollout_credit(self) -> bool:
        """Whether the credit must divide each rollout by its length (`CreditRule.per_rollout`)."""
        return self.normalizer == "rollouts" and self.ratio == "token"

    @property
    def needs_reference_logprobs(self) -> bool:
        """Whether the KL term reads the reference's log-probability of each trained token."""
        return self.kl_coefficient > 0

    def estimator(self, credit: CreditConfig) -> CreditRule:
        """The estimator for this loss. Raises `ConfigError` where the two do not go together."""
        return credit.rule(self.normalizer, per_rollout=self.per_rollout_credit)

    def divisor(self, multiplicity: float, *, rollout_tokens: float, rollouts: float) -> float:
        """Z of a window (`train.losses`), from the sums of m over its trained tokens and of its credits' fields of
        these names. Raises `InputError` where nothing is trained or where the credit was not made for this loss."""
        if multiplicity <= 0:
            raise InputError("the batch holds no trained token", hint="give it at least one tree with a scored rollout")
        sums, means = (abs(multiplicity - x) <= 1e-6 * multiplicity for x in (rollout_tokens, rollouts))
        if self.ratio == "action" and means and not sums:
            raise InputError(
                "credit divided by rollout length does not go with ratio 'action'",
                field="ratio",
                hint="label with LossConfig.estimator, or CreditRule(per_rollout=False)",
            )
        if self.normalizer == "tokens":
            return multiplicity
        if self.normalizer == "constant":
            assert self.constant is not None  # checked when this was made
            return self.constant
        if self.ratio == "token" and not means:
            raise InputError(
                "normalizer 'rollouts' is a mean over rollouts of token means, and this credit sums over tokens",
                field="normalizer",
                hint="label with LossConfig.estimator, or CreditRule(per_rollout=True)",
            )
        return rollouts

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.normalizer == "constant") != (self.constant is not None and 0 < self.constant < math.inf):
            raise ConfigError("goes with normalizer 'constant' and only with it", field="constant", hint="a number > 0")
