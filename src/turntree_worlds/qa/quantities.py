"""Numbers with their units, and times of day: read exactly, compared with everything that was written.

What a reader takes off (a unit, a currency, half of the day) is compared, too. One of two answers may leave it out,
because the question names it; two different ones are two answers.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple


class Quantity(NamedTuple):
    """A number and what it counts: the name of a unit (`unit_name`), empty where none is named."""

    value: Fraction
    unit: str = ""


def read_quantity(text: str) -> Quantity | None:
    """The exact value of text that is one number with its unit, as `read_number` takes it. A unit is a sign (a
    currency, `%`, degrees), text in LaTeX (`5\\,\\text{m/s}`), or the known name of one (`5 km`)."""
    text, unit = split_unit(text)
    if len(text) <= _MOST_CHARACTERS:
        text = re.sub(r"^([+-])\s+", r"\1", text)
        for form in _FORMS:
            if found := form.fullmatch(text):
                value = _value({name: part for name, part in found.groupdict().items() if part})
                return None if value is None else Quantity(value, unit)
    return None


def read_number(text: str) -> Fraction | None:
    """The exact value of text that is one number: `-1,234.5`, `2/3`, `1 1/2`, `\\frac{2}{3}`, `6e23`, `3 \\times 10^8`,
    `0.\\overline{3}`.

    Thousands may be grouped by commas, spaces or underscores, in threes; a comma is never a decimal point. It may have
    one sign of a unit: a currency, `%` or degrees (so 50% is 50, not 1/2). A number contains no words: "5 million" is
    not one. None for anything else, a zero denominator, more than 200 characters or a power of ten beyond 1000.
    """
    found = None if _WORD.search(text) else read_quantity(text)
    return found.value if found is not None and (not found.unit or found.unit in SIGNS) else None


def combined(same: bool | None, one: str, two: str) -> bool | None:
    """Whether two answers are equal, from whether they are without their units, and from these units. None where that
    is open: they may be the same in other units, a percentage may be a share, and "10 million" may be 10,000,000."""
    if one == two or same is None:
        return same
    if _MAGNITUDES & {*one.split(), *two.split()}:
        return False if same else None
    if same:
        return not (one and two)
    return None if _kind(one) == _kind(two) != Counter() else False


def equal_quantities(one: Quantity, two: Quantity) -> bool | None:
    for share, percent in ((one, two), (two, one)):
        if (share.unit, percent.unit) == ("", "%") and percent.value and percent.value == 100 * share.value:
            return None
    return combined(one.value == two.value, one.unit, two.unit)


# times of day and ratios

_COLONS = re.compile(r"\d[\d./]*(?:\s*:\s*\d[\d./]*)+")
_CLOCK = re.compile(r"(\d\d?):(\d\d)(:\d\d)?")


def equal_with_colons(one: str, two: str) -> bool | None:
    """Of two answers of which one is a time of day or a ratio: by their parts, as written. A time without its half of
    the day may be one of 24 hours; a ratio may be another one or a quotient: None."""
    (one, first), (two, second) = split_unit(one), split_unit(two)
    parts = [tuple(read_number(part) for part in text.split(":")) for text in (one, two)]
    if parts[0] == parts[1] and None not in parts[0]:
        return combined(True, first, second)
    clocks = [_CLOCK.fullmatch(text) for text in (one, two)]
    if clocks[0] and clocks[1]:
        return _equal_times(_minute(clocks[0], first), _minute(clocks[1], second))
    if any(clocks) or None in (*parts[0], *parts[1]):
        return False
    return None if _share(parts[0]) == _share(parts[1]) is not None else False


_DATE = re.compile(r"\d{4}([-/.])\d\d?\1\d\d?|\d\d?([-/.])\d\d?\2\d{4}")
_RANGE = re.compile(r"\d+\s*[-\u2013]\s*\d+")


def are_dates(one: str, two: str) -> bool:
    """Whether one answer is a date, or both are ranges: no differences and quotients, though they look like it."""
    texts = [text.strip(" $") for text in (one, two)]
    return any(map(_DATE.fullmatch, texts)) or all(map(_RANGE.fullmatch, texts))


def equal_dates(one: str, two: str) -> bool | None:
    """By their numbers, as written; None for the same ones in another order, and beside what is no date."""
    left, right = ([int(part) for part in re.findall(r"\d+", text)] for text in (one, two))
    if left == right or len(left) != len(right) or sorted(left) == sorted(right):
        return True if left == right else None
    return False


def _share(parts: Sequence[Fraction | None]) -> Fraction | None:
    """The quotient that a number or a ratio of two is."""
    over, under = parts[0], parts[1] if len(parts) == 2 else Fraction(1)
    return over / under if over is not None and under and len(parts) < 3 else None


def has_colons(text: str) -> bool:
    return _COLONS.fullmatch(split_unit(text)[0]) is not None


def _minute(clock: re.Match[str], unit: str) -> tuple[str, bool | None]:
    """The time in half a day, and whether it is the second one (None: not said)."""
    hour = int(clock[1])
    half = {"am": False, "pm": True}.get(unit, hour >= 12 if hour > 12 or hour == 0 else None)
    return f"{hour % 12}:{clock[2]}{clock[3] or ''}", half


def _equal_times(one: tuple[str, bool | None], two: tuple[str, bool | None]) -> bool | None:
    if one[0] != two[0]:
        return False
    return None if None in (one[1], two[1]) else one[1] == two[1]


# numbers


def _unsigned(name: str) -> str:
    """A decimal in the group `name`; thousands are grouped by the same mark throughout."""
    grouped = rf"[1-9]\d{{0,2}}(?P<{name}_mark>[,_ ])\d{{3}}(?:(?P={name}_mark)\d{{3}})*"
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
        r"(?P<over>\d*\.\d*)\\(?:overline|bar|dot)\s*(?:\{(?P<again>\d+)\}|(?P<again_>\d))",
    )
)
_MOST_CHARACTERS, _LARGEST_POWER = 200, 1000


def _value(parts: dict[str, str]) -> Fraction | None:
    signs = [parts.get(name) for name in ("sign", "over_sign", "under_sign")]
    power = int(parts.get("power", "0").strip("{}"))
    under = _decimal(parts.get("under", "1"))
    mixed = "whole" in parts and any(signs[1:])  # 2\\frac{-1}{2}: a product, if anything
    if abs(power) > _LARGEST_POWER or not under or mixed:
        return None
    size = int(parts.get("whole", "0")) + _decimal(parts["over"]) / under
    again = parts.get("again", parts.get("again_", ""))  # the digits that repeat for ever
    if again:
        size += Fraction(int(again), (10 ** len(again) - 1) * 10 ** len(parts["over"].partition(".")[2]))
    return (-1) ** signs.count("-") * size * Fraction(10) ** power


def _decimal(text: str) -> Fraction:
    digits = re.sub(r"[^\d.]", "", text)
    return Fraction(f"0{digits}")


# units

_KINDS = {
    "length": "mm millimeter millimetre, cm centimeter centimetre, m meter metre, km kilometer kilometre, in inch"
    " inches, ft foot feet, yd yard, mi mile",
    "mass": "mg milligram, g gram, kg kilogram, oz ounce, lb lbs pound, t ton tonne",
    "time": "ms millisecond, s sec second, min minute, h hr hour, d day, wk week, mo month, yr year",
    "volume": "ml mL milliliter millilitre, ML megaliter megalitre, l L liter litre, gal gallon, qt quart, pt pint,"
    " cup",
    "money": "$ dollar usd, ¢ cent, € euro eur, £ gbp, ¥ yen",
    "temperature": "C celsius, F fahrenheit, K kelvin",
    "angle": "° degree deg, rad radian",
    "half": "am, pm",
    "share": "% percent percentage pct",
}
_KNOWN = {
    spelling: (names.split()[0], kind)
    for kind, listed in _KINDS.items()
    for names in listed.split(",")
    for spelling in names.split()
}
_MILLI = frozenset({"mm", "mg", "ms", "ml"})  # with a capital M they would be a million, not a thousandth
SIGNS = frozenset("%°$€£¥¢")
_MAGNITUDES = frozenset({"dozen", "hundred", "thousand", "million", "billion", "trillion"})
_SPACE = r"(?:\s|~|\\[,;:! ]|\\q?quad(?![a-z]))"
_TEXT = r"\\(?:text|mbox|mathrm|textrm|textit|textbf)\s*\{(?:[^{}$\\]|\\[,;: ]|\^\{-?\d\})*\}(?:\^\{?-?\d\}?)?"
_SIGN = r"\\?%|\\?\$|[€£¥¢°]|\^?\{?\\(?:circ|degree)\}?(?![a-z])"
_UNITS = re.compile(
    rf"(?:(?:{_SPACE}|/|\\cdot(?![a-z]))*(?:{_TEXT}|\\frac\{{{_TEXT}\}}\{{{_TEXT}\}}|{_SIGN}))+{_SPACE}*$"
)
_WORDS = re.compile(r"(?<=[\d})\s])[A-Za-z][A-Za-z./ ]*(?:\^\{?-?\d\}?)?$")
_WORD = re.compile(r"\\(?:text|mbox|mathrm)|(?<![\\a-zA-Z])[a-zA-Z]{2}")
_CURRENCY = re.compile(r"^([+-]?)\s*(\\?\$|[€£¥])\s*")
_CONSTANT = re.compile(r"\\mathrm\{\s*([ei])\s*\}")


def split_unit(text: str) -> tuple[str, str]:
    """An answer without what surrounds it (math mode, a final full stop) and without its unit, and the unit's name."""
    if len(text) > 4 * _MOST_CHARACTERS:
        return text, ""
    text, unit = _unwrapped(_CONSTANT.sub(r"\1", unified(text))), ""
    if found := _CURRENCY.match(text):
        text, unit = found[1] + text[found.end() :], found[2][-1]
    for found in (_UNITS.search(text), _WORDS.search(text)):
        if found and _ends(text[: found.start()]) and (found.re is _UNITS or are_units(found[0])):
            text, unit = text[: found.start()].rstrip(), f"{unit} {found[0]}"
            break
    text = re.sub(rf"(?:{_SPACE})+$", "", text)
    return text, unit_name(unit) if unit else ""


