"""Spearman's rank correlation, None where one side is constant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr


def spearman(first: Sequence[float] | NDArray[Any], second: Sequence[float] | NDArray[Any]) -> float | None:
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return float(spearmanr(first, second).statistic)
