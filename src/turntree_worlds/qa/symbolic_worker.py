"""The process in which expressions are compared: a question is a list of one or two LaTeX texts.

One text: can it be read? Two: are they equal? Imported only in such a process (`workers`), which can be killed at any
time: computer algebra has no upper bound on its time. No text is ever evaluated as Python; the parser (ANTLR) builds
unevaluated expressions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from sympy.core.random import seed
from sympy.core.relational import Relational
from sympy.logic.boolalg import Boolean
from sympy.matrices import MatrixBase

_NORMAL = NormalizationConfig(boxed="none")  # `latex.plain` does the rest; the library's guesses are not wanted
_CASE_COUNTS = ConversionConfig(lowercase_symbols=False)


def parse(text: str) -> Any:
    """The expression in LaTeX text. `i` is the imaginary unit, degrees are angles, and decimals are exact."""
    parsed = latex2sympy(text, convert_degrees=True, normalization_config=_NORMAL, conversion_config=_CASE_COUNTS)
    return exact(parsed)


def exact(value: Any) -> Any:
    if isinstance(value, MatrixBase):
        return value.applyfunc(exact)
    if isinstance(value, list | tuple):
        return sympy.Tuple(*map(exact, value))
    exacts = {number: sympy.Rational(str(number)) for number in value.atoms(sympy.Float)}
    return value.xreplace(exacts | {sympy.Symbol("i"): sympy.I})


def equal(one: Any, two: Any) -> bool | None:
    """Equality by structure (matrices, points, sets, intervals, relations) and, between expressions, by value. None
    where that is open: a relation against a set of numbers, or what sympy cannot decide."""
    if any(value.has(sympy.zoo, sympy.nan) for value in (one, two)):
        return False  # what has no value equals nothing
    kind = next((kind for kind in _KINDS if all(_are(kind, one, two))), None)
    if kind is sympy.FiniteSet:
        written = [list(getattr(items, "_unsorted_args", items.args)) for items in (one, two)]  # as often as they are
        if len(written[0]) == len(written[1]) or [len(one), len(two)] == [len(items) for items in written]:
            return _paired(*written)
        return None if _paired(list(one), list(two)) is not False else False  # one only says an item more than once
    if one == two:
        return True
    if kind is MatrixBase:
        return one.shape == two.shape and _all(equal(a, b) for a, b in zip(one.flat(), two.flat(), strict=True))
    if kind is sympy.Tuple:
        return len(one) == len(two) and _all(equal(a, b) for a, b in zip(one, two, strict=True))
    if kind is sympy.Interval:
        open_ends = (one.left_open, one.right_open) == (two.left_open, two.right_open)
        return open_ends and _all((equal(one.start, two.start), equal(one.end, two.end)))
    if kind in (sympy.Union, sympy.And):
        return _paired(list(one.args), list(two.args))
    if kind is Relational:
        return _same_relation(one, two)
    if any(_are(_STRUCTURES, one, two)):
        told = {isinstance(value, Boolean) for value in (one, two) if isinstance(value, sympy.Set | Boolean)}
        return None if len(told) == 2 else False
    return _zero(one - two)


_KINDS = (sympy.FiniteSet, MatrixBase, sympy.Tuple, sympy.Interval, sympy.Union, sympy.And, Relational)
_STRUCTURES = (sympy.Set, Boolean, sympy.Tuple, MatrixBase)


def _are(kind: Any, *values: Any) -> list[bool]:
    return [isinstance(value, kind) for value in values]


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    found = set(verdicts)
    return False if False in found else None if None in found else True


def _paired(left: list[Any], right: list[Any]) -> bool | None:
    """Whether the items can be paired off (equality is transitive, so any pairing will do)."""
    if len(left) != len(right):
        return False
    open_ = False
    for item in left:
        verdicts = [equal(item, other) for other in right]
        if True not in verdicts and None not in verdicts:
            return False
        open_ |= True not in verdicts
        del right[verdicts.index(True if True in verdicts else None)]
    return None if open_ else True


def _same_relation(one: Any, two: Any) -> bool | None:
    """Whether one is the other times a number, all on one side: turned around where the number is negative."""
    ratio = sympy.simplify((one.lhs - one.rhs).doit() / (two.lhs - two.rhs).doit())
    if not ratio.is_number or not ratio.is_finite or ratio == 0:
        return False
    if isinstance(one, sympy.Eq | sympy.Ne):
        return isinstance(two, one.func)
    return isinstance(two if ratio.is_positive else two.reversed, one.func) if ratio.is_real else None


def _zero(difference: Any) -> bool | None:
    difference = difference.replace(lambda e: isinstance(e, sympy.UnevaluatedExpr), lambda e: e.args[0])
    settled = difference.doit()
    if settled == 0:
        return True
    if settled.has(sympy.nan, sympy.zoo, sympy.oo):
        return False
    same = settled.equals(0)
    if same is True or _odd_root(difference):
        return same or None
    return False if same is False or _differs(settled) else None


def _differs(value: Any) -> bool:
    """Whether it is another number than 0 at one point: sympy leaves `a/b - b/a` open."""
    names = sorted(value.free_symbols, key=str)
    number = value.subs({name: sympy.Rational(sympy.prime(5 + k), 7) for k, name in enumerate(names)}).evalf(20)
    return number.is_number is True and bool(abs(number) > 1e-9)


def _odd_root(value: Any) -> bool:
    """Whether it has a root of a negative number that may be meant as a real one: `(-8)^{1/3}`."""
    powers = value.atoms(sympy.Pow)
    return any(p.base.is_negative and p.exp.is_Rational and p.exp.q % 2 and p.exp.q > 1 for p in map(_settled, powers))


def _settled(power: Any) -> Any:
    return sympy.Pow(power.base.doit(), power.exp.doit(), evaluate=False)


def answer(texts: list[str]) -> bool | None:
    """None: open, or the library reads no such thing."""
    seed(0)  # sympy compares at random points
    try:
        values = [parse(text) for text in texts]
        return True if len(values) == 1 else equal(*values)
    except (Exception, RecursionError, MemoryError):  # a policy's text may raise anything
        return None


sys.setrecursionlimit(2000)
parse(r"\frac{x}{2}+1")  # builds the parser's tables
