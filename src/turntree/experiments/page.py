"""A folder of matched arms over seeds, as `turntree experiment branching` leaves it: what each reached and spent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turntree.experiments.config import BRANCHING_SCHEMA
from turntree.observe.files import read_json, write_text
from turntree.report import wording
from turntree.report.figures import category_rows, interval_bar
from turntree.report.online import SUCCESS, over
from turntree.report.page import templates
from turntree.report.read import Row, read_metrics, reading
from turntree.report.svg import INK, PALE, Chart, drawing, literal, percent_ticks, plain_ticks
from turntree.report.wording import percent, points

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
BLUE, FAINT = "#0072B2", PALE
COLUMNS = 3  # of the small figures
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
            base=tuple(float(success) for success in summary["base_success"]),
            arms=tuple(_totals(name, row) for name, row in summary["arms"].items()),
            comparisons=tuple(_comparison(name, row) for name, row in summary["differences"].items()),
            curves={name: _curves(path, seeds, name) for name in summary["arms"]},
        )


def _is_experiment(summary: Any) -> bool:
    if isinstance(summary, dict) and "schema" in summary:
        return summary["schema"] == BRANCHING_SCHEMA
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
        "arms_chart": _draw_arms({arm.label: arm.success for arm in found.arms}, found.base),
        "differences_chart": _draw_differences({one.label: one.found for one in found.comparisons})
        if found.comparisons
        else None,
        "curves_chart": _draw_curves(curves, means) if curves else None,
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
        f"{percent(start)} held-out success. The highest mean is {percent(best.success.mean)}, "
        f"of “{best.label}”; what tells arms apart is the table of differences."
    )


def sentence(one: Comparison) -> str:
    """The conclusion that the difference at matched calls supports."""
    found = one.found["matched_calls"]
    told = f"“{one.first}” {wording.MINUS} “{one.second}” at matched calls: {points(found.mean)} points"
    if found.low is None or found.high is None:
        return f"{told}; one seed has no interval."
    span = f"{points(found.low)} to {points(found.high)}"
    detectable = points(found.detectable).lstrip("+")
    return f"{told} (95% interval {span}, {found.reading}; {detectable} points would be found with 80% power)."


# figures


def _draw_arms(success: Mapping[str, OverSeeds], base: Sequence[float]) -> Chart:
    """One row an arm: the mean with its interval, a small dot a seed; a line where the policy began."""
    with drawing("arms", 7.0, 1.0 + 0.45 * len(success)) as (figure, made):
        axes = figure.add_subplot()
        start = sum(base) / len(base)
        axes.axvline(start, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        for row, one in enumerate(success.values()):
            _row(axes, row, one, filled=True)
        low, high = axes.get_xlim()  # an interval of few seeds may leave what a share can be
        axes.set(xlabel="held-out success (%); dashed: before training", xlim=(max(-0.02, low), min(1.02, high)))
        category_rows(axes, list(success))
        plain_ticks(axes, "x", steps=(1, 2, 5, 10))
        percent_ticks(axes)
    said = "; ".join(f"{name} {percent(one.mean)}{_span(one)}" for name, one in success.items())
    caption = "Means over seeds with 95% intervals for other seeds and tasks; a small dot is a seed."
    return Chart(made[0], f"Held-out success by arm. {said}. Before training {percent(start)}.", caption)


def _draw_differences(found: Mapping[str, Mapping[str, OverSeeds]]) -> Chart:
    """One row a pair of arms, one panel a way of matching; hollow where the interval contains zero or is not known."""
    names = list(found)
    with drawing("differences", 10.2, 1.2 + 0.42 * len(names)) as (figure, made):
        panels = figure.subplots(1, len(MATCHED), sharey=True, sharex=True)
        for axes, (key, title) in zip(panels, MATCHED.items(), strict=True):
            axes.axvline(0, color=INK, linewidth=1)
            for row, name in enumerate(names):
                one = found[name][key]
                _row(axes, row, one, filled=one.reading in ("above zero", "below zero"))
            axes.set(title=title, xlabel="points")
            plain_ticks(axes, "x", steps=(1, 2, 5, 10))
            percent_ticks(axes)
        category_rows(panels[0], names)
        for axes in panels[1:]:
            axes.tick_params(axis="y", length=0)
            axes.grid(visible=False, axis="y")
            axes.spines["left"].set_visible(False)
    said = "; ".join(
        f"{name}: " + ", ".join(f"{MATCHED[key].lower()} {points(one.mean)}" for key, one in by_way.items())
        for name, by_way in found.items()
    )
    caption = "Differences in held-out success with 95% intervals for other seeds and tasks; hollow: nothing is shown."
    return Chart(made[0], f"Differences in percentage points. {said}.", caption)


def _draw_curves(seeds: Mapping[str, Mapping[int, Points]], means: Mapping[str, Points]) -> Chart:
    """A small figure an arm: its mean over seeds thick, its seeds thin, the means of the others in grey."""
    rows = math.ceil(len(seeds) / COLUMNS)
    with drawing("curves", 10.2, 2.4 * rows) as (figure, made):
        grid = figure.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False).flatten()
        for axes, (name, by_seed) in zip(grid, seeds.items(), strict=False):
            for other, line in means.items():
                if other != name:
                    axes.plot(*zip(*line, strict=True), color=FAINT, linewidth=1.2)
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
    said = "; ".join(f"{name} {percent(line[-1][1])} after {line[-1][0]:,.0f} calls" for name, line in means.items())
    caption = "Thick: mean over seeds, of calls and of success at every check. Thin: a seed. Grey: the other arms."
    caption += " Success does not begin at zero here."
    return Chart(made[0], f"Held-out success over fresh tool calls by arm. {said}.", caption)


def _row(axes: Axes, row: int, one: OverSeeds, *, filled: bool) -> None:
    axes.plot(one.values, [row + 0.24] * len(one.values), marker="o", ms=3, ls="", color=BLUE, alpha=0.55, mew=0)
    low, high = (one.mean if edge is None else edge for edge in (one.low, one.high))
    interval_bar(axes, one.mean, low, high, row, BLUE, filled, "o")


def _span(one: OverSeeds) -> str:
    return "" if one.low is None or one.high is None else f" ({percent(one.low)} to {percent(one.high)})"
