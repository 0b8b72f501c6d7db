"""What experiments of matched arms have in common: held-out outcomes by task, and paired comparisons of them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turntree.observe.statistics import mcnemar, paired_bootstrap
from turntree.stages.train_online import HELD_OUT


def json_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file; none where it was not written."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def held_out_outcomes(folder: Path) -> dict[str, float]:
    """Success by task at the last check of a run."""
    rows = json_rows(folder / HELD_OUT)
    last = max(row["iteration"] for row in rows)
    return {row["task"]: mean(row["rewards"]) or 0.0 for row in rows if row["iteration"] == last and row["rewards"]}


def paired_outcomes(mine: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The difference in success of two arms on the same tasks, seed by seed.

    `held_out_difference` resamples (seed, task) pairs: it holds for these trained policies. `by_seed` are the
    differences of the seeds, with the t interval of their mean: what another seed may bring.
    """
    by_seed = [[(one[task], two[task]) for task in sorted(two)] for one, two in zip(mine, theirs, strict=True)]
    pairs = [pair for seed in by_seed for pair in seed]
    middle, low, high = paired_bootstrap([a for a, _ in pairs], [b for _, b in pairs])
    spread = math.sqrt(sum((a - b - middle) ** 2 for a, b in pairs) / max(1, len(pairs) - 1))
    return {
        "held_out_difference": {"mean": middle, "low": low, "high": high, "tasks": len(pairs)},
        "by_seed": over_seeds([sum(a - b for a, b in seed) / len(seed) for seed in by_seed]),
        "mcnemar": mcnemar(sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)),
        "minimum_detectable_effect": (1.959964 + 0.841621) * spread / math.sqrt(len(pairs)),
    }


def over_seeds(values: Sequence[float]) -> dict[str, Any]:
    """The mean of one value a seed with its 95% t interval (None for a single seed), and the values."""
    from scipy.stats import t

    middle = sum(values) / len(values)
    if len(values) < 2:
        return {"mean": middle, "low": None, "high": None, "values": list(values)}
    error = math.sqrt(sum((value - middle) ** 2 for value in values) / (len(values) - 1) / len(values))
    half = float(t.ppf(0.975, len(values) - 1)) * error
    return {"mean": middle, "low": middle - half, "high": middle + half, "values": list(values)}


def mean(values: Sequence[float | None]) -> float | None:
    """Of the known ones."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def interval(values: Sequence[float]) -> dict[str, float]:
    """Mean with its 95% bootstrap interval."""
    middle, low, high = paired_bootstrap(values, [0.0] * len(values))
    return {"mean": middle, "low": low, "high": high}
