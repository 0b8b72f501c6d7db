"""What hangs on a kind of action, learned from episodes: the slope is found, and states are drawn by it."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.rollouts.acceptance import Acceptance


def told(seed: int, states: int, slopes: dict[str, float]) -> Acceptance:
    """Episodes whose reward depends on whether their action was accepted as `slopes` say."""
    draw, seen = random.Random(seed), Acceptance()
    for _ in range(states):
        for kind, slope in slopes.items():
            accepted = float(draw.random() < 0.5)
            seen.episode(kind, accepted, slope * (accepted - 0.5) + draw.gauss(0, 0.4))
    return seen


def test_slopes_are_found() -> None:
    seen = told(1, 2000, {"take": 0.5, "search": 0.1, "move": 0.0})
    assert seen.slopes() == pytest.approx({"take": 0.5, "search": 0.1, "move": 0.0}, abs=0.05)


def test_a_kind_that_was_seen_little_has_the_slope_of_all() -> None:
    seen = told(2, 500, {"take": 0.5, "open": 0.1})
    seen.episode("use", 1.0, 0.9)
    slopes = seen.slopes()
    assert slopes["use"] == pytest.approx((slopes["take"] + slopes["open"]) / 2, abs=0.05)


def test_states_are_drawn_where_something_hangs_on_the_turn_and_can_be_learned() -> None:
    seen = told(3, 500, {"take": 0.5, "search": 0.1, "move": 0.5})
    for _ in range(50):
        seen.group("take", [1.0, 0.0, 1.0, 0.0])
        seen.group("search", [1.0, 0.0, 1.0, 0.0])
        seen.group("move", [1.0, 1.0, 1.0, 1.0])
    take, search, move, unseen = seen.weights(["take", "search", "move", "never seen"])
    assert take > 3 * search > 0
    assert take > 3 * move > 0  # always accepted
    assert search < unseen < take


@given(rewards=st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.floats(-1, 1)), max_size=20))
@settings(max_examples=50, deadline=None)
def test_weights_are_above_zero_and_restored_exactly(rewards: list[tuple[str, bool, float]]) -> None:
    seen = Acceptance()
    for kind, accepted, reward in rewards:
        seen.episode(kind, float(accepted), reward)
        seen.group(kind, [float(accepted), reward])
    weights = seen.weights(["a", "b", "c", "d"])
    assert min(weights) > 0
    again = Acceptance()
    again.restore(json.loads(json.dumps(seen.state())))
    assert again.weights(["a", "b", "c", "d"]) == weights


def test_nothing_known_draws_all_alike() -> None:
    assert Acceptance().weights(["a", "b"]) == [1.0, 1.0]
    losing = told(4, 200, {"a": -0.5, "b": -0.5})
    assert losing.weights(["a", "b"]) == [1.0, 1.0]


def test_gains_are_means_over_states_and_draw_where_they_are_highest() -> None:
    seen = Acceptance()
    assert not seen.trains("take")
    seen.aligned("take", 3.0, 10)
    seen.aligned("take", 1.0, 10)
    seen.aligned("search", -4.0, 40)
    assert seen.gains() == {"search": -0.1, "take": 0.2}
    assert seen.trains("take") and not seen.trains("search")
    take, search = seen.weights(["take", "search"], by_gain=True)
    assert take == pytest.approx(20 * search)  # a little exploration
