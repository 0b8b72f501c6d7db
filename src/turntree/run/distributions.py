"""The binomial and Student's distribution, as far as intervals and stopping rules need them: SciPy would be more than
half of an installation. Tests compare them with SciPy's."""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import ArrayLike, NDArray


def binomial(successes: ArrayLike, trials: ArrayLike, share: ArrayLike) -> NDArray[np.float64]:
    """P(X = `successes`) of `trials` draws with chance `share`; the arguments broadcast. Counts from 0, in range."""
    won, all_of, chance = np.asarray(successes), np.asarray(trials), np.asarray(share, dtype=float)
    ways = _log_factorials(int(all_of.max(initial=0)).bit_length())
    with np.errstate(divide="ignore", invalid="ignore"):
        hit = np.where(won == 0, 0.0, won * np.log(chance))  # nothing to the power of nothing is one
        missed = np.where(all_of == won, 0.0, (all_of - won) * np.log1p(-chance))
    return np.exp(ways[all_of] - ways[won] - ways[all_of - won] + hit + missed)


@functools.cache
def _log_factorials(bits: int) -> NDArray[np.float64]:
    return np.array([math.lgamma(number + 1) for number in range(1 << bits)])


def at_least(successes: int, trials: int, share: float) -> float:
    """P(X >= `successes`) of `trials` draws with chance `share`."""
    return float(binomial(np.arange(successes, trials + 1), trials, share).sum())


@functools.lru_cache(maxsize=4096)
def share_of_tail(successes: int, trials: int, tail: float) -> float:
    """The chance at which `successes` or more of `trials` have the probability `tail`: the quantile of the distribution
    Beta(successes, trials - successes + 1)."""
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        low, high = (low, middle) if at_least(successes, trials, middle) > tail else (middle, high)
    return middle


@functools.lru_cache(maxsize=1024)
def student(below: float, free: int) -> float:
    """The quantile of Student's distribution with a whole number of degrees of freedom, by its finite sums (Abramowitz
    and Stegun 26.7.3, 26.7.4). `below`: the probability below it, at least 0.5."""
    odd = free % 2
    steps = np.arange(1, (free - odd) // 2)
    factors = np.concatenate([[1.0], np.cumprod((2 * steps - 1 + odd) / (2 * steps + odd))])[
        : max(0, (free - odd) // 2)
    ]
    powers = 2 * np.arange(len(factors)) + odd

    def within(angle: float) -> float:
        summed = math.sin(angle) * float((factors * math.cos(angle) ** powers).sum())
        return 2 / math.pi * (angle + summed) if odd else summed

    low, high = 0.0, math.pi / 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if within(middle) < 2 * below - 1 else (low, middle)
    return math.sqrt(free) * math.tan((low + high) / 2)
