"""Pictures as inline SVG in pixels: the same data give the same bytes, text stays text, and what is no data follows the
page's colour scheme. A plotting library would be the largest part of an installation."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

INK, MUTED, EDGE, PALE, GRID, WASH = "#22252a", "#5d6570", "#9aa2ac", "#c9ced5", "#e8ebee", "#f4f6f8"
PAGE = "#ffffff"
# What follows the page's colour scheme, by the names that style.css has. The colours of data do not.
_THEMED = {PAGE: "page", "#000000": "ink", INK: "ink", MUTED: "muted", EDGE: "edge", PALE: "pale"}
_THEMED |= {GRID: "grid", WASH: "wash"}
TEXT = 14  # pixels high
CHARACTER = 0.56 * TEXT  # pixels wide, about: the reader's browser has the font
LINE = 22  # pixels from one line of a legend to the next


def themed(markup: str) -> str:
    """A colour, or a tag, with inks, lines and backgrounds as variables of the page: a dark page has light ones."""

    def named(found: re.Match[str]) -> str:
        name = _THEMED.get(found[0].lower())
        return found[0] if name is None else f"var(--{name}, {found[0]})"

    return re.sub(r"#[0-9a-fA-F]{6}(?![\w.-])", named, markup)


def written(value: float, digits: int = 10) -> str:
    return f"{value:.{digits}g}".replace("-", "\N{MINUS SIGN}")


def in_percent(value: float) -> str:
    return f"{100 * value:.0f}".replace("-", "\N{MINUS SIGN}")


@dataclass(frozen=True)
class Scale:
    """From values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low or 1) * (self.end - self.start)

    def ticks(self, most: int = 5, *, whole: bool = False) -> list[float]:
        """Round values from low to high, at most so many; `whole`: what is counted has no tick at 1.5."""
        rough = (self.high - self.low or 1) / most
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * one for one in (1, 2, 2.5, 5, 10) if power * one >= rough * (1 - 1e-9))
        step = max(1.0, math.ceil(step)) if whole else step
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


