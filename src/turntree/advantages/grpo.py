"""Group-relative advantages: how much better than its siblings a rollout was.

Every function here maps the rewards of one group to advantages of the same length, and is all zeros on a group whose
rewards are equal or that has one member only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from turntree.core.outcome import is_zero_variance

Advantages = Callable[[Sequence[float]], list[float]]


def grpo_advantages(rewards: Sequence[float], *, eps: float = 1e-6) -> list[float]:
    """(r_i - mean) / (std + eps) over one group, with the population standard deviation (PivotRL, Eq. 1).

    `rewards` are those of the scored rollouts only: a censored one takes part in neither mean nor deviation. With the
    population deviation the rarest success has the largest advantage. With leave-one-out mean and deviation a lone
    success of 16 would get 1.00 (the 15 others agree, so nothing scales it) and one of two successes 3.62.

    >>> [round(a, 3) for a in grpo_advantages([1.0, 0.0, 0.0, 0.0])]
    [1.732, -0.577, -0.577, -0.577]
    """
    centred = mean_centred(rewards)
    if not any(centred):
        return centred
    std = math.sqrt(math.fsum(a * a for a in centred) / len(rewards))
    return [a / (std + eps) for a in centred]


def mean_centred(rewards: Sequence[float]) -> list[float]:
    """r_i - mean: no division by a deviation, which would weigh tasks by their difficulty (Dr. GRPO).

    On independent rollouts its policy gradient is (G - 1)/G times the true one, in expectation.
    """
    if not rewards or is_zero_variance(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def rloo(rewards: Sequence[float]) -> list[float]:
    """r_i minus the mean of the *others*, which is G/(G - 1) times `mean_centred`: unbiased on independent rollouts.

    >>> rloo([1.0, 0.0, 0.0])
    [1.0, -0.5, -0.5]
    """
    others = max(len(rewards) - 1, 1)
    return [a * len(rewards) / others for a in mean_centred(rewards)]
