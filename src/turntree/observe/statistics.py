"""Intervals for shares and for paired differences."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

Z95 = 1.959963984540054


def wilson(successes: float, trials: int, z: float = Z95) -> tuple[float, float]:
    """Wilson score interval of a share (Wilson 1927), as (low, high); (0, 1) without trials.

    >>> low, high = wilson(8, 10); print(round(low, 3), round(high, 3))
    0.49 0.943
    """
    if trials == 0:
        return 0.0, 1.0
    share = successes / trials
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return max(0.0, centre - half), min(1.0, centre + half)


def paired_bootstrap(
    first: Sequence[float], second: Sequence[float], *, seed: int = 0, resamples: int = 4000
) -> tuple[float, float, float]:
    """Mean of `first - second` over pairs with its 95% percentile interval: (mean, low, high).

    The pairs are resampled together, so whatever makes a task hard for both cancels out.
    """
    if len(first) != len(second) or not first:
        raise ValueError(f"pairs needed, got {len(first)} and {len(second)} values")
    differences = [a - b for a, b in zip(first, second, strict=True)]
    rng = random.Random(seed)
    count = len(differences)
    means = sorted(math.fsum(rng.choices(differences, k=count)) / count for _ in range(resamples))
    low, high = means[int(0.025 * resamples)], means[min(resamples - 1, int(0.975 * resamples))]
    return math.fsum(differences) / count, low, high
