"""What an estimator of one's own says, checked before anything is trained with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from turntree.core import scalars
from turntree.core.errors import ConfigError
from turntree.core.foreign import call_part
from turntree.core.labels import Credit, NodeCredit, Rewards
from turntree.core.protocols import Estimator
from turntree.core.tree import RolloutTree

_TOTALS = ("rollout_tokens", "rollouts", "redistributed")


def credit_of(estimator: Estimator, tree: RolloutTree, rewards: Rewards) -> Credit:
    """What an estimator says of a tree. Raises `ConfigError` for what is no credit, or has no finite numbers: nothing
    would be trained with it, or nothing would be left of the policy."""
    credit: Any = call_part("estimator", estimator, tree, rewards)
    if not isinstance(credit, Credit):
        hint = "return a turntree.Credit"
        raise ConfigError(f"gave {type(credit).__name__} instead of a credit", field="estimator", hint=hint)
    try:
        plain = {name: scalars.number(getattr(credit, name)) for name in _TOTALS}
        plain["zero_variance"] = scalars.truth(credit.zero_variance)
        nodes = {int(node): NodeCredit(**_numbers(node, one)) for node, one in credit.nodes.items()}
    except ValueError as error:
        raise ConfigError(f"gave a credit of {tree.task_id!r} that is none: {error}", field="estimator") from error
    return replace(credit, nodes=nodes, **plain)


def _numbers(node: int, one: Any) -> dict[str, float]:
    try:
        return {name: scalars.number(getattr(one, name)) for name in ("positive", "negative", "multiplicity")}
    except (AttributeError, ValueError) as error:
        raise ValueError(f"node {node} has {one} ({error})") from error


def over_batch(estimator: Estimator, batch: Sequence[Rewards]) -> Estimator:
    """The estimator for the groups of a batch: the same, but for one that compares over it (`CreditRule.over`)."""
    over = getattr(estimator, "over", None)
    return estimator if over is None else call_part("estimator", over, batch)
