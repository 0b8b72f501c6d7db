"""Mathematical expressions compared symbolically, within limits of time and memory.

Needs the extra `math` (latex2sympy2_extended and sympy). Computer algebra has no time limit, so it runs in processes
that can be killed (`workers`).
"""

from __future__ import annotations

import importlib.util

from turntree.core.errors import TurntreeError
from turntree.verify.workers import Workers
from turntree_worlds.qa import latex

SECONDS = 3.0
_MOST_CHARACTERS = 400
_MOST_REMEMBERED = 65_536
_decided: dict[tuple[str, ...], bool] = {}
_workers = Workers("turntree_worlds.qa.symbolic_worker:answer")


def equal(one: str, two: str) -> bool | None:
    """Whether two LaTeX expressions are equal. False where one is broken. None where that is open: the library may not
    read them as they were meant (`latex`), the ways to read them disagree, it was not decided within `SECONDS` of CPU
    time, or one has over 400 characters. Symmetric. Raises `TurntreeError` where the extra is missing. Several threads
    may ask at once: an undecided comparison delays no other."""
    if max(len(one), len(two)) > _MOST_CHARACTERS:
        return None
    if latex.broken(one) or latex.broken(two):
        return False
    one, two = sorted((latex.plain(one), latex.plain(two)))
    ways = list(dict.fromkeys(latex.readings(one, two)))
    if ways[0][0] == ways[0][1]:
        return True
    if not (latex.known(one) and latex.known(two)):
        return None
    first = _asked(*ways[0])
    return first if all(_asked(*way) is first for way in ways[1:]) else None


def readable(text: str) -> bool:
    """Whether a text is an expression that can be compared."""
    plain = latex.plain(text) if len(text) <= _MOST_CHARACTERS else ""
    return bool(plain) and latex.known(plain) and _asked(plain) is True


def _asked(*texts: str) -> bool | None:
    """What a process decides. What it does not decide in time is not remembered: another time it may."""
    if importlib.util.find_spec("latex2sympy2_extended") is None:
        raise TurntreeError("needs an extra: pip install 'turntree[math]'")
    if (decided := _decided.get(texts)) is None and (decided := _workers.ask(texts, SECONDS)) is not None:
        if len(_decided) >= _MOST_REMEMBERED:
            _decided.clear()
        _decided[texts] = decided
    return decided