def _unwrapped(text: str) -> str:
    """Without math mode and spaces that mean nothing."""
    text = re.sub(r"(?<!\.)\.$", "", text.strip()).strip()
    text = re.sub(r"(?<!\\)(\$\$?)((?:[^$\\]|\\.)+)\1", r"\2", text)
    text = re.sub(r"^\\\((.*)\\\)$|^\\\[(.*)\\\]$", lambda m: m[1] or m[2] or "", text, flags=re.DOTALL)
    text = re.sub(r"^\\(?:boxed|text|mathrm)\{([^{}]*\d[^{}]*)\}$", r"\1", text).strip()
    text = re.sub(r"\\!\s*", "", text.replace("{,}", ","))
    text = re.sub(r"\\(?:left|right)\b|\\displaystyle(?![a-z])", "", text).strip()
    return re.sub(rf"(?<=\d){_SPACE}+(?=\d)|^{_SPACE}+|{_SPACE}+$", " ", text).strip()


def _ends(text: str) -> bool:
    """Whether what stands before a unit is a whole answer."""
    return re.search(r"[\w)\]}|!.]\s*$", re.sub(rf"{_SPACE}+$", "", text)) is not None


def are_units(text: str, shortest: int = 2) -> bool:
    """Whether a text is known units only. A single letter behind a number may be a variable."""
    words = re.sub(r"\^\{?-?\d\}?|°", "", text).replace("/", " ").replace(".", "").split()
    return any(len(word) >= shortest for word in words) and all(_known(word) or word in _JOINING for word in words)


