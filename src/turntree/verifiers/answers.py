"""Answers compared by what they are: numbers by value, spans and lists by their words, expressions symbolically.

Equality of numbers, spans and lists is equality of a canonical form, hence an equivalence relation. Only characters
that carry no meaning are dropped: a sign, a decimal point, a fraction bar or an exponent always counts.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Hashable, Iterable
from fractions import Fraction
from typing import Literal, get_args

from turntree.core.errors import InputError
from turntree.verifiers import symbolic

AnswerType = Literal["number", "span", "list", "expression"]
"""number: by exact rational value (`read_number`). span: by its words (`words_of`). list: items between `;` (where
there is none, between commas), in any order, each as often; an item is a number or a span. expression: a number, else
symbolically (`verifiers.symbolic`)."""

ANSWER_TYPES: tuple[AnswerType, ...] = get_args(AnswerType)


def equal(given: str, gold: str, answer_type: AnswerType) -> bool | None:
    """Whether two answers are equal by their type; a text that cannot be read as its type equals only itself. None: two
    expressions whose comparison was not decided within the limits (`symbolic`)."""
    if answer_type == "span":
        return words_of(given) == words_of(gold)
    if answer_type == "list":
        return Counter(items_of(given)) == Counter(items_of(gold))
    if given.strip() == gold.strip():
        return True
    numbers = read_number(given), read_number(gold)
    if answer_type == "expression" and None in numbers:
        return _equal_expressions(given, gold)
    return numbers[0] is not None and numbers[0] == numbers[1]


def overlap(given: str, gold: str, answer_type: AnswerType) -> float:
    """F1 of the words of spans (SQuAD) or of the items of lists, as multisets; of the other types 1 where equal."""
    if answer_type == "span":
        return _f1(words_of(given), words_of(gold))
    if answer_type == "list":
        return _f1(items_of(given), items_of(gold))
    return float(equal(given, gold, answer_type) is True)


def check_answer(gold: str, answer_type: AnswerType) -> None:
    """Raises `InputError` for a right answer that is not of its type, so that nothing could ever be equal to it."""
    readable = {
        "number": lambda: read_number(gold) is not None,
        "span": lambda: bool(words_of(gold)),
        "list": lambda: bool(items_of(gold)),
        "expression": lambda: read_number(gold) is not None or _readable_expression(gold),
    }[answer_type]
    if not readable():
        raise InputError(f"{gold[:60]!r} cannot be read as {answer_type}", field="answer", hint="give its type as span")


# numbers


def _unsigned(name: str) -> str:
    """A decimal in the group `name`; thousands are grouped by the same mark throughout."""
    grouped = rf"\d{{1,3}}(?P<{name}_mark>[,_ ])\d{{3}}(?:(?P={name}_mark)\d{{3}})*"
    return rf"(?P<{name}>(?:{grouped}|\d+)(?:\.\d*)?|\.\d+)"


def _braced(name: str) -> str:
    return rf"\{{\s*(?P<{name}_sign>[+-]?)\s*{_unsigned(name)}\s*\}}"


_POWER = r"(?:\s*(?:e|(?:\\times|\\cdot|[x*×·])\s*10\s*(?:\^|\*\*))\s*(?P<power>\{[+-]?\d+\}|[+-]?\d+))?"
_FORMS = tuple(
    re.compile(r"(?P<sign>[+-]?)" + form, re.IGNORECASE)
    for form in (
        _unsigned("over") + _POWER,
        _unsigned("over") + r"\s*/\s*" + _unsigned("under"),
        r"(?P<whole>\d+)\s+(?P<over>\d+)/(?P<under>\d+)",
        rf"(?P<whole>\d*)\s*\\[dtc]?frac\s*{_braced('over')}\s*{_braced('under')}",
        r"(?P<whole>\d*)\s*\\[dtc]?frac\s*(?P<over>\d)\s*(?P<under>\d)",
    )
)
_UNIT_SIGN = re.compile(r"\s*(?:\\?%|°|\^?\{?\\(?:circ|degree)\}?)$")
_MOST_CHARACTERS, _LARGEST_POWER = 200, 1000


def read_number(text: str) -> Fraction | None:
    """The exact value of text that is one number: `-1,234.5`, `2/3`, `1 1/2`, `\\frac{2}{3}`, `6e23`, `3 \\times 10^8`.

    Thousands may be grouped by commas, spaces or underscores, in threes; a comma is never a decimal point. One unit
    sign is dropped, because the question names the unit: a currency before the number, `%` or a degree sign after it
    (so 50% is 50, not 1/2). A number contains no words: "5 million" is not one. None for anything else, a zero
    denominator, more than 200 characters or a power of ten beyond 1000.
    """
    text = _plain_number(text)
    if len(text) > _MOST_CHARACTERS:
        return None
    for form in _FORMS:
        if found := form.fullmatch(text):
            return _value({name: part for name, part in found.groupdict().items() if part})
    return None


def _plain_number(text: str) -> str:
    """Without what surrounds a number: math mode, spacing commands, a unit sign."""
    text = _unified(text[: 4 * _MOST_CHARACTERS]).strip().removesuffix(".")
    text = re.sub(r"\\[!,;: ]|~", " ", text.strip("$").replace("{,}", ",").replace("\\!", "").replace("\\$", "$"))
    text = re.sub(r"^\\[(\[]|\\[)\]]$|\\(?:left|right)\b", "", text).strip()
    text = re.sub(r"^([+-]?)\s*[$€£¥]\s*", r"\1", text)
    text = _UNIT_SIGN.sub("", text)
    text = re.sub(r",\s+(?=\d{3})", ",", text)  # 10,\!000
    return re.sub(r"^([+-])\s+", r"\1", text)


def _value(parts: dict[str, str]) -> Fraction | None:
    signs = [parts.get(name) for name in ("sign", "over_sign", "under_sign")]
    power = int(parts.get("power", "0").strip("{}"))
    under = _decimal(parts.get("under", "1"))
    mixed = "whole" in parts and any(signs[1:])  # 2\\frac{-1}{2}: a product, if anything
    if abs(power) > _LARGEST_POWER or not under or mixed:
        return None
    size = int(parts.get("whole", "0")) + _decimal(parts["over"]) / under
    return (-1) ** signs.count("-") * size * Fraction(10) ** power


def _decimal(text: str) -> Fraction:
    digits = re.sub(r"[^\d.]", "", text)
    return Fraction(f"0{digits}")


# expressions

_MAGNITUDES = "hundred|thousand|million|billion|trillion|dozen"
_UNIT = re.compile(
    rf"(?<=[\d}})])\s*\\(?:text|mbox|mathrm|textrm)\{{(?!\s*(?:{_MAGNITUDES})\b)[A-Za-z.\s]+\}}(?:\^\{{?\d\}}?)?$"
)
_BASE = re.compile(r"(?<=\d)_\{?(\d+)\}?$")  # of a number: 2516_8
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mbox|mathrm)\{([^{}\\$]*)\}")


def _equal_expressions(given: str, gold: str) -> bool | None:
    """Words are compared as spans: as products of letters, "east" and "seat" would be equal."""
    given, gold = _plain_expression(given), _plain_expression(gold)
    if _is_words(given) or _is_words(gold):
        return words_of(_TEXT.sub(r"\1", given)) == words_of(_TEXT.sub(r"\1", gold))
    bases = [found[1] for text in (given, gold) if (found := _BASE.search(text))]
    if len(set(bases)) > 1:  # one may be left out, as a unit may: the question names it
        return False
    return given == gold or symbolic.equal(given, gold)


def _readable_expression(text: str) -> bool:
    text = _plain_expression(text)
    return _is_words(text) or symbolic.readable(text)


def _plain_expression(text: str) -> str:
    """Without math mode, a final full stop, the name of the result (`x =`, `f(x) =`) and the unit at the end (`%`,
    degrees, `\\text{ cm}^2`)."""
    text = re.sub(r"(?:\\[,;:! ]|~|\s)+$", "", text.translate(_MINUSES)).removesuffix(".").strip().strip("$")
    text = re.sub(r"^\\[(\[]|\\[)\]]$|\\displaystyle", "", text).replace("\\$", "").strip()
    text = re.sub(r"^[A-Za-z](?:\([a-z]\))?\s*=(?=[^=,;]+$)", "", text)
    return _UNIT.sub("", _UNIT_SIGN.sub("", text)).strip()


def _is_words(text: str) -> bool:
    """Wholly inside `\\text{}`, or with three letters in a row and no digits, commands or operators."""
    if _TEXT.fullmatch(text):
        return True
    return re.search(r"[^\W\d_]{3}", text) is not None and re.search(r"[\d\\^_=+*/<>{}$]", text) is None


# spans and lists

_ARTICLES = frozenset({"a", "an", "the"})
_WRITTEN_TOGETHER = re.compile("([\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff])")  # kana and Han


def words_of(text: str) -> tuple[str, ...]:
    """The words of a span, normalised as SQuAD's script does (case, punctuation, the articles a/an/the), except:

    a word that is a number becomes its value; punctuation between digits separates (`3-4` is not `34`); symbols such
    as `+` and `=` stay, and the `#` of `C#`; Unicode is compared in NFKC with full case folding, accents counting;
    scripts written without spaces fall into characters. What would become nothing keeps its articles, or else its
    punctuation.
    """
    folded = _WRITTEN_TOGETHER.sub(r" \1 ", _unified(text).casefold())
    words = [part for word in unicodedata.normalize("NFKC", folded).split() for part in _word(word)]
    return tuple(word for word in words if word not in _ARTICLES) or tuple(words) or tuple(folded.split())


def items_of(text: str) -> tuple[Hashable, ...]:
    """The items of a list: what stands between `;`, or where there is none between commas (not those that group
    thousands); brackets around the whole are dropped."""
    text = re.sub(r"^\s*[\[({](.*)[\])}]\s*$", r"\1", text, flags=re.DOTALL)
    parts = text.split(";") if ";" in text else re.split(r",(?!\d{3}(?!\d))", text)
    items = ((read_number(part), words_of(part)) for part in parts if part.strip())
    return tuple(words if number is None else number for number, words in items)


def _word(word: str) -> Iterable[str]:
    core = word.strip("\"'“”‘’()[]{}<>,;:!?*`")
    for text in (word, core):
        if (number := read_number(text)) is not None:
            return (str(number),)
    word = re.sub(r"(?<=\d)[^\w\s]+(?=\d)|(?<=\d)_(?=\d)", " ", core)
    word = re.sub(r"(?<=[^\W\d_])#", "♯", word)  # a symbol, as in music
    return "".join(c for c in word if unicodedata.category(c)[0] != "P").split()


def _f1(given: tuple[Hashable, ...], gold: tuple[Hashable, ...]) -> float:
    shared = (Counter(given) & Counter(gold)).total()
    return 2 * shared / (len(given) + len(gold)) if shared else 0.0


# characters

_RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+", strict=True))
_LOWERED = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_MINUSES = dict.fromkeys(map(ord, "−﹣－‐‑‒–"), "-")


def _unified(text: str) -> str:
    """NFKC, but 10² stays a power, 10₂ an index, 1½ a mixed number, and every minus and dash is `-`."""
    text = re.sub(f"[{''.join(_RAISED)}]+", lambda m: "^" + "".join(_RAISED[c] for c in m.group()), text)
    text = re.sub(f"[{''.join(_LOWERED)}]+", lambda m: "_" + "".join(_LOWERED[c] for c in m.group()), text)
    text = re.sub("(?<=\\d)(?=[¼-¾⅐-⅞])", " ", text)
    return unicodedata.normalize("NFKC", text.translate(_MINUSES)).replace("⁄", "/").translate(_MINUSES)
