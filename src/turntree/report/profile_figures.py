"""Figures of a profile: where the candidates lie in reward mean and variance, and which of them were selected."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from turntree.profiling.select import classify
from turntree.report.read import Row
from turntree.report.svg import FORK, INK, MUTED, PALE, Chart, drawing, plain_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SELECTED, EASY, ZERO = "#0072B2", "#9fcbe8", PALE
CLASSES = (
    ("all fail", ZERO, "//", "zero variance: all fail"),
    ("pivot", SELECTED, "", "pivot: mixed, mean below the threshold"),
    ("mixed but easy", EASY, "", "mixed, mean above the threshold"),
    ("all succeed", ZERO, "\\\\", "zero variance: all succeed"),
)


def mean_and_variance(rows: Sequence[Row], threshold: float) -> Chart:
    """Above, how many candidates have each reward mean; below, the same candidates in the mean-variance plane with
    the selected region (variance > 0 and mean < threshold; PivotRL, Eq. 5)."""
    judged = [{**row, "class": classify(row, threshold)} for row in rows if row["reward_mean"] is not None]
    by_class = Counter(classify(row, threshold) for row in rows)
    with drawing("profile", 7.6, 5.4) as (figure, made):
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2.2))
        width = _histogram(above, judged)
        _plane(below, judged, threshold)
        for axes in (above, below):
            axes.axvline(threshold, color=INK, linewidth=1.2, linestyle=(0, (4, 2)))
        far = threshold > 0.8  # no room to the right of the line
        above.annotate(
            f"threshold {threshold:g}",
            (threshold, 1),
            (-16 if far else 5, -4),
            ha="right" if far else "left",
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            va="top",
        )
        above.set_ylabel("candidates")
        below.set(xlabel="reward mean of a candidate's rollouts", ylabel="reward variance")
        below.set_xlim(-width, 1 + width)
        figure.legend(*above.get_legend_handles_labels(), loc="outside upper left", ncols=2, fontsize=9.5)
    said = ", ".join(f"{by_class[name]} {name}" for name in sorted(by_class))
    return Chart(made[0], f"Reward mean and variance of {len(rows)} candidates at threshold {threshold:g}: {said}.")


def _histogram(axes: Axes, rows: Sequence[Row]) -> float:
    """Stacked bars, one for every possible mean of K rewards of 0 or 1; returns their width, 1 / K."""
    width = 1 / max(2, *(row.get("rollouts", 20) for row in rows)) if rows else 0.05
    heights: dict[int, int] = defaultdict(int)
    for name, tint, hatch, text in CLASSES:
        found = Counter(round(row["reward_mean"] / width) for row in rows if row["class"] == name)
        if not found:
            continue  # matplotlib would give an empty class the colour of another in the legend
        axes.bar(
            [where * width for where in found],
            list(found.values()),
            width * 0.86,
            bottom=[heights[where] for where in found],
            color=tint,
            hatch=hatch,
            edgecolor=MUTED if hatch else tint,
            linewidth=0.6,
            label=f"{text} ({found.total():,})",
        )
        for where, size in found.items():
            heights[where] += size
    axes.grid(visible=False, axis="x")
    plain_ticks(axes)
    return width


def _plane(axes: Axes, rows: Sequence[Row], threshold: float) -> None:
    """Bubbles whose area is the number of candidates at that mean and variance."""
    at = Counter((row["class"], row["reward_mean"], row["reward_var"]) for row in rows)
    largest = max(at.values(), default=1)
    top = max([0.25, *(row["reward_var"] for row in rows)]) * 1.18
    axes.fill_between([0, threshold], 0.02 * top, top, color=SELECTED, alpha=0.10, linewidth=0)
    axes.text(0.012, top * 0.97, "selected: variance > 0, mean < threshold", color=FORK, va="top", fontsize=9.5)
    for name, tint, hatch, _ in CLASSES:
        bubbles = [(mean, var, found) for (kind, mean, var), found in sorted(at.items()) if kind == name]
        if bubbles:
            means, variances, found = zip(*bubbles, strict=True)
            sizes = [8 + 240 * count / largest for count in found]
            axes.scatter(
                means, variances, sizes, color=tint, edgecolor=MUTED if hatch else "white", linewidth=0.7, clip_on=False
            )
    axes.set_ylim(-0.1 * top, top)  # room for the bubbles of zero variance
    plain_ticks(axes)


@dataclass(frozen=True)
class Cell:
    """A cell of the table by kind: how many candidates, how strongly it is tinted (0 to 1), and as what."""

    count: int
    heat: float
    tint: str  # "selected", "easy" or "zero"


@dataclass(frozen=True)
class Grid:
    """Candidates by kind of demonstrated action (rows, frequent ones first) and by reward mean (columns)."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, int, tuple[Cell, ...]], ...]  # kind, candidates, cells


def kinds_by_mean(rows: Sequence[Row], threshold: float) -> Grid:
    """Zero-variance groups have columns of their own; the threshold is always the edge of a column."""
    edges = sorted({0.0, 0.2, 0.4, 0.6, 0.8, 1.0, min(threshold, 1.0)})
    bins = list(itertools.pairwise(edges))
    columns = [("all fail", "zero"), *((f"{a:g}–{b:g}", "selected" if b <= threshold else "easy") for a, b in bins)]
    columns.append(("all succeed", "zero"))
    at = Counter((row["kind"], _column(row, bins, threshold)) for row in rows)
    if any(column == "unjudged" for _, column in at):
        columns.append(("unjudged", "zero"))
    largest = max(at.values(), default=1)
    sizes = Counter(row["kind"] for row in rows)
    return Grid(
        tuple(name for name, _ in columns),
        tuple(
            (kind, size, tuple(Cell(n := at[kind, name], math.sqrt(n / largest), tint) for name, tint in columns))
            for kind, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
        ),
    )


def _column(row: Row, bins: Sequence[tuple[float, float]], threshold: float) -> str:
    kind = classify(row, threshold)
    if kind in ("all fail", "all succeed", "unjudged"):
        return kind
    low, high = next(((a, b) for a, b in bins if a <= row["reward_mean"] < b), bins[-1])
    return f"{low:g}–{high:g}"
