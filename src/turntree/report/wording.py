"""Numbers and names as people read them, and the templates of pages, which have these words as filters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment

ABSENT = "–"
MINUS = "\N{MINUS SIGN}"
LABELS = {"base": "Base", "sft": "SFT", "pivotrl": "PivotRL", "own": "Own states", "grpo": "GRPO"}


def label(arm: str) -> str:
    return LABELS.get(arm, arm)


def percent(share: float | None, digits: int = 1) -> str:
    return ABSENT if share is None else f"{100 * share:.{digits}f}%"


def span(edges: tuple[float, float] | None) -> str:
    """`38.3–51.9`, in percent."""
    return ABSENT if edges is None else f"{100 * edges[0]:.1f}–{100 * edges[1]:.1f}"


def within(edges: Sequence[float] | None) -> str:
    """`38–52%`; nothing where there is no interval."""
    return "" if edges is None else f"{100 * edges[0]:.0f}–{100 * edges[1]:.0f}%"


def points(difference: float | None) -> str:
    """A difference of shares in percentage points, with its sign: `+14.0`."""
    if difference is None:
        return ABSENT
    return f"{100 * difference:+.1f}".replace("-", MINUS).replace(f"{MINUS}0.0", "0.0").replace("+0.0", "0.0")


def count(number: float | None) -> str:
    return ABSENT if number is None else f"{number:,.0f}"


def plural(size: int, noun: str) -> str:
    return f"{size:,} {noun}" if size == 1 else f"{size:,} {noun}s"


def number(value: float | None) -> str:
    """Three significant digits."""
    return ABSENT if value is None else f"{value:.3g}".replace("-", MINUS)


def seconds(value: float | None) -> str:
    return ABSENT if value is None else f"{value:,.1f}"


def duration(seconds: float | None) -> str:
    """`4.2 s`, `12 min 34 s`, `1 h 02 min`."""
    if seconds is None:
        return ABSENT
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def templates(*others: str) -> Environment:
    """The templates of this package and of those named; an unknown name in one is an error."""
    import jinja2

    loader = jinja2.ChoiceLoader([jinja2.PackageLoader(package) for package in ("turntree.report", *others)])
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    environment.trim_blocks = environment.lstrip_blocks = True
    words = (label, percent, span, within, points, count, number, duration, seconds, plural)
    environment.filters |= {function.__name__: function for function in words}
    return environment