def marked(text: str) -> str:
    """A number whose unit is told from a variable, which no number has: `5 m` as `5 \\text{m}`."""
    found = re.search(r"(?<=\d)\s*(°?[A-Za-z][A-Za-z./ ]*(?:\^\{?-?\d\}?)?)$", unified(text).strip())
    unit = found is not None and are_units(found[1], shortest=1)
    return rf"{found.string[: found.start()]}\text{{{found[1]}}}" if found and unit else text


def _known(word: str) -> tuple[str, str] | None:
    """The short name of a unit and its kind. Case counts in symbols (mW and MW, mL and ML), not in words."""
    small = word.casefold()
    if word in _KNOWN or len(small) < 2 or (small in _MILLI and word[0] == "M"):
        return _KNOWN.get(word)
    return next((_KNOWN[name] for ending in ("", "s", "es") if (name := small.removesuffix(ending)) in _KNOWN), None)


_JOINING = {"square": 2, "sq": 2, "cubic": 3, "cu": 3, "per": 0}


def unit_name(text: str) -> str:
    """One name for the ways to write a unit: `\\text{ m/s}`, `\\mathrm{m\\,s^{-1}}` and `meters per second` are one."""
    powers, words = Counter[str](), list[str]()
    for word, power in _factors(text):
        known = _known(word)
        folded = word.casefold()
        name = known[0] if known else word if len(word) < 4 or folded.endswith("ss") else folded.removesuffix("s")
        if name != "unit":
            powers[name] += power
            words += [name] * (name not in words)
    # known units are factors, in any order; other words are a phrase
    return " ".join(
        name if powers[name] == 1 else f"{name}^{powers[name]}"
        for name in (sorted(words) if all(map(_known, words)) else words)
    )


