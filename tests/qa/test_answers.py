"""Answers are compared by what they are: truth tables, the laws of an equivalence relation, real answers."""

import itertools
import json
import lzma
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.core.errors import InputError
from turntree_worlds.qa.answers import ANSWER_TYPES, check_answer, equal, items_of, overlap, read_number, words_of

NUMBERS = {
    "3": Fraction(3), "-3": Fraction(-3), "−3": Fraction(-3), "+3": Fraction(3), "- 3": Fraction(-3),
    "42.": Fraction(42),
    ".5": Fraction(1, 2), "0.50": Fraction(1, 2), "1/2": Fraction(1, 2), "½": Fraction(1, 2), "-1/2": Fraction(-1, 2),
    r"\frac{1}{2}": Fraction(1, 2), r"$\dfrac{1}{2}$": Fraction(1, 2), r"\frac12": Fraction(1, 2),
    r"\frac{-6}{2}": Fraction(-3),
    r"\(-\tfrac{ 3 }{4}\)": Fraction(-3, 4),
    "1 1/2": Fraction(3, 2), "1½": Fraction(3, 2), r"2\frac{1}{2}": Fraction(5, 2), "-1 1/2": Fraction(-3, 2),
    "1,234,567.5": Fraction(2469135, 2), "1 234": Fraction(1234), "1_000": Fraction(1000), "1{,}234": Fraction(1234),
    r"10,\!000": Fraction(10000), "１２": Fraction(12),
    "1e3": Fraction(1000), "6.5E-1": Fraction(13, 20), r"3 \times 10^8": Fraction(3 * 10**8), 
    "3×10⁸": Fraction(3 * 10**8),
    r"2 \cdot 10^{-2}": Fraction(1, 50), "\N{FULLWIDTH DIGIT ONE}.5": Fraction(3, 2),
    "50%": Fraction(50), r"50\%": Fraction(50), "$5": Fraction(5), "-$5": Fraction(-5), r"\$18.90": Fraction(189, 10),
    "60°": Fraction(60), r"60^\circ": Fraction(60), r"60^{\circ}": Fraction(60),
}  # fmt: skip
NO_NUMBERS = [
    "", "x", "five", "5 million", "3 or 4", "3 4", "--3", "1/0", "12,34", "1,5", "1000,000", "1,234 567", "1.2.3",
    "10²", "2^10", "10:30", "3-4", "1e1001", "1e999999999", "9" * 201, "nan", "inf", "0x10", "1//2", r"\frac{1}{0}",
    r"2\frac{-1}{2}",
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), NUMBERS.items())
def test_a_number_is_read_exactly(text, value):
    assert read_number(text) == value


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_what_is_no_number_is_not_read_as_one(text):
    assert read_number(text) is None


DIFFERENT = [  # pairs that dropping signs, points, bars and powers would make equal
    ("3", "-3"), ("1/2", "12"), ("1.2", "12"), ("10²", "102"), ("1½", "11/2"), ("3-4", "34"), ("50", "0.5"),
]  # fmt: skip


@pytest.mark.parametrize("answer_type", ANSWER_TYPES)
@pytest.mark.parametrize(("one", "two"), DIFFERENT)
def test_signs_points_bars_and_powers_count_in_every_type(answer_type, one, two):
    assert not equal(one, two, answer_type)
    assert not equal(two, one, answer_type)


@pytest.mark.parametrize("answer_type", ANSWER_TYPES)
@pytest.mark.parametrize(("one", "two"), [("0.5", "1/2"), (r"\dfrac{1}{2}", r"\frac{1}{2}"), ("1,000", "1000.0")])
def test_one_value_is_one_answer_in_every_type(answer_type, one, two):
    assert equal(one, two, answer_type) and overlap(one, two, answer_type) == 1


SPANS = [
    ("Paris", "paris.", True), ("The Beatles", "Beatles", True), ("**“Paris”**", "Paris", True), ("U.S.", "US", True),
    ("Jean-Pierre", "jean pierre", False), ("The The", "the the", True), ("The", "", False), ("C++", "C", False),
    ("C#", "C", False), ("C#.", "c#", True),
    ("Été", "E\u0301TE\u0301", True), ("Beyoncé", "Beyonce", False), ("STRASSE", "straße", True),
    ("20 March 851", "March 20, 851", False), ("1,234 people", "1234 people", True), ("-3 degrees", "3 degrees", False),
    ("北京", "北京。", True), ("H₂O", "h2o", True), ("Paris London Rome", "Paris", False), ("5 million", "5", False),
    ("?!", "?!", True), ("?!", "!", False),
]  # fmt: skip


