"""Numbers and truths as foreign code gives them: of Python, numpy or torch. A log, a tree on disk or a checkpoint holds
plain ones only."""

from __future__ import annotations

from typing import Any

MOST = 3.4028234e38  # that float32 holds, which advantages become; sums of squares of much more overflow before
MOST_WEIGHT = 1e6  # of a reward or a criterion: beside more, a float32 sum loses what the others say


def number(value: Any) -> float:
    """`value` as a plain number. Raises `ValueError`, whose text says what it is instead: no number (a text, an array
    of several), not finite, or more than float32 holds."""
    try:
        found = float(value.__float__())  # a text has none, an array of several refuses
    except Exception as error:  # the value is foreign code too
        raise ValueError(f"{type(value).__name__}, not a number") from error
    if not abs(found) <= MOST:
        raise ValueError(f"{found}" if found * 0 != 0 else f"{found}, which float32 does not hold")
    return found


def truth(value: Any) -> bool:
    """`value` as True or False. Raises `ValueError` for what is neither, a number among it."""
    try:
        found = value.item() if hasattr(value, "item") else value
    except Exception:  # an array of several
        found = value
    if not isinstance(found, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return found
