"""Matplotlib figures as inline SVG: the same data give the same bytes, text stays text, ids do not collide."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, EDGE, PALE, GRID, WASH = "#22252a", "#5d6570", "#9aa2ac", "#c9ced5", "#e8ebee", "#f4f6f8"
FORK, WARN, GOOD, BAD, GOOD_SOFT, BAD_SOFT = "#0060a0", "#9a4b00", "#00694c", "#a34700", "#d8efe6", "#fbe6d8"
ON_DARK, ON_LIGHT = "#fdfdfd", "#1b1d21"  # text on a bar, whose colour is the same on a light and on a dark page
# What follows the page's colour scheme, by the names that style.css has. The colours of data do not.
_THEMED = {
    "#ffffff": "page",
    "#000000": "ink",
    INK: "ink",
    MUTED: "muted",
    EDGE: "edge",
    PALE: "pale",
    GRID: "grid",
    WASH: "wash",
    FORK: "fork",
    WARN: "warn",
    GOOD: "good",
    BAD: "bad",
    GOOD_SOFT: "good-soft",
    BAD_SOFT: "bad-soft",
}
# Okabe and Ito's colours, which stay apart for colour-blind readers
COLOURS = {"base": "#5d6570", "sft": "#009E73", "random": "#D55E00", "pivotrl": "#0072B2", "own": "#CC79A7"}
OTHERS = ("#E69F00", "#56B4E9", "#000000")
MARKERS = {"base": "s", "sft": "^", "random": "D", "pivotrl": "o", "own": "v"}
OTHER_MARKERS = ("P", "X", "*")

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


@dataclass(frozen=True)
class Chart:
    """A figure for the page. `svg` is markup that may be inserted as it is; `alt` says in words what it shows."""

    svg: str
    alt: str
    caption: str = ""


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
    widest = f"max-width: {float(box[1]) * PIXELS:.0f}px"
    return f'<svg {box[0]} style="{widest}" aria-hidden="true" focusable="false">{rest.strip()}'


def themed(markup: str) -> str:
    """A colour, or a tag, with inks, lines and backgrounds as variables of the page: a dark page has light ones."""

    def named(found: re.Match[str]) -> str:
        name = _THEMED.get(found[0].lower())
        return found[0] if name is None else f"var(--{name}, {found[0]})"

    return re.sub(r"#[0-9a-fA-F]{6}(?![\w.-])", named, markup)


def colour(arm: str, arms: list[str]) -> str:
    return COLOURS.get(arm) or _other(arm, arms, OTHERS, COLOURS)


def marker(arm: str, arms: list[str]) -> str:
    return MARKERS.get(arm) or _other(arm, arms, OTHER_MARKERS, MARKERS)


def _other(arm: str, arms: list[str], choices: tuple[str, ...], known: dict[str, str]) -> str:
    others = [name for name in arms if name not in known]
    return choices[others.index(arm) % len(choices)]


def literal(text: str) -> str:
    """Text that matplotlib must not read as mathematics."""
    return text.replace("$", r"\$")


def plain_ticks(
    axes: Axes, which: str = "y", steps: Sequence[float] = (1, 2, 2.5, 5, 10), *, whole: bool = False
) -> None:
    """Tick labels such as 0.0005 instead of an offset above the axis, at multiples of `steps`; `whole`: what is counted
    has no tick at 1.5."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis = axes.yaxis if which == "y" else axes.xaxis
    axis.set_major_locator(MaxNLocator(5, steps=steps, integer=whole, min_n_ticks=1 if whole else 2))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.10g}".replace("-", "\N{MINUS SIGN}")))


def percent_ticks(axes: Axes, which: str = "x") -> None:
    from matplotlib.ticker import FuncFormatter

    axis = axes.yaxis if which == "y" else axes.xaxis
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f}".replace("-", "\N{MINUS SIGN}")))
