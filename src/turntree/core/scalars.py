"""Numbers and truths as foreign code gives them: of Python, numpy or torch. A log, a tree on disk or a checkpoint holds
plain ones only. Every reward and every flag of an environment, a tool, an agent or a function is read here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turntree.core.foreign import EnvironmentFault, call_foreign

MOST = 3.4028234e38  # that float32 holds, which advantages become; sums of squares of much more overflow before
MOST_WEIGHT = 1e6  # of a reward or a criterion: beside more, a float32 sum loses what the others say


def number(value: Any) -> float:
    """`value` as a plain number. Raises `ValueError`, whose text says what it is instead: no number (a text, an array
    of several), not finite, or more than float32 holds."""
    if type(value) is float and abs(value) <= MOST:  # as nearly all are
        return value
    try:
        held = _item(value)
        if isinstance(held, str | bytes):  # numpy's know how to become numbers
            raise EnvironmentFault
        found = call_foreign(lambda: float(held.__float__()))  # a text has none, an array of several refuses
    except EnvironmentFault as error:
        raise ValueError(f"{type(value).__name__}, not a number") from error
    if not abs(found) <= MOST:
        raise ValueError(f"{found}" if found * 0 != 0 else f"{found}, which float32 does not hold")
    return found


def known_numbers(values: Mapping[str, Any]) -> dict[str, float | None]:
    """The plain numbers of a verdict's parts; one that is none is unknown."""
    found: dict[str, float | None] = {}
    for name, value in values.items():
        try:
            found[str(name)] = number(value)
        except ValueError:
            found[str(name)] = None
    return found


def truth(value: Any) -> bool:
    """`value` as True or False. Raises `ValueError` for what is neither, a number or a text among it."""
    found = _item(value)
    if not isinstance(found, bool):
        shown = f"{found!r}"[:80] if isinstance(found, str | int | float | None) else type(value).__name__
        raise ValueError(f"is neither true nor false ({shown})")
    return found


def given_number(name: str, value: Any) -> float:
    """`number` of foreign code. Raises `EnvironmentFault`, which names it."""
    try:
        return number(value)
    except ValueError as error:
        raise EnvironmentFault(f"answered a {name} that is not a finite number ({error})") from error


def given_truth(name: str, value: Any) -> bool:
    """`truth` of foreign code. Raises `EnvironmentFault`, which names it."""
    try:
        return truth(value)
    except ValueError as error:
        raise EnvironmentFault(f"answered {name} that {error}") from error


def _item(value: Any) -> Any:
    """What a scalar of numpy or torch holds; anything else as it is."""
    try:
        return call_foreign(value.item) if hasattr(value, "item") else value
    except EnvironmentFault:  # an array of several
        return value
