"""The process in which expressions are compared: a question is a list of one or two LaTeX texts.

One text: can it be read? Two: are they equal? Run by `symbolic` as a script that can be killed at any time: computer
algebra has no upper bound on its time. No text is ever evaluated as Python; the parser (ANTLR) builds unevaluated
expressions.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from sympy.core.random import seed
from sympy.core.relational import Relational
from sympy.logic.boolalg import Boolean
from sympy.matrices import MatrixBase

from turntree.verifiers.workers import serve

_NORMAL = NormalizationConfig(malformed_operators=True, nits=True, boxed="none")
_CASE_COUNTS = ConversionConfig(lowercase_symbols=False)


def parse(text: str) -> Any:
    """The expression in LaTeX text. `i` is the imaginary unit, and decimals are exact."""
    parsed = latex2sympy(text, normalization_config=_NORMAL, conversion_config=_CASE_COUNTS)
    return exact(parsed)


def exact(value: Any) -> Any:
    if isinstance(value, MatrixBase):
        return value.applyfunc(exact)
    if isinstance(value, list | tuple):
        return sympy.Tuple(*map(exact, value))
    exacts = {number: sympy.Rational(str(number)) for number in value.atoms(sympy.Float)}
    return value.xreplace(exacts | {sympy.Symbol("i"): sympy.I})


def equal(one: Any, two: Any) -> bool:
    """Equality by structure (matrices, points, sets, intervals, relations) and, between expressions, by value."""
    if one == two:
        return True
    if isinstance(one, MatrixBase) or isinstance(two, MatrixBase):
        both = isinstance(one, MatrixBase) and isinstance(two, MatrixBase) and one.shape == two.shape
        return both and all(equal(a, b) for a, b in zip(one.flat(), two.flat(), strict=True))
    if isinstance(one, sympy.Tuple) and isinstance(two, sympy.Tuple):
        return len(one) == len(two) and all(equal(a, b) for a, b in zip(one, two, strict=True))
    if isinstance(one, sympy.FiniteSet) and isinstance(two, sympy.FiniteSet):
        return len(one) == len(two) and _matched(list(one), list(two))
    if isinstance(one, sympy.Interval) and isinstance(two, sympy.Interval):
        open_ends = (one.left_open, one.right_open) == (two.left_open, two.right_open)
        return bool(open_ends) and equal(one.start, two.start) and equal(one.end, two.end)
    if isinstance(one, Relational) and isinstance(two, Relational):
        return _same_relation(one, two)
    if isinstance(one, sympy.Set | Boolean | sympy.Tuple) or isinstance(two, sympy.Set | Boolean | sympy.Tuple):
        return False
    return _zero(one - two)


def _matched(left: list[Any], right: list[Any]) -> bool:
    """Whether the items can be paired off (equality is transitive, so any pairing will do)."""
    for item in left:
        partner = next((k for k, other in enumerate(right) if equal(item, other)), None)
        if partner is None:
            return False
        del right[partner]
    return True


def _same_relation(one: Relational, two: Relational) -> bool:
    """The same relation between the same sides; an equation also read from right to left, < also as >."""
    if isinstance(two, one.func) and equal(one.lhs, two.lhs) and equal(one.rhs, two.rhs):
        return True
    turned = two.reversed
    return isinstance(turned, one.func) and equal(one.lhs, turned.lhs) and equal(one.rhs, turned.rhs)


def _zero(difference: Any) -> bool:
    difference = difference.replace(lambda e: isinstance(e, sympy.UnevaluatedExpr), lambda e: e.args[0])
    settled = difference.doit()
    if settled == 0:
        return True
    if settled.has(sympy.nan, sympy.zoo, sympy.oo):
        return False
    return settled.equals(0) is True


def answer(texts: list[str]) -> bool:
    seed(0)  # sympy compares at random points
    try:
        values = [parse(re.sub(r"\s+", " ", text)) for text in texts]
        return bool(len(values) == 1 or equal(*values))
    except (Exception, RecursionError, MemoryError):  # a policy's text may raise anything
        return False


if __name__ == "__main__":
    sys.setrecursionlimit(2000)
    parse(r"\frac{x}{2}+1")  # builds the parser's tables
    serve(answer)
