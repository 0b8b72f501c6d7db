"""Group-relative advantages: how much better than its siblings a rollout was."""

from __future__ import annotations

import math
from collections.abc import Sequence

from turntree.core.outcome import is_zero_variance


def grpo_advantages(rewards: Sequence[float], *, eps: float = 1e-6) -> list[float]:
    """(r_i - mean) / (std + eps) over one group, with the population standard deviation (PivotRL, Eq. 1).

    `rewards` are those of the scored rollouts only: a censored one takes part in neither mean nor deviation. All
    zeros where the rewards are equal. With the population deviation the rarest success has the largest advantage; with
    leave-one-out deviations a lone success of 16 would get 1.00, one of two successes 3.62.

    >>> [round(a, 3) for a in grpo_advantages([1.0, 0.0, 0.0, 0.0])]
    [1.732, -0.577, -0.577, -0.577]
    """
    if not rewards or is_zero_variance(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    return [(reward - mean) / (std + eps) for reward in rewards]