def _factors(text: str) -> list[tuple[str, int]]:
    """The words of a unit, each with its power."""
    text = re.sub(r"\\frac\{(.*)\}\{(.*)\}", r"\1/\2", text.replace(".", ""))
    text = re.sub(_SPACE, " ", re.sub(r"\^?\{?\\(?:circ|degree)\}?", " ° ", text))
    text = re.sub(r"\\(?:text\w*|mbox|mathrm|cdot)|[{}()\\]", " ", text)
    found, below, times = list[tuple[str, int]](), False, 1
    for word, power in re.findall(r"([^\s/^·%°$€£¥¢]+|[/%°$€£¥¢])\s*(?:\^\s*(-?\d))?", text):
        joins = _JOINING.get(word.casefold())
        if word == "/" or joins == 0:
            below = True
        elif joins:
            times = joins
        elif word.casefold() == "squared" and found:
            found[-1] = (found[-1][0], 2 * found[-1][1])
        else:
            found.append((word, (-1 if below else 1) * times * int(power or 1)))
            below, times = False, 1
    return found


def _kind(unit: str) -> Counter[str]:
    """What a unit measures; empty for one that is not known, and for halves of the day."""
    found = Counter[str]()
    for name in unit.split():
        word, _, power = name.partition("^")
        known = _KNOWN.get(word)
        if known is None or known[1] == "half":
            return Counter()
        found[known[1]] += int(power or 1)
    return found


# characters

_RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+", strict=True))
_LOWERED = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_MINUSES = dict.fromkeys(map(ord, "−﹣－‐‑‒–"), "-")


def unified(text: str) -> str:
    """NFKC, but 10² stays a power, 10₂ an index, 1½ a mixed number, and every minus and dash is `-`."""
    text = re.sub(f"[{''.join(_RAISED)}]+", lambda m: "^" + "".join(_RAISED[c] for c in m.group()), text)
    text = re.sub(f"[{''.join(_LOWERED)}]+", lambda m: "_" + "".join(_LOWERED[c] for c in m.group()), text)
    text = re.sub("(?<=\\d)(?=[¼-¾⅐-⅞])", " ", text)
    return unicodedata.normalize("NFKC", text.translate(_MINUSES)).replace("⁄", "/").translate(_MINUSES)
