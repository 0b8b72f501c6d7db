"""The credit of a run as plain values, the estimator made from them, and those of papers that have no values here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from turntree.core.errors import ConfigError
from turntree.credit.comparisons import (
    AcrossAnchors,
    Advantages,
    BatchStandardised,
    across_leaves,
    across_starts,
    grpo_advantages,
    mean_centred,
    rloo,
)
from turntree.credit.credit import CreditRule, GreedyBaseline, hard, soft
from turntree.credit.scored import path_weighted, unit_weights

ADVANTAGES: dict[str, Advantages] = {
    "grpo": grpo_advantages,
    "dr_grpo": mean_centred,
    "rloo": rloo,
    "reinforce_pp": BatchStandardised(),
    "remax": mean_centred,  # `GreedyBaseline` puts the greedy reward in place of the mean
}

Normalizer = Literal["tokens", "rollouts", "constant"]

# for --estimator turntree.credit.config:NAME
GIGPO = CreditRule(comparison=AcrossAnchors())


@dataclass(frozen=True, kw_only=True)
class CreditConfig:
    """Which estimator labels the nodes; the default is plain GRPO. docs/design/credit.md has further ones, made in
    Python as a `CreditRule`. Combinations of credit and loss that are biased are refused (`refuse_biased`)."""

    advantages: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "remax"] = "grpo"
    """Standardised in the group (GRPO), centred (Dr. GRPO), against the others' mean (RLOO), standardised over the
    batch (REINFORCE++), or against a greedy rollout, the first of every group (ReMax)."""
    comparison: Literal["leaves", "starts"] = "leaves"
    """What a reward is compared with: every leaf (GRPO), or the initial starts."""
    leaf_weights: Literal["unit", "path_weighted"] = "unit"
    """Every leaf counts once, or by its path weight."""
    attribution: Literal["soft", "hard"] = "soft"
    """How the leaves below a node become its three numbers."""

    def __post_init__(self) -> None:
        self.rule("constant", per_rollout=False)  # raises for what goes with no loss

    def rule(self, normalizer: Normalizer, *, per_rollout: bool) -> CreditRule:
        """The estimator for a loss with this normaliser; `per_rollout` as in `CreditRule`."""
        if self.advantages in ("remax", "reinforce_pp") and self.comparison != "leaves":
            hint = f"use 'leaves' with advantages {self.advantages!r}"
            raise ConfigError("has one baseline for all", field="comparison", hint=hint)
        kind = GreedyBaseline if self.advantages == "remax" else CreditRule
        rule = kind(
            advantages=ADVANTAGES[self.advantages],
            comparison=across_leaves if self.comparison == "leaves" else across_starts,
            leaf_weights=unit_weights if self.leaf_weights == "unit" else path_weighted,
            attribution=soft if self.attribution == "soft" else hard,
            per_rollout=per_rollout,
        )
        refuse_biased(rule, normalizer)
        return rule


def refuse_biased(rule: CreditRule, normalizer: Normalizer) -> None:
    """Raise `ConfigError` for an estimator whose credit is biased under a loss with this normaliser, or by itself."""
    by_path = rule.leaf_weights is path_weighted
    if by_path and rule.comparison is across_leaves:
        problem = "'leaves' lets forked siblings and refills into the baseline, which biases path weights"
        raise ConfigError(problem, field="comparison", hint="use 'starts' with leaf_weights 'path_weighted'")
    centred = rule.advantages is mean_centred and not isinstance(rule, GreedyBaseline)
    if normalizer != "constant" and (by_path or centred):
        summed = "divides by the realised sum of path weights, which depends on outcomes"
        why = summed if by_path else "brings back the length bias that Dr. GRPO removes"
        hint = f"use normalizer 'constant' with {'path weights' if by_path else 'centred advantages'}"
        raise ConfigError(f"{normalizer!r} {why}", field="loss.normalizer", hint=hint)
