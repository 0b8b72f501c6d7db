"""Means, and Wilson's interval of a share, apart from what needs NumPy: stages are configured without it."""

from __future__ import annotations

import math
from collections.abc import Iterable

Z95 = 1.959963984540054


def mean(values: Iterable[float | None]) -> float | None:
    """Of the known ones; None where there is none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def mean_by_kind(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for kind, value in pairs:
        found.setdefault(kind, []).append(value)
    return {kind: sum(values) / len(values) for kind, values in sorted(found.items())}


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
