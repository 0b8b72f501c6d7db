"""The credit of a run as plain values, and the estimator made from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from turntree.core.errors import ConfigError
from turntree.credit.comparisons import (
    AcrossAnchors,
    Advantages,
    Comparison,
    across_leaves,
    across_siblings,
    across_starts,
    grpo_advantages,
    mean_centred,
    rloo,
    within_and_across_trees,
)
from turntree.credit.credit import Attribution, CreditRule, hard, hard_dedup, soft
from turntree.credit.scored import LeafWeights, path_weighted, unit_weights

ADVANTAGES: dict[str, Advantages] = {
    "grpo": grpo_advantages,
    "dr_grpo": mean_centred,
    "mean_centred": mean_centred,
    "rloo": rloo,
}
ATTRIBUTIONS: dict[str, Attribution] = {"soft": soft, "hard": hard, "hard_dedup": hard_dedup}
LEAF_WEIGHTS: dict[str, LeafWeights] = {"unit": unit_weights, "path_weighted": path_weighted}

Normalizer = Literal["tokens", "rollouts", "constant"]


@dataclass(frozen=True, kw_only=True)
class CreditConfig:
    """Which estimator labels the nodes; the default is plain GRPO. docs/design/credit.md tells them apart.

    `dr_grpo` is `mean_centred` with a constant normaliser. Raises `ConfigError` for combinations that are biased or
    degenerate; `rule` does so for combinations of credit and loss.
    """

    advantages: Literal["grpo", "dr_grpo", "mean_centred", "rloo"] = "grpo"
    """Standardised in the group (GRPO), centred, or against the others' mean (RLOO)."""
    comparison: Literal["leaves", "starts", "siblings", "trees", "anchors"] = "leaves"
    """What a reward is compared with: every leaf (GRPO), the initial starts, siblings, Tree-GRPO's trees, GiGPO's
    anchor states."""
    leaf_weights: Literal["unit", "path_weighted"] = "unit"
    """Every leaf counts once, or by its path weight."""
    attribution: Literal["soft", "hard", "hard_dedup"] = "soft"
    """How the leaves below a node become its three numbers."""
    anchor_weight: float = 1.0
    """GiGPO's omega."""
    anchor_discount: float = 0.95
    """GiGPO's gamma."""

    def __post_init__(self) -> None:
        if self.leaf_weights == "path_weighted" and self.comparison not in ("starts", "siblings"):
            raise ConfigError(
                f"{self.comparison!r} lets forked siblings and refills into the baseline, which biases path weights",
                field="comparison",
                hint="use 'starts' or 'siblings' with leaf_weights 'path_weighted'",
            )
        if self.leaf_weights == "path_weighted" and self.attribution == "hard_dedup":
            raise ConfigError(
                "counts every node once and so discards path weights", field="attribution", hint="use 'soft' or 'hard'"
            )
        if self.comparison == "siblings" and self.advantages == "grpo":
            raise ConfigError(
                "the standard deviation of two siblings makes every difference +-1",
                field="advantages",
                hint="use 'mean_centred' or 'rloo' with comparison 'siblings'",
            )
        if not self.anchor_weight >= 0:
            raise ConfigError("must be at least 0", field="anchor_weight")
        if not 0 < self.anchor_discount <= 1:
            raise ConfigError("is outside (0, 1]", field="anchor_discount")
        if self.comparison != "anchors":
            for name in ("anchor_weight", "anchor_discount"):
                if getattr(self, name) != getattr(type(self), name):
                    hint = "set comparison to 'anchors', or leave it out"
                    raise ConfigError(f"has no effect with comparison {self.comparison!r}", field=name, hint=hint)

    def rule(self, normalizer: Normalizer, *, per_rollout: bool) -> CreditRule:
        """The estimator for a loss with this normaliser; `per_rollout` as in `CreditRule`."""
        if self.leaf_weights == "path_weighted" and normalizer != "constant":
            raise ConfigError(
                f"{normalizer!r} divides by the realised sum of path weights, which depends on outcomes",
                field="loss.normalizer",
                hint="use normalizer 'constant' with leaf_weights 'path_weighted'",
            )
        if self.advantages == "dr_grpo" and normalizer != "constant":
            raise ConfigError(
                f"{normalizer!r} brings back the length bias that Dr. GRPO removes",
                field="loss.normalizer",
                hint="use normalizer 'constant' with advantages 'dr_grpo', or advantages 'mean_centred'",
            )
        if self.attribution == "hard_dedup" and normalizer == "rollouts":
            raise ConfigError(
                "'rollouts' counts rollouts, and hard_dedup counts nodes",
                field="loss.normalizer",
                hint="use normalizer 'tokens' or 'constant' with attribution 'hard_dedup'",
            )
        return CreditRule(
            advantages=ADVANTAGES[self.advantages],
            comparison=self._comparison(),
            leaf_weights=LEAF_WEIGHTS[self.leaf_weights],
            attribution=ATTRIBUTIONS[self.attribution],
            per_rollout=per_rollout,
        )

    def _comparison(self) -> Comparison:
        match self.comparison:
            case "leaves":
                return across_leaves
            case "starts":
                return across_starts
            case "siblings":
                return across_siblings
            case "trees":
                return within_and_across_trees
            case "anchors":
                return AcrossAnchors(step_weight=self.anchor_weight, discount=self.anchor_discount)