@pytest.mark.parametrize(("one", "two", "same"), SPANS)
def test_spans_are_equal_by_their_words(one, two, same):
    assert equal(one, two, "span") is same


def test_overlap_of_spans_is_the_f1_of_their_words():
    assert overlap("Paris London Rome", "Paris", "span") == pytest.approx(2 * (1 / 3) * 1 / (1 / 3 + 1))
    assert overlap("the cat sat", "a cat", "span") == pytest.approx(2 * (1 / 2) * 1 / (1 / 2 + 1))
    assert overlap("2 2", "2", "span") == pytest.approx(2 / 3)
    assert overlap("北京大学", "北京", "span") == pytest.approx(2 / 3)
    assert overlap("London", "Paris", "span") == 0 and overlap("-3", "3", "span") == 0


def test_a_list_has_items_in_any_order_each_as_often():
    assert equal("Rome; Paris", "paris ; rome", "list") and equal("[1, 2.0]", "2,1", "list")
    assert not equal("Paris; Paris; Rome", "Paris; Rome", "list") and not equal("Paris", "Paris; Rome", "list")
    assert items_of("1,234; 5") == ("1,234", "5") and items_of("1,2,3") == ("1", "2", "3")
    assert equal("1,234; 5", "5; 1234", "list") and equal("300, 200, 100", "100,200,300", "list")
    assert not equal("100200300", "100,200,300", "list") and equal("1234", "1,234", "list") is None
    assert equal("Washington, D.C.; Rome", "Rome; Washington D.C.", "list")
    assert overlap("Paris; London; Rome", "Paris", "list") == pytest.approx(0.5)


EXPRESSIONS = [
    (r"3\sqrt{3}-6", r"3(\sqrt3-2)", True), (r"\dfrac{x}{2}", r"\frac12 x", True), ("2^{3}", "8", True),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3, 0.5\pi)", True), ("(1,2)", "(2,1)", False), ("1,2", "2, 1", True),
    ("[2,5)", "[2,5]", False), (r"(2,\infty)", r"(2,\infty)", True), (r"(2+i)(2-i)", "5", True),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ \frac42 \end{pmatrix}", True),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 & 2 \end{pmatrix}", False),
    (r"\sqrt{2}", "1.414214", False), ("10^{-8}", "0", False), ("x", "X", False), ("x", "y", False),
    ("x < 5", "5 > x", True), ("x < 5", r"x \le 5", False), ("2x+y=3", "3=2x+y", True), ("x=5", "5", True),

    (r"10\text{ cm}^2", "10", True), (r"$\$36$", r"\$36", True), (r"$28$ \%", "28", True),
    (r"10\text{ million}", "10", False), (r"\text{Evelyn}", "evelyn", True),
    (r"\text{(C)}", "C", True), ("east", "seat", False), ("__import__('os').getpid()", "1", False),
    (r"-\sqrt{2}", r"\sqrt{2}", False), (r"\frac{1}{x}", "1x", False), (r"\{1,2\}", r"\{2,1\}", True),
    (r"\{1,2\}", r"\{1,3\}", False), ("1,2", "1,2,3", False), ("2,3", "1,2,3", False),
    ("2516_9", "2516_8", False), ("2516_{8}", "2516_8", True), ("2516", "2516_8", True),
    ("(x+1)^2, x^2+2x+1", "(x+1)^2, 3", False), ("0.1x+0.2x", "0.3x", True),
]  # fmt: skip


@pytest.mark.parametrize(("one", "two", "same"), EXPRESSIONS)
def test_expressions_are_equal_by_algebra(one, two, same):
    assert bool(equal(one, two, "expression")) is same
    assert bool(equal(two, one, "expression")) is same


def test_a_right_answer_that_is_not_of_its_type_is_refused():
    for gold, answer_type in (("Paris", "number"), (" ", "span"), (";", "list"), (r"\frac{", "expression")):
        with pytest.raises(InputError, match="cannot be read as"):
            check_answer(gold, answer_type)
    for gold, answer_type in (("5", "number"), ("Paris", "span"), ("a;b", "list"), (r"\pi", "expression")):
        check_answer(gold, answer_type)


# laws

plain = st.text(max_size=20) | st.text(alphabet="aAthe 0123456789.,;/-+^%$\\{}½²₂é北", max_size=12)
light_types = st.sampled_from(["number", "span", "list"])


