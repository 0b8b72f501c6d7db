"""The size of the house may fall and not rise: a change that lowers a figure lowers its budget here too.

`python tests/structure/house.py` prints the figures.
"""

from __future__ import annotations

import ast
import functools

import house
import pytest

LINES = {"turntree": 46_439, "turntree_interop": 5_834, "turntree_worlds": 6_766}
LARGEST_CLASS = 250
MOST_PARAMETERS = 9
KEYS = {"train online and train pivot": 109, "all commands": 222}


@functools.cache
def modules() -> tuple[house.Module, ...]:
    return tuple(house.modules())


@pytest.mark.parametrize("package", LINES)
def test_a_package_stays_within_its_lines(package: str) -> None:
    lines = sum(module.lines for module in modules() if module.package == package)
    assert 0 < lines <= LINES[package]


def test_no_class_is_fat() -> None:
    spans = [(lines, name) for module in modules() for lines, name in module.spans(ast.ClassDef)]
    assert max(spans) <= (LARGEST_CLASS, "~")


def test_no_function_takes_more_than_a_reader_can_hold() -> None:
    taken = [
        (house.parameters(node), node.name, str(module.path))
        for module in modules()
        for node in module.nodes
        if isinstance(node, house.FUNCTIONS)
    ]
    assert max(taken)[0] <= MOST_PARAMETERS, max(taken)


def test_the_keys_of_the_configuration_fit_in_a_head() -> None:
    keys = house.keys()
    assert len(keys["train online"] | keys["train pivot"]) <= KEYS["train online and train pivot"]
    assert len(set().union(*keys.values())) <= KEYS["all commands"]
