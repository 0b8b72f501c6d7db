"""The classes of a candidate, from the rewards of its rollouts (PivotRL, Eq. 4 and 5)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

from turntree.core.outcome import is_zero_variance


class Class(StrEnum):
    """The classes partition the candidates."""

    PIVOT = "pivot"  # mixed rewards, mean below lambda
    EASY = "mixed but easy"  # mixed rewards, mean of at least lambda
    SUCCEED = "all succeed"  # the same reward above zero everywhere
    FAIL = "all fail"
    UNJUDGED = "unjudged"


def moments(rewards: Sequence[float]) -> tuple[float, float] | None:
    """Mean and population variance (Eq. 4) of judged rewards; None without any. Equal rewards have variance 0 exactly,
    whatever their sum rounds to."""
    if not rewards:
        return None
    mean = math.fsum(rewards) / len(rewards)
    if is_zero_variance(rewards):
        return mean, 0.0
    return mean, math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)


def class_of(rewards: Sequence[float], threshold: float) -> Class:
    """The class of a candidate with these judged rewards at lambda = `threshold` (Eq. 5)."""
    return class_of_moments(moments(rewards), threshold)


def class_of_moments(mean_and_variance: tuple[float, float] | None, threshold: float) -> Class:
    if mean_and_variance is None:
        return Class.UNJUDGED
    mean, variance = mean_and_variance
    if variance == 0:
        return Class.SUCCEED if mean > 0 else Class.FAIL
    return Class.PIVOT if mean < threshold else Class.EASY
