"""After the rollouts: a finished group whose rewards are all equal stays out of the update (DAPO, section 3.2).

The filter saves training, not rollouts. DAPO adds groups until the batch is full ("dynamic sampling"), which costs
rollouts; here this refill has a cap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from turntree.core.errors import ConfigError
from turntree.core.outcome import SUCCESS_REWARD, GroupOutcome, group_outcome
from turntree.core.protocols import Filter, FinishedGroup


@dataclass(frozen=True)
class FilterDecision:
    """`reason` is the outcome of the group in the words of `GroupOutcome`."""

    keep: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class DapoFilter(Filter):
    """Groups without reward variance stay out of the update."""

    success: float = SUCCESS_REWARD
    """A reward from this on is a success."""
    refill_cap: float = 0.0
    """An update may start this many times its batch in further groups, rounded up (0: no refill)."""

    def __post_init__(self) -> None:
        if self.refill_cap < 0:
            raise ConfigError("is negative", field="refill_cap", hint="0 switches the refill off")

    def judge(self, rewards: Sequence[float | None]) -> FilterDecision:
        """Keep a group with different rewards. None is a censored rollout; a group with fewer than two scored ones
        is dropped as censored, not as zero-variance."""
        outcome = group_outcome(rewards, success=self.success)
        return FilterDecision(outcome is GroupOutcome.MIXED, outcome.value)

    def drop(self, group: FinishedGroup) -> str | None:
        """Decide by the credit of the update: under path weights refills do not count, so a group whose rewards differ
        only in refills has no gradient, and none where faults left one start to compare starts with."""
        credit = group.credit
        if credit is None:
            return None
        if not credit.zero_variance and any(one.positive or one.negative for one in credit.nodes.values()):
            return None
        decision = self.judge(group.rewards)
        return "no difference among rewards that count" if decision.keep else decision.reason


def refill(cap: float, *, wanted: int, kept: int, started: int) -> int:
    """How many more groups to start for a batch of `wanted` groups, of which `kept` stay after `started`."""
    return max(0, min(wanted - kept, allowed(cap, wanted=wanted, started=started)))


def allowed(cap: float, *, wanted: int, started: int) -> int:
    """How many further groups the cap leaves for a batch of `wanted` groups after `started`."""
    return wanted + math.ceil(cap * wanted - 1e-9) - started  # 0.29 * 100 is a little less than 29
