"""Figures as inline SVG, drawn by matplotlib: the same data give the same bytes, text stays text, ids do not collide.

`lines` draws what was logged, over steps or over what was spent, and `reward_means` a profile. Values with their
intervals stand in tables, whose cells draw them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import math
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from turntree.pivots.rows import classify
from turntree.report.read import Row
from turntree.report.wording import label, number, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, EDGE, PALE, GRID, WASH = "#22252a", "#5d6570", "#9aa2ac", "#c9ced5", "#e8ebee", "#f4f6f8"
# What follows the page's colour scheme, by the names that style.css has. The colours of data do not.
_THEMED = {"#ffffff": "page", "#000000": "ink", INK: "ink", MUTED: "muted", EDGE: "edge", PALE: "pale"}
_THEMED |= {GRID: "grid", WASH: "wash"}
# Okabe and Ito's colours, which stay apart for colour-blind readers, with a marker; "" is what stands alone
BLUE = "#0072B2"
ARMS = {
    "": (BLUE, "o"),
    "base": ("#5d6570", "s"),
    "sft": ("#009E73", "^"),
    "pivotrl": (BLUE, "o"),
    "own": ("#CC79A7", "v"),
    "grpo": ("#D55E00", "D"),
}
OTHERS = (("#E69F00", "P"), ("#56B4E9", "X"), ("#000000", "*"), ("#8B5A2B", "p"), ("#7B3294", "h"), ("#1B7837", "d"))

PIXELS = 1.4  # the most pixels on the page per point of the figure: 10-point text is 14 pixels high

_STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10.0,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": EDGE,
    "axes.linewidth": 0.8,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.formatter.use_mathtext": False,
    "axes.unicode_minus": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "hatch.linewidth": 0.7,
    "path.simplify": True,
}


# what a run logs (`metrics.jsonl`), as far as pages draw it: each column once, with its meaning; names with a dot lie
# in a mapping of the row, and a column that the stage did not log has no figure


@dataclass(frozen=True)
class Curve:
    """A figure to draw from metrics. `key` may be dotted; a share or a reward gets an axis from 0 to 1."""

    key: str
    title: str
    unit: str
    kind: Literal["share", "reward", "amount"] = "amount"
    size: tuple[float, float] = (3.9, 2.5)  # inches


REWARD = Curve("reward_mean", "Training reward", "mean reward", "reward")
SUCCESS = Curve("held_out_success", "Held-out success", "success (%)", "share")
KL = Curve("kl", "KL to the reference", "nats per token")
NORM = Curve("grad_norm", "Gradient norm before clipping", "L2 norm")
ONLINE = (
    REWARD,
    Curve("success_share", "Training success", "rollouts (%)", "share"),
    Curve("zero_variance_share", "Groups without a gradient", "groups (%)", "share"),
    Curve("held_out_turns_per_episode", "Held-out turns (drift)", "turns per episode"),
    KL,
    NORM,
)
BRANCHING = (Curve("branching.structural_saving", "Structural saving s", "calls shared (%)", "share"),)
SPENT = {  # since the start; before the first iteration nothing
    "trees.calls_fresh": "fresh tool calls",
    "spent.turns": "turns sampled in training",
    "spent.decoded_tokens": "tokens sampled in training",
}
PIVOT = (
    REWARD,
    KL,
    NORM,
    Curve("mixed_groups", "Groups with mixed rewards", "share of groups (%)", "share"),
    SUCCESS,
    Curve("held_out_invalid_share", "Impossible commands (held-out)", "share of commands (%)", "share"),
)
ACCEPTANCE = "held_out_acceptance"  # by kind of demonstrated action
SFT = (Curve("loss", "SFT loss", "nats per token"), SUCCESS)
BY_STAGE = {
    "train pivot": PIVOT,
    "sft": SFT,
    "train online": (*ONLINE, *BRANCHING),
}  # by the name that a stage gives itself


# figures


@dataclass(frozen=True)
class Chart:
    """A figure for the page. `svg` is markup that may be inserted as it is; `alt` says in words what it shows."""

    svg: str
    alt: str


def can_draw() -> bool:
    """Whether matplotlib is here; a page without curves has all figures in its tables."""
    return importlib.util.find_spec("matplotlib") is not None


@contextlib.contextmanager
def drawing(name: str, width: float, height: float) -> Iterator[tuple[Figure, list[str]]]:
    """A figure of `width` x `height` inches; after the block its SVG is the one element of the list.

    `name` keeps the ids of several figures on one page apart.
    """
    import matplotlib
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {**_STYLE, "svg.hashsalt": name}
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # the reader's browser has the font, not this machine
        figure = Figure(figsize=(width, height), layout="constrained")
        made: list[str] = []
        yield figure, made
        text = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", metadata=nothing, transparent=True)
        made.append(inline(text.getvalue(), name))


def inline(svg: str, name: str) -> str:
    """The `<svg>` element alone, scalable, with ids of its own and without anything that points outside."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", body, flags=re.DOTALL)
    head, rest = body.split(">", 1)
    box = re.search(r'viewBox="0 0 ([\d.]+) [^"]*"', head)
    assert box is not None
    used = set(re.findall(r'(?:url\(|href=")#([\w.-]+)', rest))
    rest = re.sub(r' id="([\w.-]+)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", rest)
    rest = re.sub(r"url\(#", f"url(#{name}-", rest)
    rest = re.sub(r'xlink:href="#', f'href="#{name}-', rest)
    rest = re.sub(r"font-family: [^;\"]*(; )?", "", rest)  # the page's own font
    rest = re.sub(r' transform="rotate\(-0 [^"]*"', "", rest)
    rest = re.sub(r"\n\s*", "\n", rest)
    rest = re.sub(r"<[^<>]+>", lambda m: themed(m[0]), rest)  # not in texts, which are the data's
    width = f"{float(box[1]) * PIXELS:.0f}px"
    opening = f'<svg {box[0]} style="--width: {width}; max-width: {width}" aria-hidden="true" focusable="false">'
    return opening + rest.strip()


def themed(markup: str) -> str:
    """A colour, or a tag, with inks, lines and backgrounds as variables of the page: a dark page has light ones."""

    def named(found: re.Match[str]) -> str:
        name = _THEMED.get(found[0].lower())
        return found[0] if name is None else f"var(--{name}, {found[0]})"

    return re.sub(r"#[0-9a-fA-F]{6}(?![\w.-])", named, markup)


def literal(text: str) -> str:
    """Text that matplotlib must not read as mathematics."""
    return text.replace("$", r"\$")


def plain_ticks(axes: Axes, which: str = "y", *, whole: bool = False) -> None:
    """Tick labels such as 0.0005 instead of an offset above the axis; `whole`: what is counted has no tick at 1.5."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis = axes.yaxis if which == "y" else axes.xaxis
    axis.set_major_locator(MaxNLocator(5, steps=(1, 2, 2.5, 5, 10), integer=whole, min_n_ticks=1 if whole else 2))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.10g}".replace("-", "\N{MINUS SIGN}")))


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
    names, drawn = list(drawn), {name: points for name, points in drawn.items() if points}
    if not drawn or not can_draw():
        return None
    with drawing(name or f"{what.key}-{x}".replace(" ", "-"), *what.size) as (figure, made):
        axes = figure.add_subplot()
        for line, points in drawn.items():
            at, values = zip(*points, strict=True)
            tint, shape = style(line, names)
            if len(values) >= 4 * SMOOTHING:
                axes.plot(at, values, color=tint, linewidth=0.9, alpha=0.3)
                axes.plot(at, moving_mean(values), color=tint, linewidth=2)
            else:
                axes.plot(at, values, color=tint, linewidth=1.8, marker=shape, ms=5, clip_on=False)
        values = [value for points in drawn.values() for _, value in points]
        axes.set(title=literal(what.title), xlabel=x, ylabel=what.unit, xlim=(0, None))
        plain_ticks(axes, "x", whole=True)
        plain_ticks(axes, "y")
        if what.kind == "share":
            axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}".replace("-", "\N{MINUS SIGN}"))
        axes.set_ylim(bottom=min(0.0, *values))
        if what.kind == "reward" or (what.kind == "share" and max(values) > 0.5):
            axes.set_ylim(top=max(1.02, *values))
        elif max(values) > 0:
            axes.set_ylim(top=1.12 * max(values))
    told: Callable[[float], str] = percent if what.kind == "share" else number
    ends = "; ".join(
        f"{label(line)} from {told(points[0][1])} to {told(points[-1][1])}".lstrip() for line, points in drawn.items()
    )
    return Chart(made[0], f"{what.title} over {x}: {ends}.")


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


# profiles

CLASSES = (
    ("all fail", PALE, "//", "zero variance: all fail"),
    ("pivot", BLUE, "", "pivot: mixed, mean below the threshold"),
    ("mixed but easy", "#9fcbe8", "", "mixed, mean above the threshold"),
    ("all succeed", PALE, "\\\\", "zero variance: all succeed"),
)


def reward_means(rows: Sequence[Row], threshold: float) -> Chart | None:
    """How many candidates have each reward mean, stacked by class (PivotRL, Eq. 5: variance > 0 and mean < threshold).
    A bar for every possible mean of K rewards of 0 or 1."""
    if not can_draw():
        return None
    width = 1 / max(2, *(row["rollouts"] for row in rows))
    counts = Counter(
        (classify(row, threshold), round(row["reward_mean"] / width)) for row in rows if row["reward_mean"] is not None
    )
    below: dict[int, int] = defaultdict(int)
    with drawing("profile", 7.6, 3.6) as (figure, made):
        axes = figure.add_subplot()
        for name, tint, hatch, text in CLASSES:
            bars = {place: size for (kind, place), size in counts.items() if kind == name}
            if not bars:
                continue  # matplotlib would give an empty class the colour of another in the legend
            axes.bar(
                [place * width for place in bars],
                list(bars.values()),
                width * 0.86,
                bottom=[below[place] for place in bars],
                color=tint,
                hatch=hatch,
                edgecolor=MUTED if hatch else tint,
                linewidth=0.6,
                label=f"{text} ({sum(bars.values()):,})",
            )
            for place, size in bars.items():
                below[place] += size
        axes.axvline(threshold, color=INK, linewidth=1.2, linestyle=(0, (4, 2)))
        far = threshold > 0.8  # no room to the right of the line
        side: dict[str, Any] = {"ha": "right" if far else "left", "va": "top", "textcoords": "offset points"}
        at = (threshold, 1), (-16 if far else 5, -4)
        axes.annotate(f"threshold {threshold:g}", *at, xycoords=("data", "axes fraction"), **side)
        axes.set(xlabel="reward mean of a candidate's rollouts", ylabel="candidates", xlim=(-width, 1 + width))
        axes.grid(visible=False, axis="x")
        plain_ticks(axes)
        figure.legend(loc="outside upper left", ncols=2, fontsize=9.5)
    return Chart(made[0], f"Reward means of {len(rows)} candidates at threshold {threshold:g}, by class.")


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
