"""`import turntree as tt` offers what a user's own code needs, and loads it when it is used."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import turntree as tt


@pytest.mark.parametrize("name", [name for name in tt.__all__ if name != "__version__"])
def test_every_name_is_there_and_says_what_it_is(name: str) -> None:
    found = getattr(tt, name)
    assert inspect.getdoc(found), f"tt.{name} has no docstring"
    assert name in dir(tt)
    assert name in (tt.__doc__ or ""), f"tt.{name} is not told in the module's docstring"


def test_importing_loads_nothing() -> None:
    loaded = (
        "import sys, turntree; print([m for m in sys.modules if m.startswith(('torch', 'transformers', 'turntree.'))])"
    )
    assert subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True).stdout.strip() == "[]"


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = tt.nonsense
