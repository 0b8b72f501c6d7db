"""LaTeX of answers in one form, and only where the symbolic library reads it as its writer meant it.

The library under `symbolic` drops what it does not know and guesses much: `f'` is f, `2(3)` is 5, `A^T` is A,
`3\\pmod 5` a product, `\\frac123` a 23rd. So arguments are braced here as TeX does, and a text with anything that is
not known to be read right is not compared at all (`known`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

_UNICODE = {
    "π": r"\pi ", "θ": r"\theta ", "√": r"\sqrt ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ",
    "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "∈": r"\in ",
    "±": r"\pm ", "ℝ": r"\mathbb{R}", "°": r"^\circ ",
}  # fmt: skip
_FUNCTIONS = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp"
_SAME = (
    (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits)(?![a-zA-Z])", ""),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\[dt]binom(?![a-zA-Z])", r"\\binom"),
    (r"\\varnothing(?![a-zA-Z])", r"\\emptyset"),
    (r"\\(?:[lr]vert)(?![a-zA-Z])", "|"),
    (r"\\leqslant(?![a-zA-Z])", r"\\le"),
    (r"\\geqslant(?![a-zA-Z])", r"\\ge"),
    (r"\\dots[cbmio]?(?![a-zA-Z])", r"\\ldots"),
    (r"\\colon(?![a-zA-Z])|\\text\{\s*:\s*\}", ":"),
    (r"\\(?:mathrm|text)\{\s*(or|and)\s*\}|(?<![a-zA-Z\\])(or|and)(?![a-zA-Z])", r"\\text{ or }"),
    (r"\\(?:mathrm|operatorname)\{\s*(" + _FUNCTIONS.replace(" ", "|") + r")\s*\}", r"\\\1 "),
    (r"\\(?:mathrm|mathit|text)\{\s*([A-Za-z])\s*\}", r"\1"),
    (r"\\!|\{\}(?=[\^_])", ""),
    (r"\\(?:sqrt\s*\d|frac\s*\d\s*\d)(?=\d)", "?"),  # for TeX one digit, for most who write it all of them
    (r"(?<!\\)\\[,;: ]|\\q?quad(?![a-zA-Z])|~|\s+", " "),
    (r"(?<![a-zA-Z\\])(" + _FUNCTIONS.replace(" ", "|") + r"|sqrt|pi|infty)(?![a-zA-Z])", r"\\\1 "),
    (r"(?<![a-zA-Z\\])(?:inf|infinity)(?![a-zA-Z])", r"\\infty "),
    (r"(\d(?:\.\d+)?)\s*[eE]([+-]?\d+)(?![\d.])", r"\1\\cdot 10^{\2}"),
    (r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?", r"^\\circ "),
)
_ARGUMENTS = {"\\frac": 2, "\\binom": 2, "\\sqrt": 1, "\\mathbb": 1, "\\overline": 1, "\\vec": 1}
_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|\d+(?:\.\d+)?|\s+|.", re.DOTALL)
_PRODUCTS = (  # of numbers, which the library takes for mixed ones
    (re.compile(r"(\d|\)|\})\s*(?=\\binom)"), r"\1\\cdot "),
    (re.compile(r"((?<![\d.])(?<![_^]\{)\d+(?:\.\d+)?|\([^(),]*\))\s*(?=\([^(),]*\)(?!\s*[_!^]))"), r"\1\\cdot "),
    (re.compile(r"(\([^(),]*\)|\\frac\{[^{}]*\}\{[^{}]*\})\s*(?=\\frac|\d)"), r"\1\\cdot "),
    (re.compile(r"(\\binom\{[^{}]*\}\{[^{}]*\})\s*(?=[\d(a-z]|\\(?:frac|sqrt|pi|binom))"), r"\1\\cdot "),
)
_ROOT = re.compile(r"\\sqrt\[(\d*[13579])\]\{\s*-\s*([^{}+-]*)\}")  # odd, of a negative number: the real one
_COMMANDS = frozenset(
    (
        "frac sqrt binom pi infty cdot times div pm le leq ge geq lt gt ne neq in cup cap setminus emptyset"
        " lfloor rfloor lceil rceil begin end choose sum prod int"
        " alpha beta gamma delta epsilon varepsilon zeta eta theta kappa lambda mu nu xi rho sigma tau phi varphi chi"
        " psi omega Delta Theta Lambda Sigma Phi Psi Omega " + _FUNCTIONS
    ).split()
)
_MISREAD = re.compile(
    r"['\"`?@#&$%:]|\.\.|!\s*!|\d\s*_|\)\s*_|\^\{\s*T\b|\d\s+\d|\d\s*\{|(?<![a-zA-Z\\])I(?![a-zA-Z])|[a-zA-Z]{4,}"
    r"|/\s*(?:\d+(?:\.\d+)?|[a-zA-Z])\s*[a-zA-Z(\\]"  # 1/2x is half of x, or 1/(2x)
)
_MATRIX = re.compile(r"\\begin\{([pbv]?matrix)\}(.*?)\\end\{\1\}", re.DOTALL)
_PARTNER = {"{": "}", "(": ")", "[": "]"}
_LOG = re.compile(r"\\log(?!\s*_)(?![a-zA-Z])")
_OPERATORS = re.compile(r"\\(?:cdot|times|div|pm|leq?|geq?|lt|gt|neq?|in|cup|cap|setminus)(?![a-zA-Z])")


def plain(text: str) -> str:
    """An expression in the one form that is compared."""
    text = text.translate(str.maketrans(_UNICODE))
    for pattern, instead in _SAME:
        text = re.sub(pattern, instead, text)
    text = _braced(_TOKEN.findall(text))
    for pattern, instead in _PRODUCTS:
        text = pattern.sub(instead, text)
    text = _ROOT.sub(r"(-\\sqrt[\1]{\2})", text)
    return re.sub(r"\s+", " ", text).strip()


def broken(text: str) -> bool:
    """Whether a text is no expression in any reading: braces or environments that do not close, an operator without
    its operand."""
    depth = 0
    for token in _TOKEN.findall(text):
        depth += {"{": 1, "}": -1}.get(token, 0)
        if depth < 0:
            return True
    lost = re.search(r"^\s*[*/^_=]|(?:[-+*/^_=<>]|\\(?:cdot|times|frac|sqrt|pm))\s*$", text)
    return depth != 0 or text.count("\\begin") != text.count("\\end") or lost is not None


def known(text: str) -> bool:
    """Whether the library reads every part of a plain expression as it was meant."""
    inside = _MATRIX.sub(lambda found: "(" + re.sub(r"&|\\\\", ",", found[2]) + ")", text)
    inside = inside.replace("\\text{ or }", ",")
    inside = re.sub(r"\\(?:overline|vec|mathbb)\{[a-zA-Z]+\}|\\[{}]|\^\\circ(?![a-zA-Z])", " ", inside)
    inside = _OPERATORS.sub("*", inside)
    names = re.findall(r"\\([a-zA-Z]+|.)", inside)
    return (
        inside.isascii() and _COMMANDS.issuperset(names) and not _MISREAD.search(re.sub(r"\\[a-zA-Z]+", "\\\\", inside))
    )


def readings(one: str, two: str) -> Iterator[tuple[str, str]]:
    """The ways to read two plain expressions, the usual first: `1,234` as two numbers or one, on either side, and
    `\\log` to base ten or e, on both."""
    for texts in product(*([each, *_grouped(each)] for each in (one, two))):
        separate = [re.sub(r"(?<=\d),(?=\d)", ", ", each) for each in texts]
        yield separate[0], separate[1]
        if _LOG.search(one) or _LOG.search(two):
            yield _LOG.sub(r"\\ln", separate[0]), _LOG.sub(r"\\ln", separate[1])


def _grouped(text: str) -> list[str]:
    whole = re.sub(r"(?<![\d.])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])", lambda number: number[0].replace(",", ""), text)
    return [whole] if whole != text else []


def _braced(tokens: list[str]) -> str:
    """With braces around every argument, as TeX takes it: one token where there are none. Behind `^` and `_` a whole
    number, its sign too, and what stands in parentheses: so people write, though TeX takes one digit."""
    left = tokens[::-1]
    return "".join(iter(lambda: _item(left) if left else "", ""))


def _item(left: list[str]) -> str:
    """The next token, with its arguments."""
    token = left.pop()
    if token in ("^", "_") and left and left[-1] != "\\circ":
        return token + _argument(left, script=True)
    if token not in _ARGUMENTS:
        return token
    _skip_space(left)
    root = f"[{_braced(_group(left))}]" if token == "\\sqrt" and left and left[-1] == "[" else ""
    return token + root + "".join(_argument(left, token == "\\sqrt") for _ in range(_ARGUMENTS[token]))


def _argument(left: list[str], script: bool) -> str:
    _skip_space(left)
    if not left:
        return ""
    if left[-1] == "{" or (script and left[-1] == "("):
        return "{" + _braced(_group(left)) + "}"
    if script and left[-1] in ("+", "-") and len(left) > 1:
        return "{" + left.pop() + _item(left) + "}"
    if not script and left[-1][0].isdigit():
        digits = left.pop()
        left += [digits[1:]] * (len(digits) > 1)
        return "{" + digits[0] + "}"
    return "{" + _item(left) + "}"


def _group(left: list[str]) -> list[str]:
    """What stands between the next bracket and its partner (or the end), which are taken off."""
    opening = left.pop()
    closing, inside, depth = _PARTNER[opening], list[str](), 1
    while left:
        token = left.pop()
        depth += (token == opening) - (token == closing)
        if depth == 0:
            break
        inside.append(token)
    return inside


def _skip_space(left: list[str]) -> None:
    while left and left[-1].isspace():
        left.pop()
