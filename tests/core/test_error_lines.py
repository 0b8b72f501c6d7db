"""An error is one line: where, what, what to do."""

from __future__ import annotations

import pytest

from turntree.core.errors import ConfigError, InputError, TurntreeError


@pytest.mark.parametrize(
    ("keywords", "line"),
    [
        ({}, "is not a number"),
        ({"path": "a.jsonl"}, "a.jsonl: is not a number"),
        ({"path": "a.jsonl", "line": 3}, "a.jsonl:3: is not a number"),
        ({"field": "reward"}, "field 'reward': is not a number"),
        ({"hint": "write 0.0"}, "is not a number; write 0.0"),
        (
            {"path": "a.jsonl", "line": 3, "field": "reward", "hint": "write 0.0"},
            "a.jsonl:3: field 'reward': is not a number; write 0.0",
        ),
    ],
)
def test_where_what_and_what_to_do(keywords: dict, line: str) -> None:
    assert str(InputError("is not a number", **keywords)) == line


def test_one_line_even_when_the_cause_has_several() -> None:
    assert "\n" not in str(InputError("first\nsecond", hint="a\nb"))


def test_the_parts_stay_readable_by_code() -> None:
    error = InputError("bad", path="a", line=0, field="f", hint="h")
    assert (error.problem, error.path, error.line, error.field, error.hint) == ("bad", "a", 0, "f", "h")
    assert str(error) == "a:0: field 'f': bad; h"


def test_one_base_class_for_everything_raised_on_purpose() -> None:
    assert issubclass(ConfigError, InputError) and issubclass(InputError, TurntreeError)


@pytest.mark.parametrize("length", [10, 400, 420, 500, 501, 1_000, 100_000])
def test_a_text_is_cut_only_where_much_is_cut_and_its_ends_stay(length: int) -> None:
    text = f"begin{'x' * (length - 8)}end"
    said = InputError(text).problem
    assert said == text or (said.startswith("begin") and said.endswith("end") and len(said) < len(text) - 50)
    assert len(said) <= 500
