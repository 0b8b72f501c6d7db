"""Figures of matched arms over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from turntree.report.figures import category_rows, interval_bar
from turntree.report.svg import INK, Chart, drawing, literal, percent_ticks, plain_ticks
from turntree.report.wording import percent, points

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from turntree.report.experiment import OverSeeds, Points

BLUE, FAINT = "#0072B2", "#c3c9d0"
COLUMNS = 3  # of the small figures


def arms(success: Mapping[str, OverSeeds], base: Sequence[float]) -> Chart:
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


def differences(found: Mapping[str, Mapping[str, OverSeeds]], ways: Mapping[str, str]) -> Chart:
    """One row a pair of arms, one panel a way of matching; hollow where the interval contains zero or is not known."""
    names = list(found)
    with drawing("differences", 10.2, 1.2 + 0.42 * len(names)) as (figure, made):
        panels = figure.subplots(1, len(ways), sharey=True, sharex=True)
        for axes, (key, title) in zip(panels, ways.items(), strict=True):
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
        f"{name}: " + ", ".join(f"{ways[key].lower()} {points(one.mean)}" for key, one in by_way.items())
        for name, by_way in found.items()
    )
    caption = "Differences in held-out success with 95% intervals for other seeds and tasks; hollow: nothing is shown."
    return Chart(made[0], f"Differences in percentage points. {said}.", caption)


def curves(seeds: Mapping[str, Mapping[int, Points]], means: Mapping[str, Points]) -> Chart:
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