@dataclass
class Picture:
    """What was drawn so far, in pixels from the upper left corner. `name` keeps ids apart on a page."""

    name: str
    width: float
    height: float
    parts: list[str] = field(default_factory=list[str])

    def _add(self, tag: str, style: str, text: str | None = None, **attributes: float | str) -> None:
        placed = "".join(
            f' {key.replace("_", "-")}="{value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")}"'
            for key, value in attributes.items()
        )
        opening = themed(f'<{tag}{placed} style="{style}"')
        self.parts.append(f"{opening}/>" if text is None else f"{opening}>{escape(text)}</{tag}>")

    def line(
        self, points: Iterable[tuple[float, float]], tint: str, width: float = 1.0, more: str = "", cap: str = "butt"
    ) -> None:
        placed = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        style = f"fill: none; stroke: {tint}; stroke-width: {width:g}; stroke-linecap: {cap}; {more}".rstrip("; ")
        self._add("polyline", style, points=placed)

    def bar(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        """`fill`: a colour, or one of `hatched`."""
        edge = f"; stroke: {MUTED}; stroke-width: 0.8" if fill.startswith("url") else ""
        self._add("rect", f"fill: {fill}{edge}", x=x, y=y, width=width, height=height)

    def text(self, x: float, y: float, said: str, anchor: str = "start", tint: str = INK, more: str = "") -> None:
        style = f"font-size: {TEXT}px; text-anchor: {anchor}; fill: {tint}; {more}".rstrip("; ")
        self._add("text", style, said, x=x, y=y)

    def mark(self, x: float, y: float, shape: str, tint: str, *, hollow: bool = False, size: float = 5) -> None:
        """A marker by the letter that plotting libraries have for its shape."""
        style = f"fill: {PAGE if hollow else tint}; stroke: {tint}; stroke-width: 1.6"
        if shape == "o":
            self._add("circle", style, cx=x, cy=y, r=size)
        elif shape in _LINES:
            for first, second in _LINES[shape]:
                self.line([(x + size * a, y + size * b) for a, b in (first, second)], tint, 2.4)
        else:
            corners = " ".join(f"{x + size * a:.2f},{y + size * b:.2f}" for a, b in _CORNERS[shape])
            self._add("polygon", style, points=corners)

    def hatched(self, tint: str, *, rising: bool) -> str:
        """A fill of thin lines over a colour."""
        name = f"{self.name}-{'rising' if rising else 'falling'}"
        turn = -45 if rising else 45
        rows = f'<rect width="6" height="6" style="fill: {tint}"/><path d="M0 3H6" style="stroke: {MUTED}"/>'
        turned = f'patternUnits="userSpaceOnUse" patternTransform="rotate({turn})"'
        self.parts.append(f'<defs><pattern id="{name}" width="6" height="6" {turned}>{themed(rows)}</pattern></defs>')
        return f"url(#{name})"

    def legend(self, items: Sequence[tuple[str, Callable[[float, float], None]]], left: float = 0) -> float:
        """What each colour stands for, from the top in as many lines as it takes: the pixels that it took. An item
        draws its sign around a point."""
        x, y = left, LINE / 2
        for words, sign in items:
            wide = 24 + CHARACTER * len(words) + 22
            if x > left and x + wide - 22 > self.width:
                x, y = left, y + LINE
            sign(x + 9, y)
            self.text(x + 24, y + TEXT * 0.36, words)
            x += wide
        return y + LINE / 2 + 4

    def swatch(self, fill: str) -> Callable[[float, float], None]:
        return lambda x, y: self.bar(x - 9, y - 6, 18, 12, fill)

    def svg(self) -> str:
        """The element, scalable, with nothing that points outside."""
        box = f"0 0 {self.width:g} {self.height:g}"
        style = f"--width: {self.width:.0f}px; max-width: {self.width:.0f}px"
        opening = f'<svg viewBox="{box}" style="{style}" aria-hidden="true" focusable="false">'
        return opening + "\n".join(self.parts) + "</svg>"


_LINES = {
    "|": [((0, -1.6), (0, 1.6))],
    "P": [((0, -1), (0, 1)), ((-1, 0), (1, 0))],
    "X": [((-0.8, -0.8), (0.8, 0.8)), ((-0.8, 0.8), (0.8, -0.8))],
    "*": [((0, -1), (0, 1)), ((-0.9, -0.5), (0.9, 0.5)), ((-0.9, 0.5), (0.9, -0.5))],
}
_CORNERS = {
    "s": [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
    "D": [(0, -1.15), (1.15, 0), (0, 1.15), (-1.15, 0)],
    "^": [(0, -1.1), (1.1, 0.9), (-1.1, 0.9)],
    "v": [(0, 1.1), (1.1, -0.9), (-1.1, -0.9)],
}


def x_axis(picture: Picture, x: Scale, y: float, ticks: Iterable[tuple[float, str]], label: str = "") -> None:
    """Below the plot, whose lower edge is `y`: the line, the values under it, and what they are."""
    picture.line([(x.start, y), (x.end, y)], EDGE)
    for value, words in ticks:
        picture.text(x(value), y + 18, words, "middle")
    if label:
        picture.text((x.start + x.end) / 2, y + 40, label, "middle")


def y_axis(picture: Picture, y: Scale, x: Scale, ticks: Iterable[tuple[float, str]], label: str = "") -> None:
    """At the left of the plot, with a thin line across it at every value."""
    for value, words in ticks:
        picture.line([(x.start, y(value)), (x.end, y(value))], GRID)
        picture.text(x.start - 7, y(value) + TEXT * 0.36, words, "end")
    picture.line([(x.start, y.start), (x.start, y.end)], EDGE)
    if label:
        middle = (y.start + y.end) / 2
        picture.text(
            14, middle, label, "middle", more=f"transform: rotate(-90deg); transform-origin: 14px {middle:.1f}px"
        )
