"""Which pivots are drawn: seeded epochs, weights, and what a checkpoint holds."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.core import seeds
from turntree.train.sampler import PivotSampler


def curriculum(pivots=5, seed=0):
    return PivotSampler([1.0] * pivots, seed)


def test_no_pivot_is_drawn_twice_before_all_were() -> None:
    drawn = curriculum(7).draw(21, step=1)
    assert all(sorted(drawn[start : start + 7]) == list(range(7)) for start in (0, 7, 14))


def test_the_draws_are_the_seeded_epochs_of_algorithm_1() -> None:
    """The order that earlier versions drew, so that runs stay comparable."""
    expected = []
    for epoch in range(3):
        order = list(range(5))
        seeds.generator(11, "epoch", epoch).shuffle(order)
        expected += order
    drawn = curriculum(5, seed=11)
    assert [index for step in range(1, 6) for index in drawn.draw(3, step)] == expected


@given(st.integers(0, 29))
def test_a_restored_curriculum_goes_on_as_if_nothing_had_happened(cut) -> None:
    whole, first, second = curriculum(4), curriculum(4), curriculum(4)
    expected = [whole.draw(3, step) for step in range(30)]
    before = [first.draw(3, step) for step in range(cut)]
    second.restore(json.loads(json.dumps(first.state())))
    assert before + [second.draw(3, step) for step in range(cut, 30)] == expected


def test_a_heavier_pivot_is_drawn_in_proportion_and_weight_zero_never() -> None:
    weighted = PivotSampler([0.0, 1.0, 2.0, 4.0], 0)
    drawn = [index for step in range(3000) for index in weighted.draw(1, step)]
    shares = [drawn.count(index) / len(drawn) for index in range(4)]
    assert shares == pytest.approx([0, 1 / 7, 2 / 7, 4 / 7], abs=0.03)


def test_only_the_proportions_of_weights_count_however_small_they_are() -> None:
    weights = [1.0, 2.0] * 10
    usual, small = (PivotSampler([w * s for w in weights], 0) for s in (1.0, 2.0**-40))
    for step in range(1, 51):
        assert usual.draw(4, step) == small.draw(4, step)


def test_a_step_draws_no_weighted_pivot_twice_before_the_others() -> None:
    weighted = PivotSampler([1.0, 1.0, 2.0, 400.0], 0)
    assert all(sorted(weighted.draw(4, step)) == [0, 1, 2, 3] for step in range(20))


def test_removed_pivots_are_not_drawn_again_and_added_ones_are() -> None:
    pivots = curriculum(3)
    pivots.draw(2, 1)
    pivots.remove([0, 1])
    pivots.add([1.0])
    assert pivots.live == 2
    assert {index for step in range(3, 9) for index in pivots.draw(2, step)} == {2, 3}


def test_earlier_pivots_keep_their_share_of_the_draws_and_their_proportions() -> None:
    pivots = PivotSampler([1.0, 2.0, 0.0], 0)
    pivots.scale(range(3), total=4.0)
    pivots.add([1.0, 3.0])  # half of the weight is theirs
    drawn = [index for step in range(3000) for index in pivots.draw(1, step)]
    shares = [drawn.count(index) / len(drawn) for index in range(5)]
    assert shares == pytest.approx([1 / 6, 1 / 3, 0, 1 / 8, 3 / 8], abs=0.03)


TRACES = ["a", "a", "a", "b", "b", "c", "c", "c", "c", "c"]


def test_a_step_draws_so_many_states_in_each_of_few_traces() -> None:
    sampler = PivotSampler([1.0] * 10, 0, TRACES, per_trace=2)
    for step in range(50):
        drawn = [TRACES[index] for index in sampler.draw(4, step)]
        assert sorted(Counter(drawn).values()) == [2, 2] and drawn[0] == drawn[1]


@pytest.mark.parametrize("per_trace", [2, 6])
def test_in_company_every_state_is_drawn_as_often_as_its_weight_says(per_trace: int) -> None:
    weights = [0.0, 2.0, 1.0, 2.0, 1.0, 3.0] * 10
    sampler = PivotSampler(weights, 0, [str(index // 6) for index in range(60)], per_trace)
    drawn = Counter(index for step in range(8_000) for index in sampler.draw(per_trace, step))
    shares = [drawn[index] / drawn.total() for index in range(60)]
    assert shares == pytest.approx([weight / sum(weights) for weight in weights], abs=0.004)


@given(st.integers(1, 25), st.integers(0, 99))
def test_all_traces_come_before_any_comes_again(count: int, step: int) -> None:
    drawn = PivotSampler([1.0, 2.0] * 5, 0, TRACES, per_trace=2).draw(count, step)
    assert len(drawn) == count
    for start in range(0, count, 6):
        assert max(Counter(TRACES[index] for index in drawn[start : start + 6]).values()) <= 2


def test_a_restored_sampler_draws_in_traces_as_if_nothing_had_happened() -> None:
    whole, second = (PivotSampler([1.0, 2.0] * 5, 3, TRACES, per_trace=2) for _ in range(2))
    expected = [whole.draw(4, step) for step in range(4)]
    state = json.loads(json.dumps(whole.state()))
    second.restore(state)
    assert [second.draw(4, step) for step in (4, 5)] == [whole.draw(4, step) for step in (4, 5)] != expected[:2]
