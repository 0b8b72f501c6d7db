"""Answers compared by what they are: numbers by value, spans and lists by their words, expressions symbolically.

What is taken off before a comparison (a unit, the name of a result, half of the day) is compared, too. One of two
answers may leave it out, because the question names it: equality is reflexive and symmetric, but not transitive (5 cm,
5, 5 km). What may be read in two ways that disagree is not decided: None, which is no reward.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Literal, get_args

from turntree.core.errors import InputError
from turntree.verify.matching import most_pairs, perfect_matching
from turntree_worlds.qa import symbolic
from turntree_worlds.qa.quantities import (
    SIGNS,
    are_dates,
    are_units,
    combined,
    equal_dates,
    equal_quantities,
    equal_with_colons,
    has_colons,
    marked,
    read_number,
    read_quantity,
    split_unit,
    unified,
    unit_name,
)

AnswerType = Literal["number", "span", "list", "expression"]
"""number: by exact rational value and unit (`quantities`). span: by its words (`words_of`). list: items between `;`
(where there is none, between commas), in any order, each as often; an item is a span. expression: a number, else
symbolically (`symbolic`)."""

ANSWER_TYPES: tuple[AnswerType, ...] = get_args(AnswerType)


def equal(given: str, gold: str, answer_type: AnswerType) -> bool | None:
    """Whether two answers are equal by their type; a text that cannot be read as its type equals only itself. None
    where that is open: the ways to read them disagree, or they were not compared within the limits."""
    if given.strip() == gold.strip():
        return True
    if answer_type == "span":
        return same_span(given, gold)
    if answer_type == "list":
        return _equal_lists(given, gold)
    if answer_type == "number":
        given, gold = marked(given), marked(gold)
    quantities = read_quantity(given), read_quantity(gold)
    if any(each is not None and each.unit for each in quantities):  # beside a unit, a letter is one
        given, gold = (re.sub(r"(?<=\d)\s*([A-Za-z])$", r"\\text{\1}", text.strip()) for text in (given, gold))
        quantities = read_quantity(given), read_quantity(gold)
    if quantities[0] is not None and quantities[1] is not None:
        return equal_quantities(quantities[0], quantities[1])
    return _equal_expressions(given, gold) if answer_type == "expression" else False


def overlap(given: str, gold: str, answer_type: AnswerType) -> float:
    """F1 of the words of spans (SQuAD) or of the items of lists, as multisets; of the other types 1 where equal."""
    if equal(given, gold, answer_type) is True:
        return 1.0
    if answer_type not in ("span", "list"):
        return 0.0
    parts, same = (words_of, _same_word) if answer_type == "span" else (items_of, same_span)
    one, two = parts(given), parts(gold)
    pairs = most_pairs(one, two, same)
    return 2 * pairs / (len(one) + len(two)) if pairs else 0.0


def check_answer(gold: str, answer_type: AnswerType) -> None:
    """Raises `InputError` for a right answer that is not of its type, so that nothing could ever be equal to it."""
    readable: dict[str, Callable[[], bool]] = {
        "number": lambda: read_number(gold) is not None,
        "span": lambda: bool(words_of(gold)),
        "list": lambda: bool(items_of(gold)),
        "expression": lambda: read_quantity(gold) is not None or _readable_expression(gold),
    }
    if not readable[answer_type]():
        raise InputError(f"{gold[:60]!r} cannot be read as {answer_type}", field="answer", hint="give its type as span")


# expressions

_BASE = re.compile(r"\(?(\d[\dA-Fa-f]*)\)?_\{?(\d+)\}?")  # of a number: 2516_8
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mbox|mathrm)\{([^{}\\$]*)\}")
_WORDS_INSIDE = re.compile(r"\\(?:text|mbox|textrm)\{(?!\s*(?:and|or|[A-Za-z]|:)\s*\})[^{}]*[A-Za-z][^{}]*\}")
_NAME = re.compile(
    r"([A-Za-z](?:_\{?\w+\}?)?(?:\([a-z]\))?|\([a-z](?:,\s*[a-z])+\))\s*(=|\\in(?![a-z])|∈)\s*(?=[^=<>]+$)"
)
_NAME_LAST = re.compile(r"\s*=\s*[A-Za-z]$")
_DEGREES = re.compile(r"\^?\{?\\(?:circ|degree)\}?(?![a-z])|°")
_PROSE = re.compile(r"(?<![a-zA-Z\\{])(?!arc(?:sin|cos|tan)|(?:sin|cos|tan)h|sqrt|infty|infinity)[a-zA-Z]{4,}")
_LAST_WORDS = re.compile(r"(?<=[\d%}])\s+[A-Za-z][A-Za-z ,'-]*$")


def _equal_expressions(given: str, gold: str) -> bool | None:
    """Words are compared as spans: as products of letters, "east" and "seat" would be equal."""
    if _is_words(given) or _is_words(gold):
        return same_span(*(_TEXT.sub(r"\1", text.strip(" $")) for text in (given, gold)))
    if are_dates(given, gold):
        return equal_dates(given, gold)
    if has_colons(given) or has_colons(gold):
        return equal_with_colons(given, gold)
    (one, first), (two, second) = _without_unit(given), _without_unit(gold)
    if any(pattern.search(text) for text in (one, two) for pattern in (_WORDS_INSIDE, _PROSE)):
        return _equal_phrases(given, gold)
    if any(bases := [_BASE.fullmatch(text) for text in (one, two)]):
        return _equal_in_bases(one, two, bases)
    one, two = _without_name(one, two)
    numbers = read_number(one), read_number(two)
    same = numbers[0] == numbers[1] if None not in numbers else symbolic.equal(one, two)
    if same is False and ("=" in one) != (
        "=" in two
    ):  # f(2) = 3: what stands on the left may be the name of the result
        last = symbolic.equal(one.rpartition("=")[2], two.rpartition("=")[2])
        return False if last is False else None
    if not same and {first, second} == {"", "°"} and "pi" in one + two:  # an angle in degrees, and in radians
        return symbolic.equal(*(text + r"^\circ" * (unit == "°") for text, unit in ((one, first), (two, second))))
    return combined(same, first, second)


def _readable_expression(text: str) -> bool:
    core, _ = _without_unit(text)
    odd = has_colons(text) or _BASE.fullmatch(core) or _WORDS_INSIDE.search(core)
    return _is_words(text) or bool(odd) or symbolic.readable(_without_name(core, "")[0])


def _without_unit(text: str) -> tuple[str, str]:
    """An expression and its unit. Degrees inside it are one, too, unless it has angles."""
    core, unit = split_unit(text)
    if re.search(r"sin|cos|tan|cot|sec|csc", core):
        return (core + r"^\circ", "") if unit == "°" else (core, unit)
    return (_DEGREES.sub("", core), "°") if unit in ("", "°") and _DEGREES.search(core) else (core, unit)


def _without_name(one: str, two: str) -> tuple[str, str]:
    """Two expressions without the name of the result (`x =`, `f(x) =`, `x \\in`), which one may leave out. Where they
    name it differently, the whole is compared."""
    names = [_NAME.match(text) for text in (one, two)]
    told = [name[1] if name else text if "=" in text else None for name, text in zip(names, (one, two), strict=True)]
    if None not in told and told[0] != told[1]:
        return one, two
    one, two = (text[name.end() :] if name else text for text, name in zip((one, two), names, strict=True))
    if ("=" in one) != ("=" in two):  # 5 = x
        one, two = _NAME_LAST.sub("", one), _NAME_LAST.sub("", two)
    return one, two


def _equal_in_bases(one: str, two: str, bases: Sequence[re.Match[str] | None]) -> bool | None:
    """Of numbers of which one or both name their base. Left out, it may be this one or ten."""
    digits = [base[1].casefold() if base else text.strip() for base, text in zip(bases, (one, two), strict=True)]
    if digits[0] == digits[1]:
        return len({base[2] for base in bases if base}) == 1
    values = [_in_base(base) if base else read_number(text) for base, text in zip(bases, (one, two), strict=True)]
    if None not in values:
        return False if values[0] != values[1] else None
    number, other = (values[0], two) if bases[0] else (values[1], one)
    ways = {symbolic.equal(other, way) for way in (*digits, str(number)) if way != other}
    return False if ways == {False} and number is not None else None


def _in_base(number: re.Match[str]) -> Fraction | None:
    try:
        return Fraction(int(number[1], int(number[2])))
    except ValueError:  # a digit that the base does not have, or no base
        return None


def _equal_phrases(given: str, gold: str) -> bool | None:
    """Of expressions with words inside: as spans. Where these differ, formulas may still say the same, and a number
    with words behind it may be the number alone."""
    texts = [_TEXT.sub(r" \1 ", text) for text in (given, gold)]
    if same_span(*texts):
        return True
    if _PROSE.search(_TEXT.sub("", given + gold)) or not re.search(r"[+*/^=<>\\]", "".join(texts)):
        heads = [read_quantity(_LAST_WORDS.sub("", text)) for text in texts]
        same_head = heads[0] is not None and heads[1] is not None and heads[0].value == heads[1].value
        words = [Counter(re.findall(r"[^\W\d_]+", text)) for text in texts]
        return (
            None if same_head or (words[0] != words[1] and all(are_units(" ".join(each)) for each in words)) else False
        )
    return None


def _is_words(text: str) -> bool:
    """Wholly inside `\\text{}`, or with three letters in a row (or "no") and no digits, commands or operators."""
    text = text.strip().strip("$").strip()
    if _TEXT.fullmatch(text) or text.casefold() == "no":
        return True
    if text.lstrip("+- ").casefold() in ("infinity", "inf"):  # a value, whose sign counts
        return False
    return re.search(r"[^\W\d_]{3}", text) is not None and re.search(r"[\d\\^_=+*/<>{}$()]", text) is None


# spans and lists

_WRITTEN_TOGETHER = re.compile("([\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff])")  # kana and Han
_AROUND = "\"'“”‘’()[]{}<>,;:!?*`"
_DATE = re.compile(r"\b(\d{4})[/.](\d\d)[/.](\d\d)\b")
_COUNT = re.compile(r"([+-]?)([$€£¥]?)(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)([%°€$£¥]?)")
_ALIKE = {"percent": "%", "degree": "°", "degrees": "°", "dollars": "$", "euros": "€"}


def words_of(text: str, *, articles: bool = False) -> tuple[str, ...]:
    """The words of a span, normalised as SQuAD's script does (case, punctuation, the articles a/an/the), except:

    a span that is one number is its value, but not where it begins with 0 or is 50/50 (a name); a number among words
    keeps all its digits (version 1.10), thousands ungrouped, its sign of a unit at its end; punctuation between digits
    stays (`3-4`, `3:4` and `34` differ); symbols such as `+` and `=` stay, and the `#` of `C#`; an A is no article
    where it is a letter (`vitamin A`, `A, B`); Unicode is compared in NFKC with full case folding, accents counting;
    scripts written without spaces fall into characters. What would become nothing keeps its articles (as all spans do
    with `articles`),
    or else its punctuation.
    """
    whole = None if re.match(r"\s*(?:[+~]|-?0\d)", text) else read_quantity(text)
    if whole is not None and whole.unit in {"", *SIGNS} and not ("/" in text and abs(whole.value) >= 1):
        return (f"{whole.value}{whole.unit}",)
    raw = _WRITTEN_TOGETHER.sub(r" \1 ", _DATE.sub(r"\1-\2-\3", unified(text))).split()
    found = list[str]()
    kept = list[str]()
    for k, word in enumerate(raw):
        parts = list(_word(word))
        if found and parts and re.match(r"[+-]?[\d.]", found[-1]):
            sign = _ALIKE.get(parts[0])
            if sign and found[-1][-1].isdigit():
                found[-1] += sign
                kept[-1:] = [found[-1]]
                continue
            parts[0] = (unit_name(parts[0]) if parts[0].isalpha() else "") or parts[0]
        found += parts
        kept += [] if _is_article(raw, k) else parts
    return tuple(kept if kept and not articles else found) or tuple(unified(text).casefold().split())


def same_span(one: str, two: str) -> bool:
    """Whether two spans have the same words, all of them or all but articles. A sign of a unit may be left out."""
    return any(
        len(first) == len(second) and all(map(_same_word, first, second))
        for first, second in ((words_of(one, articles=kept), words_of(two, articles=kept)) for kept in (False, True))
    )


def items_of(text: str) -> tuple[str, ...]:
    """The items of a list: what stands between `;`, or where there is none between commas; brackets around the whole
    are dropped. Where commas have spaces behind them, or a zero (`1,000`), others may group thousands: `1,234, 5`."""
    text = re.sub(r"^\s*[\[({](.*)[\])}]\s*$", r"\1", text, flags=re.DOTALL)
    between = ";" if ";" in text else r",(?!\d{3}(?!\d))" if re.search(r",\s|,0\d\d", text) else ","
    return tuple(part.strip() for part in re.split(between, text) if part.strip())


def _equal_lists(given: str, gold: str) -> bool | None:
    """None where they are equal only if a comma groups thousands: `1,234` and `1234`."""
    if perfect_matching(items_of(given), items_of(gold), same_span):
        return True
    one_number = [re.fullmatch(r"\s*\d{1,2}(?:,\d{3})+\s*", text) for text in (given, gold)]
    return None if any(one_number) and same_span(given, gold) else False


def _same_word(one: str, two: str) -> bool:
    if one == two:
        return True
    bare = [word[:-1] if word[-1:] in SIGNS and word[:1] in "+-.0123456789" else word for word in (one, two)]
    return bare[0] == bare[1] and (bare[0] == one or bare[1] == two)


def _is_article(raw: Sequence[str], k: int) -> bool:
    """Whether a word is an article, and no letter or name: it is followed by another word, nothing stands between them,
    and an A in capitals begins the span."""
    word, following = raw[k].lstrip(_AROUND), raw[k + 1].casefold() if k + 1 < len(raw) else ""
    small = word.casefold()
    if not re.match(r"[^\W_]|[\"'“”‘’(\[{<*`]", following) or following in ("and", "or", "nor"):
        return False
    if small == "an":
        return not following.isascii() or following.lstrip(_AROUND)[:1] in (*"aeiouh8", "")
    return small == "the" or (small == "a" and (word == "a" or k == 0))


def _word(word: str) -> Iterator[str]:
    core = word.strip(_AROUND)
    if re.fullmatch(r"[^\W\d_]-|[<>~#]+[\d.]\S*", word):  # a mark, a bound
        yield core.casefold() if core.endswith("-") else word
        return
    if count := _COUNT.fullmatch(re.sub(r"(?<=\d)\.$", "", core)):
        yield f"{count[1]}{count[3].replace(',', '')}{count[2] or count[4]}"
        return
    core = re.sub(r"(?<=[^\W\d_])#", "♯", unicodedata.normalize("NFKC", core.casefold()))  # a symbol, as in music
    between = re.split(r"((?<=\d)[^\w\s]+(?=\d)|(?<=\d)_(?=\d))", core)
    kept = "".join(c for c in "".join(between[::2]) if unicodedata.category(c)[0] != "P") if len(between) == 1 else core
    yield from kept.split()
