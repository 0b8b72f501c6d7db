"""A folder of matched arms over seeds, as `turntree experiment branching` leaves it: what each reached and spent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turntree.observe.files import read_json
from turntree.report import experiment_figures, wording
from turntree.report.online import SUCCESS, over
from turntree.report.read import Row, read_metrics, reading

LABELS = {
    "grpo": "GRPO",
    "grpo_half": "GRPO, half the rollouts",
    "grpo_calls": "GRPO, as many calls",
    "entropy": "Entropy forks",
    "random": "Random forks",
    "entropy_starts": "Entropy, baseline of starts",
    "entropy_paths": "Entropy, path weights",
    "random_paths": "Random, path weights",
    "arpo_released": "ARPO as released",
    "tree_grpo": "Tree-GRPO",
}
MATCHED = {
    "matched_steps": "At matched steps",
    "matched_calls": "At matched calls",
    "mean_over_checks": "Mean over checks",
}
AMOUNTS = ("calls", "decoded_tokens", "structural_saving", "forks_per_group", "rho", "drift", "zero_variance_share")

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class OverSeeds:
    """A mean over seeds with its 95% interval for other seeds and tasks, and the detectable effect; a single seed has
    neither."""

    mean: float
    low: float | None
    high: float | None
    detectable: float | None
    values: tuple[float, ...]

    @property
    def reading(self) -> str:
        if self.low is None or self.high is None:
            return "one seed: no interval"
        return "above zero" if self.low > 0 else "below zero" if self.high < 0 else "contains zero"


@dataclass(frozen=True)
class ArmTotals:
    """`gain` is over the same policy before training. `amounts` are means over seeds, None where not known."""

    name: str
    label: str
    success: OverSeeds
    gain: OverSeeds
    amounts: Mapping[str, float | None]


@dataclass(frozen=True)
class Comparison:
    """Success of `first` minus that of `second`, in the three ways of `MATCHED`."""

    first: str
    second: str
    found: Mapping[str, OverSeeds]

    @property
    def label(self) -> str:
        return f"{self.first} {wording.MINUS} {self.second}"


@dataclass(frozen=True)
class Experiment:
    """`curves`: per arm and seed the points (fresh calls, held-out success); empty where the runs are not here."""

    name: str
    seeds: tuple[int, ...]
    base: tuple[float, ...]
    arms: tuple[ArmTotals, ...]
    comparisons: tuple[Comparison, ...]
    curves: Mapping[str, Mapping[int, Points]]


def read_experiment(path: Path) -> Experiment | None:
    """None where the folder is no such experiment. Raises `InputError` where its summary lacks what the page needs."""
    file = path / "summary.json"
    summary: Any = read_json(file) if file.exists() else None
    if not _is_experiment(summary):
        return None
    with reading(file):
        seeds = tuple(int(seed) for seed in summary["seeds"])
        return Experiment(
            name=path.resolve().name,
            seeds=seeds,
            base=tuple(float(success) for success in summary["base_success"]),
            arms=tuple(_totals(name, row) for name, row in summary["arms"].items()),
            comparisons=tuple(_comparison(name, row) for name, row in summary["differences"].items()),
            curves={name: _curves(path, seeds, name) for name in summary["arms"]},
        )


def _is_experiment(summary: Any) -> bool:
    arms = summary.get("arms") if isinstance(summary, dict) and "seeds" in summary else None
    return isinstance(arms, dict) and any(isinstance(row, dict) and "structural_saving" in row for row in arms.values())


def _totals(name: str, row: Row) -> ArmTotals:
    return ArmTotals(
        name=name,
        label=LABELS.get(name, name),
        success=_over_seeds(row["held_out_success"]),
        gain=_over_seeds(row["gain"]["by_seed"]),
        amounts={key: row[key] for key in AMOUNTS},
    )


def _comparison(name: str, row: Row) -> Comparison:
    first, _, second = name.partition(" - ")
    by_seed = {key: row[key]["by_seed"] if key == "matched_steps" else row[key] for key in MATCHED}
    found = {key: _over_seeds(value) for key, value in by_seed.items()}
    return Comparison(LABELS.get(first, first), LABELS.get(second, second), found)


def _over_seeds(row: Row) -> OverSeeds:
    return OverSeeds(float(row["mean"]), row["low"], row["high"], row["detectable"], tuple(row["values"]))


def _curves(path: Path, seeds: Sequence[int], arm: str) -> dict[int, Points]:
    files = {seed: path / f"seed{seed}" / arm / "metrics.jsonl" for seed in seeds}
    found = {
        seed: over(read_metrics(file), "trees.calls_fresh", SUCCESS.key)
        for seed, file in files.items()
        if file.exists()
    }
    return {seed: points for seed, points in found.items() if points}


def mean_curve(curves: Mapping[int, Points]) -> list[tuple[float, float]]:
    """Means of calls and of success at every check that all seeds have."""
    checks = zip(*curves.values(), strict=False)
    return [
        (sum(calls for calls, _ in check) / len(check), sum(success for _, success in check) / len(check))
        for check in checks
    ]


def view(found: Experiment) -> dict[str, Any]:
    """Everything that the template shows."""
    labels = {arm.name: arm.label for arm in found.arms}
    curves = {labels[name]: by_seed for name, by_seed in found.curves.items() if by_seed}
    means = {label: mean_curve(by_seed) for label, by_seed in curves.items()}
    return {
        "experiment": found,
        "lead": lead(found),
        "sentences": [sentence(one) for one in found.comparisons[:3]],
        "matched": MATCHED,
        "arms_chart": experiment_figures.arms({arm.label: arm.success for arm in found.arms}, found.base),
        "differences_chart": experiment_figures.differences(
            {one.label: one.found for one in found.comparisons}, MATCHED
        )
        if found.comparisons
        else None,
        "curves_chart": experiment_figures.curves(curves, means) if curves else None,
        "runs_missing": sorted(
            f"seed{seed}/{name}"
            for name, by_seed in found.curves.items()
            for seed in found.seeds
            if seed not in by_seed
        ),
    }


def lead(found: Experiment) -> str:
    best = max(found.arms, key=lambda arm: arm.success.mean)
    start = sum(found.base) / len(found.base)
    return (
        f"{wording.plural(len(found.arms), 'arm')} over {wording.plural(len(found.seeds), 'matched seed')}, from "
        f"{wording.percent(start)} held-out success. The highest mean is {wording.percent(best.success.mean)}, "
        f"of “{best.label}”; what tells arms apart is the table of differences."
    )


def sentence(one: Comparison) -> str:
    """What the difference at matched calls allows to say."""
    found = one.found["matched_calls"]
    told = f"“{one.first}” {wording.MINUS} “{one.second}” at matched calls: {wording.points(found.mean)} points"
    if found.low is None or found.high is None:
        return f"{told}; one seed has no interval."
    span = f"{wording.points(found.low)} to {wording.points(found.high)}"
    detectable = wording.points(found.detectable).lstrip("+")
    return f"{told} (95% interval {span}, {found.reading}; {detectable} points would be found with 80% power)."
