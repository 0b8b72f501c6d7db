"""What experiments of matched arms have in common: held-out outcomes by task, and paired comparisons of them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turntree.core.config import to_mapping
from turntree.observe.run import RunDirectory
from turntree.observe.statistics import mcnemar, paired_bootstrap
from turntree.stages.train_online import HELD_OUT, TrainOnlineConfig, run_train_online


def arm_folder(out: Path, seed: int, arm: str) -> Path:
    return out / f"seed{seed}" / arm


def json_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file; none where it was not written."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def held_out_outcomes(folder: Path, iteration: int | None = None) -> dict[str, float]:
    """Success by task at the check after `iteration`, None for the last one of a run."""
    rows = json_rows(folder / HELD_OUT)
    wanted = max(row["iteration"] for row in rows) if iteration is None else iteration
    return {row["task"]: mean(row["rewards"]) or 0.0 for row in rows if row["iteration"] == wanted and row["rewards"]}


def paired_outcomes(mine: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The difference in success of two arms on the same tasks, seed by seed.

    `held_out_difference` resamples (seed, task) pairs, and so do McNemar's test and the effect that it could detect:
    they hold for these trained policies. `by_seed` are the differences of the seeds, with the t interval of their mean
    and its detectable effect (80% power): what other seeds may bring. Tasks without an outcome in one of the arms
    (censored) are left out and counted.
    """
    by_seed = [
        [(one[task], two[task]) for task in sorted(one.keys() & two.keys())]
        for one, two in zip(mine, theirs, strict=True)
    ]
    left_out = sum(len(one.keys() ^ two.keys()) for one, two in zip(mine, theirs, strict=True))
    pairs = [pair for seed in by_seed for pair in seed]
    middle, low, high = paired_bootstrap([a for a, _ in pairs], [b for _, b in pairs])
    spread = math.sqrt(sum((a - b - middle) ** 2 for a, b in pairs) / max(1, len(pairs) - 1))
    return {
        "held_out_difference": {"mean": middle, "low": low, "high": high, "tasks": len(pairs), "left_out": left_out},
        "by_seed": over_seeds([sum(a - b for a, b in seed) / len(seed) for seed in by_seed]),
        "mcnemar": mcnemar(sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)),
        "minimum_detectable_effect": (1.959964 + 0.841621) * spread / math.sqrt(len(pairs)),
    }


def over_seeds(values: Sequence[float]) -> dict[str, Any]:
    """The mean of one value a seed with its 95% t interval and the effect that a test at 5% would detect with 80% power
    (None for a single seed), and the values."""
    from scipy.stats import t

    middle, count = sum(values) / len(values), len(values)
    if count < 2:
        return {"mean": middle, "low": None, "high": None, "detectable": None, "values": list(values)}
    error = math.sqrt(sum((value - middle) ** 2 for value in values) / (count - 1) / count)
    half, power = (float(t.ppf(share, count - 1)) * error for share in (0.975, 0.8))
    return {
        "mean": middle,
        "low": middle - half,
        "high": middle + half,
        "detectable": half + power,
        "values": list(values),
    }


def run_or_reuse(config: TrainOnlineConfig, folder: Path) -> None:
    """Run an arm unless it is finished. Raises `InputError` where another configuration was run there."""
    if not RunDirectory(folder).finished_with(to_mapping(config)):
        run_train_online(config, folder)


def mean(values: Sequence[float | None]) -> float | None:
    """Of the known ones."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def interval(values: Sequence[float]) -> dict[str, float]:
    """Mean with its 95% bootstrap interval."""
    middle, low, high = paired_bootstrap(values, [0.0] * len(values))
    return {"mean": middle, "low": low, "high": high}
