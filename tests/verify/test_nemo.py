"""`nemo` pays what the released servers pay."""

from __future__ import annotations

from typing import Any

import pytest

from turntree.core.errors import ConfigError
from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import TurnState
from turntree_interop.nemo_gym import Nemo


def act(*arguments: Any, name: str = "f") -> Message:
    return Message("assistant", "", tuple(ToolCall(name, one) for one in arguments))


def reward(shown: Message, tried: Message, **options: Any) -> float | None:
    return Nemo(**options).judge(TurnState("t", 0, (), shown), tried).reward


@pytest.mark.parametrize(
    ("shown", "tried", "paid"),
    [
        ({"x": 1}, {"x": 1.0}, 0.0),
        ({"x": 1}, {"x": True}, 1.0),
        ({"x": 1.0}, {"x": 1.0000001}, 1.0),
        ({"x": "a"}, {"x": "A"}, 0.0),
        ({"x": "a b c"}, {"x": "A d E f"}, 1.0),  # 1 of 7 words, at threshold 0.1
        ({"x": "a b c"}, {"x": "d"}, 0.0),
        ({"x": [1, 2]}, {"x": [2, 1]}, 0.0),
        ({"x": 1}, {"x": 1, "y": 2}, 0.0),
    ],
)
def test_single_step_compares_arguments_as_released(shown: Any, tried: Any, paid: float) -> None:
    assert reward(act(shown), act(tried)) == paid


def test_its_similarity_of_equal_texts_is_one_half() -> None:
    gold = act({"x": "two words"})
    assert (reward(gold, gold, similarity=0.5), reward(gold, gold, similarity=0.51)) == (1.0, 0.0)


def test_calls_beside_the_demonstrated_ones_cost_nothing() -> None:
    gold = act({"x": 1}, {"x": 2})
    tried = [act({"x": 2}), act({"x": 2}, {"x": 1}), act({"x": 2}, {"x": 1}, {"x": 3})]
    assert [reward(gold, one) for one in tried] == [0.0, 1.0, 1.0]


def test_an_unknown_domain_is_an_error_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="use one of tau2, function_calling, search, swe"):
        Nemo(domain="browse")  # type: ignore[arg-type]