@given(plain, plain, light_types)
@settings(max_examples=100)
def test_equality_is_reflexive_and_symmetric_and_never_raises(one, two, answer_type):
    assert equal(one, one, answer_type) is True
    assert equal(one, two, answer_type) is equal(two, one, answer_type)


@given(plain, plain, light_types)
def test_overlap_is_symmetric_and_1_only_for_equal_answers(one, two, answer_type):
    score = overlap(one, two, answer_type)
    assert 0 <= score <= 1 and score == overlap(two, one, answer_type)
    if score == 1:
        assert sorted(words_of(one)) == sorted(words_of(two)) if answer_type == "span" else equal(one, two, answer_type)


numerators, denominators = st.integers(-(10**9), 10**9), st.integers(1, 10**6)


@given(numerators, denominators)
def test_a_fraction_is_the_same_number_however_it_is_written(over, under):
    sign, size = ("-" if over < 0 else ""), abs(over)
    for text in (f"{over}/{under}", rf"{sign}\frac{{{size}}}{{{under}}}", rf"$ {sign} \dfrac{{{size}}}{{{under}}} $"):
        assert read_number(text) == Fraction(over, under)


@given(st.integers(-(10**15), 10**15), st.integers(0, 6))
def test_a_decimal_is_the_same_number_however_it_is_written(digits, places):
    value = Fraction(digits, 10**places)
    whole, part = divmod(abs(digits), 10**places)
    sign, decimals = ("-" if digits < 0 else ""), f".{part:0{places}d}" if places else ""
    for mark in ("", ",", " ", "_", "{,}"):
        assert read_number(f"{sign}{whole:,}{decimals}".replace(",", mark)) == value
    assert read_number(f"{digits}e-{places}") == value
    assert read_number(f"{sign}{whole}{decimals}000" if places else f"{sign}{whole}.000") == value


@given(st.integers(-1000, 1000), st.integers(-1000, 1000))
def test_different_numbers_are_never_equal(one, two):
    for answer_type in ("number", "span", "list"):
        assert equal(str(one), str(two), answer_type) is (one == two)


# real answers


def answers_of(path, key="answer"):
    with lzma.open(path, "rt") as lines:
        return [json.loads(line)[key] for line in lines]


def test_every_gsm8k_answer_is_a_number_equal_to_itself_reformatted_and_to_no_other(shared_data):
    golds = {text.split("####")[1].strip() for text in answers_of(shared_data / "math" / "gsm8k_test.jsonl.xz")}
    values = {read_number(gold) for gold in golds}
    assert None not in values and len({gold.replace(",", "") for gold in golds}) == len(values)
    for gold in golds:
        value = int(read_number(gold))
        for text in (f"${value:,}", f"{value}.00", rf"$\frac{{{value * 2}}}{{2}}$", f"{value} %"):
            assert equal(text, gold, "number"), (text, gold)


def test_every_math_answer_can_be_read_and_most_are_numbers(shared_data):
    golds = answers_of(shared_data / "math" / "math500_test.jsonl.xz")
    for gold in golds:
        check_answer(gold, "expression")
    assert (len(golds), sum(read_number(gold) is not None for gold in golds)) == (500, 395)


def reformatted(gold):
    """The same LaTeX as another hand would write it."""
    return gold.replace(r"\frac", r"\dfrac").replace(r"\left", "").replace(r"\right", "").replace(", ", ",")


def test_math_answers_equal_themselves_reformatted_and_no_neighbour(shared_data):
    golds = [g for g in answers_of(shared_data / "math" / "math500_test.jsonl.xz") if read_number(g) is None]
    for gold, neighbour in itertools.pairwise(golds[::2]):
        assert equal(f"${reformatted(gold)}$", gold, "expression"), gold
        assert equal(gold, neighbour, "expression") is False, (gold, neighbour)


def test_real_spans_equal_themselves_reformatted_and_no_other(shared_data):
    with lzma.open(shared_data / "wiki2" / "questions.json.xz", "rt") as file:
        questions = json.load(file)
    golds = {question["answer"] for question in questions}
    assert len({words_of(gold) for gold in golds}) == len(golds)
    for gold in golds:
        assert equal(f"  {gold.lower()} .", gold, "span"), gold


@pytest.mark.parametrize("given", ["5 m", "5 s", "5 g", "5 m/s^2", "5 m²", "5 °C", "5 C"])
def test_a_number_may_have_a_unit_of_one_letter(given):
    assert equal(given, "5", "number") is True
    assert equal(given.replace("5", "6"), "5", "number") is False
    assert equal("5 x", "5", "number") is False, "that is no unit"
