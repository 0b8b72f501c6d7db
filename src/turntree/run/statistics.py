"""Intervals for shares, means and paired differences, and the bootstrap over tasks.

The unit of every interval is what was drawn independently: tasks for a claim about these policies on other tasks, seeds
and tasks for a claim about training. Coverage is simulated in tests/run/test_coverage.py.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from turntree.run.distributions import binomial, share_of_tail, student
from turntree.run.means import Z95, wilson


def clustered_wilson(successes: Sequence[float], trials: Sequence[float]) -> tuple[float, float]:
    """Wilson's interval of a share whose trials come in clusters (episodes of one task), as (low, high).

    `successes` and `trials` are counts per cluster. The effective number of trials is p (1 - p) over the variance of
    the share between clusters (Kish's design effect, linearised where clusters differ in size), and at most their
    number. Equal clusters show no variance; each of them then counts as one trial.
    """
    won, played = np.asarray(successes, dtype=float), np.asarray(trials, dtype=float)
    won, played = won[played > 0], played[played > 0]
    clusters = len(played)
    if clusters < 2:
        return wilson(float(won.sum() / played.sum()), 1) if clusters else (0.0, 1.0)
    share = float(won.sum() / played.sum())
    residual = float(((won - share * played) ** 2).sum())
    variance = clusters / (clusters - 1) * residual / float(played.sum()) ** 2
    effective = min(share * (1 - share) / variance, float(played.sum())) if variance > 0 else clusters
    return wilson(share * effective, effective, student(0.975, clusters - 1))


def ratio_interval(parts: NDArray[Any], wholes: NDArray[Any], clusters: NDArray[np.int64]) -> list[float] | None:
    """The 95% interval of sum(parts) / sum(wholes), each within [0, whole], over other clusters: linearised (Cochran
    1977, 6.3), with Student's quantile. Equal ratios have no spread: the interval then has room for clusters that may
    not have been seen, as in `paired_bootstrap`. Cluster numbers begin at 0. None for a single cluster or wholes of
    nothing."""
    count, total = int(clusters.max(initial=-1)) + 1, float(wholes.sum())
    if count < 2 or total <= 0:
        return None
    ratio = float(parts.sum()) / total
    residuals = np.bincount(clusters, weights=parts - ratio * wholes, minlength=count)
    if np.abs(residuals).max() <= 1e-12 * total:
        unseen = clopper_pearson_high(0, count, 0.975)
        return [ratio - unseen * ratio, ratio + unseen * (1 - ratio)]
    half = student(0.975, count - 1) * math.sqrt(count / (count - 1) * float((residuals**2).sum())) / total
    return [max(0.0, ratio - half), min(1.0, ratio + half)]


class Interval(NamedTuple):
    """A mean with its 95% interval, and the effect that a two-sided test at 5% detects with 80% power. The last three
    are None for a single value, which has no spread."""

    mean: float
    low: float | None
    high: float | None
    detectable: float | None


def t_interval(values: Sequence[float] | NDArray[Any]) -> Interval:
    """Student's interval of the mean of independent values.

    >>> print([round(edge, 3) for edge in t_interval([1.0, 2.0, 3.0])])
    [2.0, -0.484, 4.484, 3.097]
    """
    found = np.asarray(values, dtype=float)
    if len(found) < 2:
        return Interval(float(found.mean()), None, None, None)
    return _interval(float(found.mean()), (float(found.var(ddof=1)) / len(found), len(found) - 1))


def crossed_interval(values_ST: Sequence[Sequence[float]] | NDArray[Any]) -> Interval:
    """The mean over S seeds, all measured on the same T tasks, with an interval that covers other seeds and other
    tasks.

    From the two-way analysis of variance: Student's interval over seeds, widened by the variance between tasks. Their
    variance is the excess of the mean square of tasks over the residual one. With one seed there is no interval.
    """
    values = np.asarray(values_ST, dtype=float)
    seeds, tasks = values.shape
    middle, by_seed, by_task = float(values.mean()), values.mean(axis=1), values.mean(axis=0)
    if seeds < 2 or tasks < 2:
        return t_interval(by_seed)
    residual = values - by_seed[:, None] - by_task[None, :] + middle
    error = float((residual**2).sum()) / ((seeds - 1) * (tasks - 1)) / (seeds * tasks)
    of_tasks = max(0.0, float(by_task.var(ddof=1)) / tasks - error)
    return _interval(middle, (float(by_seed.var(ddof=1)) / seeds, seeds - 1), (of_tasks, tasks - 1))


def _interval(mean: float, *parts: tuple[float, int]) -> Interval:
    """The interval from independent parts of the mean's variance with their degrees of freedom."""
    quantiles = [(variance, student(0.975, free), student(0.8, free)) for variance, free in parts]
    half = math.sqrt(sum(variance * edge**2 for variance, edge, _ in quantiles))
    detectable = math.sqrt(sum(variance * (edge + power) ** 2 for variance, edge, power in quantiles))
    return Interval(mean, mean - half, mean + half, detectable)


def sign_flip(differences: Sequence[float] | NDArray[Any], *, seed: int = 0, resamples: int = 4000) -> float:
    """Two-sided p-value of a mean difference of zero: the signs of the tasks' differences are flipped at random.

    One difference per task, averaged over its seeds, because outcomes of one task under several seeds are not
    independent.
    """
    values = np.asarray(differences, dtype=float)
    signs = np.random.default_rng(seed).integers(0, 2, size=(resamples, len(values))) * 2.0 - 1
    as_far = np.abs(signs @ values) >= abs(values.sum()) - 1e-9 * len(values)
    return float((1 + as_far.sum()) / (1 + resamples))


def paired_bootstrap(
    first: Sequence[float], second: Sequence[float], *, seed: int = 0, resamples: int = 4000
) -> tuple[float, float, float]:
    """Mean of `first - second` over pairs of values in [0, 1] with its 95% percentile interval: (mean, low, high).

    Pairs are resampled together, so what makes a task hard for both cancels out. The interval is widened by what a
    bootstrap leaves out with few pairs (after Hesterberg's expanded percentile interval, 2015: 1.9 times at four pairs,
    1.01 at 200). Equal differences cannot be resampled: the interval then has room for the share of other tasks that
    may not have been seen (Clopper and Pearson's bound), all with the worst or all with the best difference.
    """
    if len(first) != len(second) or not first:
        raise ValueError(f"pairs needed, got {len(first)} and {len(second)} values")
    differences = [a - b for a, b in zip(first, second, strict=True)]
    count = len(differences)
    if min(differences) == max(differences):
        mean, unseen = differences[0], clopper_pearson_high(0, count, 0.975)
        return mean, mean - unseen * (mean + 1), mean + unseen * (1 - mean)
    rng = random.Random(seed)
    means = sorted(math.fsum(rng.choices(differences, k=count)) / count for _ in range(resamples))
    mean = math.fsum(differences) / count
    # Student's quantile for the normal one, and the unbiased variance for the plain one
    wider = math.sqrt(count / (count - 1)) * student(0.975, count - 1) / Z95
    low, high = means[int(0.025 * resamples)], means[min(resamples - 1, int(0.975 * resamples))]
    return mean, max(-1.0, mean + wider * (low - mean)), min(1.0, mean + wider * (high - mean))


def clopper_pearson_low(successes: int, trials: int, confidence: float = 0.95) -> float:
    """One-sided exact lower bound of a share (Clopper and Pearson 1934): 0 without a success.

    >>> round(clopper_pearson_low(14, 14), 3), round(clopper_pearson_low(17, 21), 3)
    (0.807, 0.616)
    """
    return 0.0 if successes == 0 else share_of_tail(int(successes), int(trials), 1 - confidence)


def clopper_pearson_high(successes: int, trials: int, confidence: float = 0.95) -> float:
    """One-sided exact upper bound of a share: 1 without a failure."""
    return 1.0 - clopper_pearson_low(trials - successes, trials, confidence)


def successes_needed(trials: int, floor: float, confidence: float = 0.95) -> NDArray[np.int64]:
    """For 0 to `trials` trials, the fewest successes whose Clopper-Pearson lower bound is at least `floor`.

    The entry is above the number of trials where even successes alone do not suffice.
    """
    needed, tail = [1], 0.0  # P(X >= needed) of so many trials
    for count in range(trials):
        least = needed[-1]
        tail += floor * float(binomial(least - 1, count, floor)) if least - 1 <= count else 0.0
        if tail > 1 - confidence:
            tail -= float(binomial(least, count + 1, floor))
            least += 1
        needed.append(least)
    return np.array(needed, dtype=np.int64)
