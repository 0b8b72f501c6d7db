"""What an estimator of one's own says, checked before anything is trained with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from turntree.core.errors import ConfigError
from turntree.core.foreign import call_part
from turntree.core.labels import Credit, Rewards
from turntree.core.protocols import Estimator
from turntree.core.tree import RolloutTree


def credit_of(estimator: Estimator, tree: RolloutTree, rewards: Rewards) -> Credit:
    """What an estimator says of a tree. Raises `ConfigError` for what is no credit, or has no finite numbers: nothing
    would be trained with it, or nothing would be left of the policy."""
    credit: Any = call_part("estimator", estimator, tree, rewards)
    if not isinstance(credit, Credit):
        hint = "return a turntree.Credit"
        raise ConfigError(f"gave {type(credit).__name__} instead of a credit", field="estimator", hint=hint)
    for node, one in credit.nodes.items():
        try:
            wrong = not math.isfinite(one.positive + one.negative + one.multiplicity)
        except TypeError:
            wrong = True
        if wrong:
            raise ConfigError(f"gave node {node} of {tree.task_id!r} the credit {one}", field="estimator")
    return credit


def over_batch(estimator: Estimator, batch: Sequence[Rewards]) -> Estimator:
    """The estimator for the groups of a batch: the same, but for one that compares over it (`CreditRule.over`)."""
    over = getattr(estimator, "over", None)
    return estimator if over is None else call_part("estimator", over, batch)
