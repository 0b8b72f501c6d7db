"""Intervals for shares and for paired differences, rank statistics, and the bootstrap over tasks."""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Z95 = 1.959963984540054


def wilson(successes: float, trials: float, z: float = Z95) -> tuple[float, float]:
    """Wilson score interval of a share (Wilson 1927), as (low, high); (0, 1) without trials.

    Weighted trials may be given as their effective number, (sum w)^2 / sum w^2 (Kish).

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


def clopper_pearson_low(successes: int, trials: int, confidence: float = 0.95) -> float:
    """One-sided exact lower bound of a share (Clopper and Pearson 1934): 0 without a success.

    >>> round(clopper_pearson_low(14, 14), 3), round(clopper_pearson_low(17, 21), 3)
    (0.807, 0.616)
    """
    from scipy.special import betaincinv

    return 0.0 if successes == 0 else float(betaincinv(successes, trials - successes + 1, 1 - confidence))


def clopper_pearson_high(successes: int, trials: int, confidence: float = 0.95) -> float:
    """One-sided exact upper bound of a share: 1 without a failure."""
    return 1.0 - clopper_pearson_low(trials - successes, trials, confidence)


def successes_needed(trials: int, floor: float, confidence: float = 0.95) -> NDArray[np.int64]:
    """For 0 to `trials` trials, the fewest successes whose Clopper-Pearson lower bound is at least `floor`.

    Above the number of trials itself where even successes alone do not suffice.
    """
    from scipy.stats import binom

    counts = np.arange(trials + 1)
    return np.asarray(binom.isf(1 - confidence, counts, floor), dtype=np.int64) + 1


def auroc(scores: Sequence[float] | NDArray[Any], positive: Sequence[bool] | NDArray[Any]) -> float | None:
    """Chance that a positive scores higher than a negative, ties counting half; None where one class is empty.

    >>> auroc([0.1, 0.4, 0.4, 0.9], [False, False, True, True])
    0.875
    """
    from scipy.stats import rankdata

    labels = np.asarray(positive, dtype=bool)
    ones, zeros = int(labels.sum()), int((~labels).sum())
    if not ones or not zeros:
        return None
    return float((rankdata(scores)[labels].sum() - ones * (ones + 1) / 2) / (ones * zeros))


def spearman(first: Sequence[float] | NDArray[Any], second: Sequence[float] | NDArray[Any]) -> float | None:
    """Spearman's rank correlation (ties share their mean rank); None where one side is constant."""
    from scipy.stats import rankdata

    ranks = [rankdata(values) for values in (first, second)]
    if any(np.ptp(rank) == 0 for rank in ranks):
        return None
    return float(np.corrcoef(*ranks)[0, 1])


def resampled(clusters: Sequence[Hashable], *, resamples: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Row indices of bootstrap samples that draw whole clusters: rows of one task are not independent."""
    members: dict[Hashable, list[int]] = {}
    for row, cluster in enumerate(clusters):
        members.setdefault(cluster, []).append(row)
    rows = [np.array(each) for each in members.values()]
    generator = np.random.default_rng(seed)
    for _ in range(resamples):
        yield np.concatenate([rows[drawn] for drawn in generator.integers(len(rows), size=len(rows))])


def percentile_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """The percentile interval of bootstrap values, as (low, high); None without values."""
    if not values:
        return None
    low, high = np.quantile(np.asarray(values), [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def mcnemar(only_first: int, only_second: int) -> float:
    """Exact two-sided p-value of McNemar's test: tasks that only the first solved against those only the second did.

    >>> round(mcnemar(9, 2), 4)
    0.0654
    """
    from scipy.stats import binomtest

    discordant = only_first + only_second
    return float(binomtest(only_first, discordant).pvalue) if discordant else 1.0
