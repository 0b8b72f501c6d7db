"""What every page of a report shares: its templates and the words for numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from turntree.report import wording

if TYPE_CHECKING:
    from jinja2 import Environment

_FILTERS = (
    wording.label,
    wording.percent,
    wording.span,
    wording.points,
    wording.count,
    wording.number,
    wording.duration,
    wording.seconds,
    wording.plural,
)


def templates(*others: str) -> Environment:
    """The templates of this package and of those named; an unknown name in one is an error."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(package) for package in ("turntree.report", *others)]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {function.__name__: function for function in _FILTERS}
    return environment
