"""Figures of policies (success with intervals, paired differences, learning curves, skills) and of profiles."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from turntree.profiling.select import classify
from turntree.report.read import Arm, Row, Share, Skill
from turntree.report.results import Difference
from turntree.report.svg import (
    FORK,
    INK,
    MUTED,
    PALE,
    WASH,
    Chart,
    colour,
    drawing,
    literal,
    marker,
    percent_ticks,
    plain_ticks,
)
from turntree.report.wording import label, number, percent, points

if TYPE_CHECKING:
    from matplotlib.axes import Axes


SMOOTHING = 5  # steps of the moving mean that is drawn over noisy curves


def success(shares: Mapping[str, Share], greedy: Mapping[str, Share]) -> Chart:
    """One row an arm: sampled success with its Wilson interval, greedy success as an open marker below it."""
    arms = list(shares)
    with drawing("success", 5.4, 0.9 + 0.55 * len(arms)) as (figure, made):
        axes = figure.add_subplot()
        for row, arm in enumerate(arms):
            for share, shift, filled in ((shares[arm], -0.13, True), (greedy.get(arm), 0.17, False)):
                if share is None or share.success is None:
                    continue
                interval_bar(
                    axes,
                    share.success,
                    share.low,
                    share.high,
                    row + shift,
                    colour(arm, arms),
                    filled,
                    marker(arm, arms),
                )
            shown = shares[arm].success
            if shown is not None:
                axes.annotate(
                    percent(shown), (shares[arm].high, row - 0.13), (6, 0), textcoords="offset points", va="center"
                )
        highest = max(share.high for share in (*shares.values(), *greedy.values()))
        axes.set(xlim=(0, min(1.12, highest + 0.14)), xlabel="success (%)")  # with room for the values beside it
        category_rows(axes, [label(arm) for arm in arms])
        percent_ticks(axes)
    said = "; ".join(
        f"{label(arm)} {percent(s.success)} ({percent(s.low)} to {percent(s.high)})" for arm, s in shares.items()
    )
    below = " Open markers below: greedy decoding." if greedy else ""
    return Chart(
        made[0], f"Success by policy with 95% intervals. {said}.", f"Success, with 95% Wilson intervals.{below}"
    )


def paired(differences: Sequence[Difference]) -> Chart:
    """One row a difference, with zero as a line. Hollow where the interval contains zero."""
    arms = [difference.first for difference in differences]
    names = [f"{label(one.first)} \N{MINUS SIGN} {label(one.second)}" for one in differences]
    found = [one.sampled for one in differences]
    with drawing("paired", 5.4, 0.9 + 0.5 * len(differences)) as (figure, made):
        axes = figure.add_subplot()
        axes.axvline(0, color=INK, linewidth=1)
        for row, (arm, one) in enumerate(zip(arms, found, strict=True)):
            tint, shape = colour(arm, arms), marker(arm, arms)
            interval_bar(axes, one.mean, one.low, one.high, row, tint, not one.contains_zero, shape)
            axes.annotate(points(one.mean), (one.mean, row), (0, 8), textcoords="offset points", ha="center")
        low, high = min(-0.02, *(one.low for one in found)), max(0.02, *(one.high for one in found))
        room = 0.08 * (high - low)
        axes.set(xlim=(low - room, high + room), xlabel="difference in success (percentage points)")
        category_rows(axes, names)
        percent_ticks(axes)
    said = "; ".join(
        f"{name}: {points(one.mean)} ({points(one.low)} to {points(one.high)})"
        for name, one in zip(names, found, strict=True)
    )
    caption = "Paired differences over tasks, with 95% bootstrap intervals; hollow: the interval contains zero."
    return Chart(made[0], f"Paired differences in percentage points. {said}.", caption)


@dataclass(frozen=True)
class Curve:
    """A figure to draw from metrics. `key` may be dotted; a share or a reward gets an axis from 0 to 1."""

    key: str
    title: str
    unit: str
    kind: Literal["share", "reward", "amount"] = "amount"
    size: tuple[float, float] = (3.9, 2.5)  # inches


def curve(name: str, what: Curve, arms: Sequence[Arm]) -> Chart | None:
    """One logged figure over training steps, the arms overlaid; None where no arm logged it.

    Long curves get a moving mean, with the raw values faint behind it.
    """
    drawn = {arm.name: pairs for arm in arms if (pairs := series(arm.metrics, what.key))}
    if not drawn:
        return None
    names = [arm.name for arm in arms]
    with drawing(name, *what.size) as (figure, made):
        axes = figure.add_subplot()
        for arm, pairs in drawn.items():
            steps, values = [step for step, _ in pairs], [value for _, value in pairs]
            tint = colour(arm, names)
            if len(values) >= 4 * SMOOTHING:
                axes.plot(steps, values, color=tint, linewidth=0.9, alpha=0.3)
                axes.plot(steps, moving_mean(values), color=tint, linewidth=2)
            else:
                axes.plot(steps, values, color=tint, linewidth=1.8, marker=marker(arm, names), ms=5, clip_on=False)
        axes.set(title=literal(what.title), xlabel="training step", ylabel=what.unit)
        scale(axes, what, [value for pairs in drawn.values() for _, value in pairs])
        plain_ticks(axes, "x", whole=True)
    said = "; ".join(f"{label(arm)} from {number(p[0][1])} to {number(p[-1][1])}" for arm, p in drawn.items())
    return Chart(made[0], f"{what.title} over training steps. {said}.")


def scale(axes: Axes, what: Curve, values: Sequence[float]) -> None:
    plain_ticks(axes, "x")
    plain_ticks(axes, "y")
    if what.kind == "share":
        percent_ticks(axes, "y")
    axes.set_ylim(bottom=min(0.0, *values))
    if what.kind != "amount":
        axes.set_ylim(top=max(1.02, *values))


def series(metrics: Sequence[Row], key: str) -> list[tuple[float, float]]:
    """(step, value) of a dotted key, where it was logged as a finite number (elsewhere the curve has a gap)."""
    found: list[tuple[float, float]] = []
    first, _, inner = key.partition(".")
    for row in metrics:
        value = row.get(first)
        if inner:
            value = value.get(inner) if isinstance(value, Mapping) else None
        if value is not None and math.isfinite(value):
            found.append((row["step"], float(value)))
    return found


def moving_mean(values: Sequence[float]) -> list[float]:
    """The mean of each value and its neighbours, `SMOOTHING` values at most (fewer at the ends)."""
    half = SMOOTHING // 2
    windows = (values[max(0, at - half) : at + half + 1] for at in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def by_group(name: str, arms: Mapping[str, Mapping[str, Share]], groups: Sequence[str]) -> Chart:
    """Success by task type: one band a group, the arms as dodged intervals inside it."""
    names = list(arms)
    with drawing(name, 7.0, 0.9 + 0.19 * len(groups) * (len(names) + 1)) as (figure, made):
        axes = figure.add_subplot()
        for index, arm in enumerate(names):
            shift = (index - (len(names) - 1) / 2) * 0.8 / max(1, len(names))
            tint, shape = colour(arm, names), marker(arm, names)
            for row, group in enumerate(groups):
                share = arms[arm].get(group)
                if share is not None and share.success is not None:
                    interval_bar(axes, share.success, share.low, share.high, row + shift, tint, True, shape)
            axes.plot([], [], color=tint, marker=shape, ls="", ms=6, label=literal(label(arm)))
        _bands(axes, len(groups))
        axes.set(xlim=(-0.02, 1.02), xlabel="success (%)")
        category_rows(axes, list(groups))
        percent_ticks(axes)
        figure.legend(loc="outside upper left", ncols=len(names), handletextpad=0.2)
    said = "; ".join(
        f"{group}: "
        + ", ".join(f"{label(arm)} {percent(arms[arm][group].success, 0)}" for arm in names if group in arms[arm])
        for group in groups
    )
    return Chart(made[0], f"Success by task type and policy. {said}.")


def retention(arms: Mapping[str, Mapping[str, Skill]], skills: Sequence[str]) -> Chart:
    """Accuracy by skill and policy; a bar across each band marks the chance level."""
    names = list(arms)
    with drawing("retention", 7.0, 1.1 + 0.42 * len(skills)) as (figure, made):
        axes = figure.add_subplot()
        for row, skill in enumerate(skills):
            chance = next(arms[arm][skill].chance for arm in names if skill in arms[arm])
            axes.plot([chance, chance], [row - 0.38, row + 0.38], color=INK, linewidth=2.2, solid_capstyle="butt")
        for index, arm in enumerate(names):
            shift = (index - (len(names) - 1) / 2) * 0.7 / max(1, len(names))
            rows = [(arms[arm][skill].accuracy, row + shift) for row, skill in enumerate(skills) if skill in arms[arm]]
            axes.plot(
                *zip(*rows, strict=True),
                color=colour(arm, names),
                marker=marker(arm, names),
                ls="",
                ms=6,
                label=literal(label(arm)),
            )
        axes.plot([], [], color=INK, linewidth=2.2, label="chance")
        _bands(axes, len(skills))
        axes.set(xlim=(-0.02, 1.02), xlabel="exact-match accuracy (%)")
        category_rows(axes, list(skills))
        percent_ticks(axes)
        figure.legend(loc="outside upper left", ncols=len(names) + 1, handletextpad=0.4)
    said = "; ".join(
        f"{skill}: "
        + ", ".join(f"{label(arm)} {percent(arms[arm][skill].accuracy, 0)}" for arm in names if skill in arms[arm])
        for skill in skills
    )
    return Chart(made[0], f"Accuracy on skills outside the training domain. {said}.")


def interval_bar(
    axes: Axes, middle: float, low: float, high: float, row: float, tint: str, filled: bool, shape: str
) -> None:
    axes.plot([low, high], [row, row], color=tint, linewidth=2 if filled else 1.3, solid_capstyle="round")
    axes.plot(
        [middle], [row], marker=shape, ms=7 if filled else 6, color=tint, mfc=tint if filled else "white", mew=1.4
    )


def category_rows(axes: Axes, names: Sequence[str]) -> None:
    """Category labels from top to bottom."""
    axes.set_yticks(range(len(names)), [literal(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)


def _bands(axes: Axes, rows: int) -> None:
    for row in range(0, rows, 2):
        axes.axhspan(row - 0.5, row + 0.5, color=WASH, zorder=0)


# profiles

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
