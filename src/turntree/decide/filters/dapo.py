"""After the rollouts: a finished group whose rewards are all equal stays out of the update (DAPO, section 3.2).

The filter saves training, not rollouts. DAPO adds groups until the batch is full ("dynamic sampling"), which costs
rollouts; here this refill has a cap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from turntree.core.config import Amount, Bounded
from turntree.core.outcome import SUCCESS_REWARD, GroupOutcome, group_outcome
from turntree.core.protocols import Filter, FinishedGroup


@dataclass(frozen=True, kw_only=True)
class DapoFilter(Bounded, Filter):
    """Groups without reward variance stay out of the update."""

    success: float = SUCCESS_REWARD
    """A reward from this on is a success."""
    refill_cap: Amount = 0.0
    """An update may start this many times its batch in further groups, rounded up (0: no refill)."""

    def drop(self, group: FinishedGroup) -> str | None:
        """Decide by the credit of the update: under path weights refills do not count, so a group whose rewards differ
        only in refills has no gradient, and none where faults left one start to compare starts with."""
        credit = group.credit
        if credit is None or credit.teaches:
            return None
        outcome = group_outcome(group.rewards, success=self.success)
        return "no difference among rewards that count" if outcome is GroupOutcome.MIXED else outcome.value


def refill(cap: float, *, wanted: int, kept: int, started: int) -> int:
    """How many more groups to start for a batch of `wanted`, where `kept` of the `started` were not dropped."""
    return max(0, min(wanted - kept, allowed(cap, wanted=wanted, started=started)))


def allowed(cap: float, *, wanted: int, started: int) -> int:
    """How many further groups the cap leaves for a batch of `wanted` groups after `started`."""
    return wanted + math.ceil(cap * wanted - 1e-9) - started  # 0.07 * 100 is a little more than 7
