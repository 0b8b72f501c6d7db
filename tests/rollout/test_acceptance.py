"""What hangs on a kind of action, learned from episodes: the slope is found."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.rollout.acceptance import Acceptance


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


@given(rewards=st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.floats(-1, 1)), max_size=20))
@settings(max_examples=50, deadline=None)
def test_slopes_are_restored_exactly(rewards: list[tuple[str, bool, float]]) -> None:
    seen = Acceptance()
    for kind, accepted, reward in rewards:
        seen.episode(kind, float(accepted), reward)
    again = Acceptance()
    again.restore(json.loads(json.dumps(seen.state())))
    assert again.slopes("abcd") == seen.slopes("abcd")


def test_a_kind_without_evidence_has_the_slope_of_all() -> None:
    seen = told(4, 200, {"a": 0.5, "b": 0.5})
    assert seen.slopes(["c"])["c"] == pytest.approx(0.5, abs=0.1)
    assert Acceptance().slopes(["c"]) == {"c": 0.0}
