"""Configuration is strict: every mistake is one line that names the field and what to do."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pytest

from turntree.core.completion import Completion, Sampling
from turntree.core.config import from_mapping, nested, overlaid, to_mapping
from turntree.core.errors import ConfigError, TurntreeError
from turntree.train.config import ReinforcedConfig


@dataclass(frozen=True)
class Inner:
    temperature: float = 1.0
    top: int = 0


@dataclass(frozen=True)
class Outer:
    learning_rate: float
    steps: int = 10
    schedule: Literal["constant", "cosine"] = "constant"
    name: str | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    widths: tuple[int, ...] = ()
    keep: bool = True
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError("steps must be at least 1")


def test_plain_values_become_the_dataclass_and_back() -> None:
    values = {
        "learning_rate": 1,
        "steps": 3,
        "schedule": "cosine",
        "name": "run",
        "betas": [0.5, 0.6],
        "widths": [1, 2, 3],
        "keep": False,
        "inner": {"temperature": 2},
    }
    config = from_mapping(Outer, values)
    assert config == Outer(1.0, 3, "cosine", "run", (0.5, 0.6), (1, 2, 3), False, Inner(2.0))
    assert isinstance(config.learning_rate, float) and isinstance(config.inner.temperature, float)
    assert from_mapping(Outer, to_mapping(config)) == config


def test_an_unknown_key_names_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError) as error:
        from_mapping(Outer, {"learning_rat": 0.1}, path="run.json")
    assert str(error.value) == "run.json: field 'learning_rat': unknown key; did you mean 'learning_rate'?"


def test_an_unknown_key_without_a_neighbour_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"known keys: temperature, top$"):
        from_mapping(Inner, {"zzz": 1})


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({}, "field 'learning_rate': is missing; give it a value"),
        ({"learning_rate": "fast"}, "field 'learning_rate': 'fast' is not of type float"),
        ({"learning_rate": True}, "field 'learning_rate': True is not of type float"),
        ({"learning_rate": 1.0, "steps": 2.5}, "field 'steps': 2.5 is not of type int"),
        ({"learning_rate": 1.0, "steps": True}, "field 'steps': True is not of type int"),
        ({"learning_rate": 1.0, "keep": 1}, "field 'keep': 1 is not of type bool"),
        ({"learning_rate": 1.0, "name": 3}, "field 'name': 3 is not of type str"),
        (
            {"learning_rate": 1.0, "schedule": "linear"},
            "field 'schedule': 'linear' is not allowed; use one of 'constant', 'cosine'",
        ),
        ({"learning_rate": 1.0, "betas": [0.9]}, "field 'betas': needs 2 values, has 1"),
        ({"learning_rate": 1.0, "widths": ["a"]}, "field 'widths[0]': 'a' is not of type int"),
        ({"learning_rate": 1.0, "inner": {"tops": 1}}, "field 'inner.tops': unknown key; did you mean 'top'?"),
        ({"learning_rate": 1.0, "inner": 3}, "field 'inner': 3 is not a section of keys"),
        ({"learning_rate": 1.0, "steps": 0}, "steps must be at least 1"),
    ],
)
def test_every_mistake_is_one_line(values: dict, line: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_mapping(Outer, values)
    assert str(error.value) == line


def test_none_is_allowed_only_where_the_type_says_so() -> None:
    assert from_mapping(Outer, {"learning_rate": 1.0, "name": None}).name is None
    with pytest.raises(ConfigError, match="field 'steps': None is not of type int"):
        from_mapping(Outer, {"learning_rate": 1.0, "steps": None})


def test_dotted_overrides_reach_nested_fields_and_leave_the_original() -> None:
    values = to_mapping(Outer(1.0))
    changed = overlaid(overlaid(values, nested("inner.temperature", 0.7)), nested("steps", 4))
    assert from_mapping(Outer, changed) == Outer(1.0, steps=4, inner=Inner(0.7))
    assert from_mapping(Outer, values) == Outer(1.0)


@pytest.mark.parametrize("key", ["inner.heat", "outer.temperature", "step"])
def test_an_override_of_an_unknown_key_is_an_error(key: str) -> None:
    with pytest.raises(ConfigError, match="unknown key"):
        from_mapping(Outer, overlaid(to_mapping(Outer(1.0)), nested(key, 1)))


@pytest.mark.parametrize("values", [{"temperature": -0.1}, {"max_tokens": 0}])
def test_impossible_sampling_is_refused(values: dict) -> None:
    with pytest.raises(ConfigError, match=f"field '{next(iter(values))}': is"):
        Sampling(**values)


def test_training_refuses_samples_that_are_not_the_policys_own() -> None:
    with pytest.raises(ConfigError, match="field 'sampling': training needs samples of the policy itself"):
        ReinforcedConfig(sampling=Sampling(temperature=0.0))
    ReinforcedConfig(sampling=Sampling(temperature=0.7))


def test_a_completion_has_one_statistic_per_token() -> None:
    with pytest.raises(TurntreeError, match="one log-probability and one entropy per token"):
        Completion(token_ids=(1, 2), logprobs=(-1.0,), entropies=(0.5, 0.5), finish="stop")


def test_a_completion_without_a_token_is_refused_because_it_would_earn_0_as_a_cut_turn() -> None:
    with pytest.raises(TurntreeError, match="at least one token"):
        Completion(token_ids=(), logprobs=(), entropies=(), finish="length")


def test_a_completion_with_a_statistic_that_is_nan_is_refused_before_it_reaches_the_loss() -> None:
    with pytest.raises(TurntreeError, match="that is nan"):
        Completion(token_ids=(1,), logprobs=(math.nan,), entropies=(0.5,), finish="stop")


def test_an_engine_may_give_arrays_and_a_completion_holds_plain_values_that_json_can_write() -> None:
    given = np.array([1, 2]), np.array([-0.5, -1], dtype=np.float32), np.array([0.5, 0.5])
    done = Completion(token_ids=tuple(given[0]), logprobs=tuple(given[1]), entropies=tuple(given[2]), finish="stop")
    assert json.dumps([done.token_ids, done.logprobs, done.entropies]) == "[[1, 2], [-0.5, -1.0], [0.5, 0.5]]"
