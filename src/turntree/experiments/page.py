"""A folder of matched arms over seeds, as `turntree experiment branching` leaves it: what each reached and spent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turntree.experiments.config import BRANCHING_SCHEMA
from turntree.report import wording
from turntree.report.columns import SUCCESS
from turntree.report.figures import (
    BLUE,
    PALE,
    Chart,
    Mark,
    Points,
    draw_marks,
    drawing,
    intervals,
    literal,
    percent_ticks,
    plain_ticks,
    said,
)
from turntree.report.online import over
from turntree.report.page import templates
from turntree.report.read import Row, read_metrics, reading
from turntree.report.wording import percent, points
from turntree.run.files import read_json, write_text

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
COLUMNS = 3  # of the small figures
AMOUNTS = ("calls", "decoded_tokens", "structural_saving", "forks_per_group", "rho", "drift", "zero_variance_share")


@dataclass(frozen=True)
class Experiment:
    """`arms` and `differences` hold the rows of the summary by name: a mean over seeds has `low`, `high` and
    `detectable` (None for a single seed) and its `values`. `curves`: per arm and seed the points (fresh calls, held-out
    success); empty where the runs are not here."""

    name: str
    seeds: tuple[int, ...]
    start: float
    arms: Mapping[str, Row]
    differences: Mapping[tuple[str, str], Mapping[str, Row]]
    curves: Mapping[str, Mapping[int, Points]]


def build_experiment_page(folder: Path, out: Path | None = None) -> Path | None:
    """Write the page of an experiment to `out` (default: `report.html` inside the folder) and return where it lies;
    None where the folder is not such an experiment. Raises `InputError` where its summary lacks what the page needs."""
    found = read_experiment(folder)
    if found is None:
        return None
    template = templates("turntree.experiments").get_template("experiment.html.j2")
    return write_text(out or folder / "report.html", template.render(view(found)))


def read_experiment(path: Path) -> Experiment | None:
    """None where the folder is not such an experiment. Raises `InputError` where its summary is incomplete."""
    file = path / "summary.json"
    summary: Any = read_json(file) if file.exists() else None
    if not _is_experiment(summary):
        return None
    with reading(file):
        seeds = tuple(int(seed) for seed in summary["seeds"])
        return Experiment(
            name=path.resolve().name,
            seeds=seeds,
            start=sum(summary["base_success"]) / len(seeds),
            arms={name: _arm(row) for name, row in summary["arms"].items()},
            differences={
                tuple(name.split(" - ")): {key: _over_seeds(row[key]) for key in MATCHED}
                for name, row in summary["differences"].items()
            },
            curves={name: _curves(path, seeds, name) for name in summary["arms"]},
        )


def _is_experiment(summary: Any) -> bool:
    if isinstance(summary, dict) and "schema" in summary:
        return summary["schema"] == BRANCHING_SCHEMA
    arms = summary.get("arms") if isinstance(summary, dict) and "seeds" in summary else None
    return isinstance(arms, dict) and any(isinstance(row, dict) and "structural_saving" in row for row in arms.values())


def _arm(row: Row) -> Row:
    found = {key: row[key] for key in AMOUNTS}
    return found | {"success": _over_seeds(row["held_out_success"]), "gain": _over_seeds(row["gain"])}


def _over_seeds(row: Row) -> Row:
    row = row.get("by_seed", row)
    values = {key: row[key] for key in ("mean", "low", "high", "detectable", "values")}
    return values | {"reading": _reading(row["low"], row["high"])}


def _reading(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return "one seed: no interval"
    return "above zero" if low > 0 else "below zero" if high < 0 else "contains zero"


def _curves(path: Path, seeds: Sequence[int], arm: str) -> dict[int, Points]:
    files = {seed: path / f"seed{seed}" / arm / "metrics.jsonl" for seed in seeds}
    rows = {seed: read_metrics(file) for seed, file in files.items() if file.exists()}
    found = {seed: over(metrics, "trees.calls_fresh", SUCCESS.key) for seed, metrics in rows.items()}
    return {seed: points for seed, points in found.items() if points}


def mean_curve(curves: Mapping[int, Points]) -> list[tuple[float, float]]:
    """Means of calls and of success at every check that all seeds have."""
    checks = [tuple(zip(*check, strict=True)) for check in zip(*curves.values(), strict=False)]
    return [(sum(calls) / len(calls), sum(success) / len(success)) for calls, success in checks]


def view(found: Experiment) -> dict[str, Any]:
    """Everything that the template shows."""
    curves = {_label(name): by_seed for name, by_seed in found.curves.items() if by_seed}
    runs = [(seed, name) for name in found.curves for seed in found.seeds]
    return {
        "experiment": found,
        "labels": {name: _label(name) for name in {*found.arms, *sum(found.differences, ())}},
        "lead": _lead(found),
        "sentences": [_sentence(pair, row) for pair, row in list(found.differences.items())[:3]],
        "matched": MATCHED,
        "arms_chart": _draw_arms(found),
        "differences_chart": _draw_differences(found.differences) if found.differences else None,
        "curves_chart": _draw_curves(curves) if curves else None,
        "runs_missing": sorted(f"seed{seed}/{name}" for seed, name in runs if seed not in found.curves[name]),
    }


def _label(arm: str) -> str:
    return LABELS.get(arm, arm)


def _lead(found: Experiment) -> str:
    success, best = max((row["success"]["mean"], name) for name, row in found.arms.items())
    return (
        f"{wording.plural(len(found.arms), 'arm')} over {wording.plural(len(found.seeds), 'matched seed')}, from "
        f"{percent(found.start)} held-out success. The highest mean is {percent(success)}, "
        f"of “{_label(best)}”; what tells arms apart is the table of differences."
    )


def _sentence(pair: tuple[str, str], row: Mapping[str, Row]) -> str:
    """The conclusion that the difference at matched calls supports."""
    found = row["matched_calls"]
    first, second = map(_label, pair)
    told = f"“{first}” {wording.MINUS} “{second}” at matched calls: {points(found['mean'])} points"
    if found["low"] is None:
        return f"{told}; one seed has no interval."
    span = f"{points(found['low'])} to {points(found['high'])}"
    detectable = points(found["detectable"]).lstrip("+")
    return f"{told} (95% interval {span}, {found['reading']}; {detectable} points would be found with 80% power)."


# figures


def _marks(label: str, row: Row, *, hollow: bool = False) -> list[Mark]:
    """The mean with its interval, and a small dot a seed."""
    low, high = (row["mean"] if row[edge] is None else row[edge] for edge in ("low", "high"))
    seeds = [Mark(label, value, value, value, shape=".", shift=0.24) for value in row["values"]]
    return [Mark(label, row["mean"], low, high, hollow=hollow), *seeds]


def _draw_arms(found: Experiment) -> Chart:
    """A line where the policy began."""
    marks = [mark for name, row in found.arms.items() for mark in _marks(_label(name), row["success"])]
    return intervals(
        "arms",
        (7.0, 1.0 + 0.45 * len(found.arms)),
        marks,
        alt=f"Held-out success by arm; before training {percent(found.start)}.",
        xlabel="held-out success (%); the line: before training",
        caption="Means over seeds with 95% intervals for other seeds and tasks; a small dot is a seed.",
        line=found.start,
    )


def _draw_differences(differences: Mapping[tuple[str, str], Mapping[str, Row]]) -> Chart:
    """One row a pair of arms, one panel a way of matching; hollow where the interval contains zero or is not known."""
    by_pair = {f"{_label(first)} {wording.MINUS} {_label(second)}": row for (first, second), row in differences.items()}
    told: list[str] = []
    with drawing("differences", 10.2, 1.2 + 0.42 * len(by_pair)) as (figure, made):
        panels = figure.subplots(1, len(MATCHED), sharey=True, sharex=True)
        for axes, (key, title) in zip(panels, MATCHED.items(), strict=True):
            clear = ("above zero", "below zero")
            marks = [
                mark
                for name, row in by_pair.items()
                for mark in _marks(name, row[key], hollow=row[key]["reading"] not in clear)
            ]
            draw_marks(axes, list(by_pair), marks, line=0)
            axes.set(title=title, xlabel="points")
            told.append(f"{title}: {said(marks, points)}.")
    caption = "Differences in held-out success with 95% intervals for other seeds and tasks; hollow: nothing is shown."
    return Chart(made[0], f"Differences in percentage points. {' '.join(told)}", caption)


def _draw_curves(seeds: Mapping[str, Mapping[int, Points]]) -> Chart:
    """A small figure an arm: its mean over seeds thick, its seeds thin, the means of the others in grey."""
    rows, means = math.ceil(len(seeds) / COLUMNS), {name: mean_curve(by_seed) for name, by_seed in seeds.items()}
    with drawing("curves", 10.2, 2.4 * rows) as (figure, made):
        grid = figure.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False).flatten()
        for axes, (name, by_seed) in zip(grid, seeds.items(), strict=False):
            for other, line in means.items():
                if other != name:
                    axes.plot(*zip(*line, strict=True), color=PALE, linewidth=1.2)
            for line in by_seed.values():
                axes.plot(*zip(*line, strict=True), color=BLUE, linewidth=0.9, alpha=0.45)
            axes.plot(*zip(*means[name], strict=True), color=BLUE, linewidth=2.4, marker="o", ms=4)
            axes.set_title(literal(name))
            plain_ticks(axes, "x")
            plain_ticks(axes, "y", steps=(1, 2, 5, 10))
            percent_ticks(axes, "y")
        for axes in grid[len(seeds) :]:
            axes.set_visible(False)
        figure.supxlabel("fresh tool calls", fontsize=10)
        figure.supylabel("held-out success (%)", fontsize=10)
    told = "; ".join(f"{name} {percent(line[-1][1])} after {line[-1][0]:,.0f} calls" for name, line in means.items())
    caption = "Thick: mean over seeds, of calls and of success at every check. Thin: a seed. Grey: the other arms."
    caption += " Success does not begin at zero here."
    return Chart(made[0], f"Held-out success over fresh tool calls by arm. {told}.", caption)
