"""The figures of the pages (`report.svg` draws them).

Two kinds serve most pages: `lines` (what was logged, over steps or over what was spent) and `intervals` (values with
their intervals, a row each).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from turntree.pivots.select import classify
from turntree.report.columns import Curve
from turntree.report.read import Row
from turntree.report.svg import (
    CHARACTER,
    GRID,
    INK,
    PALE,
    TEXT,
    WASH,
    Picture,
    Scale,
    in_percent,
    written,
    x_axis,
    y_axis,
)
from turntree.report.wording import label, number, percent

# Okabe and Ito's colours, which stay apart for colour-blind readers, with a marker; "" is what stands alone
BLUE = "#0072B2"
ARMS = {
    "": (BLUE, "o"),
    "base": ("#5d6570", "s"),
    "sft": ("#009E73", "^"),
    "random": ("#D55E00", "D"),
    "pivotrl": (BLUE, "o"),
    "own": ("#CC79A7", "v"),
}
OTHERS = (("#E69F00", "P"), ("#56B4E9", "X"), ("#000000", "*"))


@dataclass(frozen=True)
class Chart:
    """A figure for the page. `svg` is markup that may be inserted as it is; `alt` says in words what it shows."""

    svg: str
    alt: str
    caption: str = ""


def style(name: str, names: Sequence[str]) -> tuple[str, str]:
    """The colour and the marker of one of several lines or policies."""
    others = [other for other in names if other not in ARMS]
    return ARMS.get(name) or OTHERS[others.index(name) % len(OTHERS)]


# what was logged

SMOOTHING = 5  # steps of the moving mean that is drawn over noisy curves
Points = Sequence[tuple[float, float]]


def lines(what: Curve, drawn: Mapping[str, Points], *, x: str = "training step", name: str = "") -> Chart | None:
    """The lines by name over `x`, which the legend of the page tells apart; None where none has a point. Long ones get
    a moving mean, with the raw values faint behind it. `name` keeps the ids of the figure apart, where its key is no
    name of one."""
    drawn = {name: points for name, points in drawn.items() if points}
    if not drawn:
        return None
    picture = Picture(name or f"{what.key}-{x}".replace(" ", "-"), *what.size)
    values = [value for points in drawn.values() for _, value in points]
    top = 1.12 * max(values) if max(values) > 0 else 1.0
    if what.kind == "reward" or (what.kind == "share" and max(values) > 0.5):
        top = max(1.02, *values)
    told: Callable[[float], str] = in_percent if what.kind == "share" else written
    across = Scale(0.0, max(at for points in drawn.values() for at, _ in points) or 1.0, 0, 1)
    up = Scale(min(0.0, *values), top, 0, 1)
    left = 34 + CHARACTER * max(len(told(value)) for value in up.ticks())
    across = Scale(across.low, across.high, left, picture.width - 12)
    up = Scale(up.low, up.high, picture.height - 50, 30)
    picture.text(left, 16, what.title, more="font-weight: 600")
    y_axis(picture, up, across, [(value, told(value)) for value in up.ticks()], what.unit)
    x_axis(picture, across, up.start, [(at, written(at)) for at in across.ticks(whole=True)], x)
    for line, points in drawn.items():
        at, raw = zip(*points, strict=True)
        tint, shape = style(line, list(drawn))
        long = len(raw) >= 4 * SMOOTHING
        placed = [(across(one), up(value)) for one, value in points]
        picture.line(placed, tint, 1.2 if long else 2.4, "opacity: 0.3" if long else "")
        if long:
            smooth = zip(at, moving_mean(raw), strict=True)
            picture.line([(across(one), up(value)) for one, value in smooth], tint, 2.6)
        else:
            for place in placed:
                picture.mark(*place, shape, tint, size=4)
    said: Callable[[float], str] = percent if what.kind == "share" else number
    ends = "; ".join(
        f"{label(line)} from {said(points[0][1])} to {said(points[-1][1])}".lstrip() for line, points in drawn.items()
    )
    return Chart(picture.svg(), f"{what.title} over {x}: {ends}.")


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


# values with their intervals


@dataclass(frozen=True)
class Mark:
    """A value of a row with its interval. `of` names what is measured where a row has several; `shift` moves it up
    (below zero) or down in its row; `text` stands beside it."""

    row: str
    value: float
    low: float
    high: float
    of: str = ""
    tint: str = BLUE
    shape: str = "o"
    hollow: bool = False
    shift: float = 0.0
    text: str = ""


def intervals(
    name: str,
    size: tuple[float, float],
    marks: Sequence[Mark],
    *,
    alt: str,
    xlabel: str,
    caption: str = "",
    line: float | None = None,
) -> Chart:
    """The marks by row, from top to bottom in their order, on an axis in percent; `line` is a value that they are
    compared with."""
    rows = list(dict.fromkeys(mark.row for mark in marks))
    named = {mark.of: mark for mark in marks if mark.of}
    picture = Picture(name, *size)
    signs = [
        (label(of), partial(picture.mark, shape=one.shape, tint=one.tint, hollow=one.hollow))
        for of, one in named.items()
    ]
    top = picture.legend(signs) + 4 if signs else 6
    low, high = min(mark.low for mark in marks), max(mark.high for mark in marks)
    beside = max(len(mark.text) for mark in marks) * CHARACTER + 12
    left, right = 16 + CHARACTER * max(map(len, rows)), picture.width - 14
    if line is None and low >= 0:
        across = Scale(-0.02, min(1.02, high * 1.05 + 0.02), left, right - beside)
    else:
        low, high = min(low, *([] if line is None else [line])), max(high, *([] if line is None else [line]))
        room = 0.06 * (high - low)
        across = Scale(low - room, high + room, left, right - beside)
    down = Scale(-0.5, len(rows) - 0.5, top, picture.height - 50)
    for band in range(0, len(rows), 2) if len(named) > 1 else ():
        picture.bar(left, down(band - 0.5), right - left, down(0.5) - down(-0.5), WASH)
    for place, row in enumerate(rows):
        picture.text(left - 8, down(place) + TEXT * 0.36, row, "end")
    ticks = across.ticks()
    for value in ticks:
        picture.line([(across(value), down.start), (across(value), down.end)], GRID)
    x_axis(picture, across, down.end, [(value, in_percent(value)) for value in ticks], xlabel)
    if line is not None:
        picture.line([(across(line), down.start), (across(line), down.end)], INK, 1.4)
    for mark in marks:
        y = down(rows.index(mark.row) + mark.shift)
        width = 1.8 if mark.hollow else 2.8
        picture.line([(across(mark.low), y), (across(mark.high), y)], mark.tint, width, cap="round")
        picture.mark(
            across(mark.value), y, mark.shape, mark.tint, hollow=mark.hollow, size=8 if mark.shape == "|" else 5
        )
        if mark.text:
            picture.text(across(mark.high) + 9, y + TEXT * 0.36, mark.text)
    return Chart(picture.svg(), f"{alt} The table has the figures.", caption)


# profiles

CLASSES = (
    ("all fail", PALE, "//", "zero variance: all fail"),
    ("pivot", BLUE, "", "pivot: mixed, mean below the threshold"),
    ("mixed but easy", "#9fcbe8", "", "mixed, mean above the threshold"),
    ("all succeed", PALE, "\\\\", "zero variance: all succeed"),
)


def reward_means(rows: Sequence[Row], threshold: float) -> Chart:
    """How many candidates have each reward mean, stacked by class (PivotRL, Eq. 5: variance > 0 and mean < threshold).
    A bar for every possible mean of K rewards of 0 or 1."""
    width = 1 / max(2, *(row.get("rollouts", 20) for row in rows))
    counts = Counter(
        (classify(row, threshold), round(row["reward_mean"] / width)) for row in rows if row["reward_mean"] is not None
    )
    below: dict[int, int] = defaultdict(int)
    picture = Picture("profile", 760, 360)
    fills = {name: picture.hatched(tint, rising=hatch == "//") if hatch else tint for name, tint, hatch, _ in CLASSES}
    sizes = {name: {place: n for (kind, place), n in counts.items() if kind == name} for name, *_ in CLASSES}
    told = {text: (name, sum(sizes[name].values())) for name, *_, text in CLASSES if sizes[name]}
    signs = [(f"{text} ({total:,})", picture.swatch(fills[name])) for text, (name, total) in told.items()]
    top = picture.legend(signs) + 16
    tallest = Counter[int]()
    for bars in sizes.values():
        tallest.update(bars)
    up = Scale(0, 1.05 * max(tallest.values(), default=1), picture.height - 50, top)
    left = 34 + CHARACTER * len(f"{up.high:.0f}")
    across = Scale(-width, 1 + width, left, picture.width - 10)
    y_axis(picture, up, across, [(value, f"{value:,.0f}") for value in up.ticks(whole=True)], "candidates")
    x_axis(
        picture,
        across,
        up.start,
        [(value / 5, written(value / 5)) for value in range(6)],
        "reward mean of a candidate's rollouts",
    )
    thick = (across(width) - across(0)) * 0.86
    for name, *_ in CLASSES:
        for place, size in sizes[name].items():
            high = up(below[place] + size)
            picture.bar(across(place * width) - thick / 2, high, thick, up(below[place]) - high, fills[name])
            below[place] += size
    at, far = across(threshold), threshold > 0.8  # no room to the right of the line
    picture.line([(at, up.start), (at, up.end - 4)], INK, 1.6, "stroke-dasharray: 6 3")
    picture.text(at + (-7 if far else 7), up.end + 6, f"threshold {threshold:g}", "end" if far else "start")
    return Chart(picture.svg(), f"Reward means of {len(rows)} candidates at threshold {threshold:g}, by class.")


def kinds_by_mean(rows: Sequence[Row], threshold: float) -> dict[str, Any]:
    """Candidates by kind of demonstrated action (rows, frequent ones first) and by reward mean (columns): each cell is
    how many, how strongly it is tinted (0 to 1), and as what. Zero-variance groups have columns of their own; the
    threshold is always the edge of a column."""
    edges = sorted({0.0, 0.2, 0.4, 0.6, 0.8, 1.0, min(threshold, 1.0)})
    bins = {f"{low:g}–{high:g}": (low, high) for low, high in itertools.pairwise(edges)}

    def column(row: Row) -> str:
        kind = classify(row, threshold)
        if kind in ("all fail", "all succeed", "unjudged"):
            return kind
        inside = (name for name, (low, high) in bins.items() if low <= row["reward_mean"] < high)
        return next(inside, list(bins)[-1])

    at, kinds = Counter((row["kind"], column(row)) for row in rows), Counter(row["kind"] for row in rows)
    tints = {"all fail": "zero"} | {
        name: "selected" if high <= threshold else "easy" for name, (_, high) in bins.items()
    }
    tints |= {"all succeed": "zero"} | ({"unjudged": "zero"} if any(name == "unjudged" for _, name in at) else {})
    largest = max(at.values(), default=1)
    table = {
        kind: [(at[kind, name], math.sqrt(at[kind, name] / largest), tint) for name, tint in tints.items()]
        for kind, _ in sorted(kinds.items(), key=lambda item: (-item[1], item[0]))
    }
    return {"columns": list(tints), "rows": table}
