"""Which pivots are drawn: seeded epochs, live pass rates, retirement and its end, and what a checkpoint holds."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.core import seeds
from turntree.core.errors import ConfigError
from turntree.training.curriculum import Curriculum, CurriculumConfig

SOLVED, MIXED, FAILED, CENSORED = [1.0] * 4, [1.0, 0.0, 1.0, 0.0], [0.0] * 4, [None] * 4


def curriculum(pivots=5, *, roles=None, seed=0, **settings):
    return Curriculum(roles or ["pivot"] * pivots, CurriculumConfig(**settings), seed)


def test_no_pivot_is_drawn_twice_before_all_were() -> None:
    drawn = curriculum(7).draw(21, step=1)
    assert all(sorted(drawn[start : start + 7]) == list(range(7)) for start in (0, 7, 14))


def test_without_retirement_the_draws_are_the_seeded_epochs_of_algorithm_1() -> None:
    """The order that earlier versions drew, so that runs stay comparable."""
    expected = []
    for epoch in range(3):
        order = list(range(5))
        seeds.generator(11, "epoch", epoch).shuffle(order)
        expected += order
    drawn = curriculum(5, seed=11)
    assert [index for step in range(1, 6) for index in drawn.draw(3, step)] == expected


def test_the_live_pass_rate_forgets_the_policy_of_earlier_visits() -> None:
    pivots = curriculum(1)
    assert pivots.records[0].pass_rate is None
    pivots.record(0, 1, FAILED)
    assert pivots.records[0].pass_rate == 0.0
    pivots.record(0, 2, SOLVED)
    assert pivots.records[0].pass_rate == pytest.approx(4 / (4 + 2))  # the visit before counts half
    assert (pivots.records[0].visits, pivots.records[0].last_visit) == (2, 2)


def test_a_visit_without_scored_rollouts_found_nothing() -> None:
    pivots = curriculum(1, retire_after=2)
    for step, rewards in enumerate((SOLVED, CENSORED, [None, None, None, 0.0]), start=1):
        pivots.record(0, step, rewards)
    assert (pivots.records[0].visits, pivots.records[0].streak, pivots.records[0].pass_rate) == (1, 1, 1.0)
    pivots.record(0, 4, [1.0, None, None, 1.0])  # what was scored succeeded
    assert pivots.retired == {0}


def test_a_pivot_retires_after_so_many_saturated_visits_in_a_row() -> None:
    pivots = curriculum(3, retire_after=2)
    for step, (first, second) in enumerate([(SOLVED, SOLVED), (MIXED, SOLVED), (SOLVED, MIXED)], start=1):
        pivots.record(0, step, first)
        if 1 not in pivots.retired:
            pivots.record(1, step, second)
    assert pivots.retired == {1}
    assert 1 not in pivots.draw(30, step=4)
    assert pivots.metrics()["live_pivots"] == 2 and pivots.metrics()["retired_pivots"] == 1
    assert pivots.metrics()["live_pass_rate"] == pivots.records[0].pass_rate


def test_failing_is_no_saturation_and_anchors_never_retire() -> None:
    pivots = curriculum(roles=["pivot", "anchor"], retire_after=1)
    pivots.record(0, 1, FAILED)
    pivots.record(1, 1, SOLVED)
    assert pivots.retired == set()


def test_nothing_retires_by_default() -> None:
    pivots = curriculum(1)
    for step in range(50):
        pivots.record(0, step, SOLVED)
    assert pivots.retired == set()


def test_a_pivot_comes_back_and_one_saturated_visit_sends_it_off_again() -> None:
    pivots = curriculum(2, retire_after=2, revisit_after=10)
    for step in (1, 2):
        pivots.record(0, step, SOLVED)
    assert set(pivots.draw(4, step=11)) == {1}
    assert not pivots.exhausted(11)
    assert set(pivots.draw(4, step=12)) == {0, 1}
    pivots.record(0, 12, SOLVED)
    assert pivots.retired == {0}


def test_a_pivot_may_come_back_at_the_next_step_and_needs_all_its_visits_again_where_it_fails() -> None:
    pivots = curriculum(1, retire_after=2, revisit_after=1)
    for step in (1, 2):
        pivots.record(0, step, SOLVED)
    assert pivots.retired == {0} and pivots.exhausted(2) and not pivots.exhausted(3)
    pivots.draw(1, step=3)
    assert pivots.records[0].streak == 1, "one more such visit retires it again"
    pivots.record(0, 3, MIXED)
    pivots.record(0, 4, SOLVED)
    assert pivots.retired == set()


def test_it_is_exhausted_when_all_are_retired_and_none_comes_back() -> None:
    for revisit, expected in ((0, True), (5, False)):
        pivots = curriculum(2, retire_after=1, revisit_after=revisit)
        assert not pivots.exhausted(1)
        for index in (0, 1):
            pivots.record(index, 1, SOLVED)
        assert pivots.exhausted(5)
        assert pivots.exhausted(6) == expected


@given(st.lists(st.sampled_from([SOLVED, MIXED, FAILED, CENSORED]), min_size=1, max_size=30), st.integers(0, 29))
def test_a_restored_curriculum_goes_on_as_if_nothing_had_happened(outcomes, cut) -> None:
    def go(pivots, start, stop):
        drawn = []
        for step in range(start, stop):
            if pivots.exhausted(step):
                continue
            indices = pivots.draw(3, step)
            drawn.append(indices)
            for index in indices:
                pivots.record(index, step, outcomes[(step * 7 + index) % len(outcomes)])
        return drawn

    settings = {"retire_after": 1, "revisit_after": 4}
    whole = curriculum(4, **settings)
    expected = go(whole, 0, 30)
    first, second = curriculum(4, **settings), curriculum(4, **settings)
    before = go(first, 0, cut)
    second.restore(json.loads(json.dumps(first.state())))
    assert before + go(second, cut, 30) == expected
    assert second.records == whole.records


def test_the_live_pass_rate_is_the_mean_over_pivots_that_were_visited() -> None:
    pivots = curriculum(4)
    assert pivots.metrics() == {"live_pivots": 4, "retired_pivots": 0, "live_pass_rate": None}
    for index, rewards in enumerate((SOLVED, MIXED, FAILED)):
        pivots.record(index, 1, rewards)
    assert pivots.metrics()["live_pass_rate"] == 0.5


def test_negative_numbers_are_refused() -> None:
    for name in ("retire_after", "revisit_after", "replacement_rounds"):
        with pytest.raises(ConfigError):
            CurriculumConfig(**{name: -1})


def test_a_heavier_pivot_is_drawn_in_proportion_and_weight_zero_never() -> None:
    weighted = Curriculum(["pivot"] * 4, CurriculumConfig(), 0, [0.0, 1.0, 2.0, 4.0])
    drawn = [index for step in range(3000) for index in weighted.draw(1, step)]
    shares = [drawn.count(index) / len(drawn) for index in range(4)]
    assert shares == pytest.approx([0, 1 / 7, 2 / 7, 4 / 7], abs=0.03)


def test_only_the_proportions_of_weights_count_however_small_they_are() -> None:
    weights = [1.0, 2.0] * 10
    usual, small = (
        Curriculum(["pivot"] * 20, CurriculumConfig(), 0, [w * s for w in weights]) for s in (1.0, 2.0**-40)
    )
    for step in range(1, 51):
        assert usual.draw(4, step) == small.draw(4, step)


def test_a_step_draws_no_weighted_pivot_twice_before_the_others() -> None:
    weighted = Curriculum(["pivot"] * 4, CurriculumConfig(), 0, [1.0, 1.0, 2.0, 400.0])
    assert all(sorted(weighted.draw(4, step)) == [0, 1, 2, 3] for step in range(20))


def test_removed_pivots_are_not_drawn_again_nor_counted_as_retired_and_added_ones_are() -> None:
    pivots = curriculum(3, retire_after=1, revisit_after=1)
    pivots.draw(2, 1)
    pivots.remove([0, 1])
    pivots.add(["pivot"], [1.0])
    assert pivots.metrics()["live_pivots"] == 2 and pivots.metrics()["retired_pivots"] == 0
    assert {index for step in range(3, 9) for index in pivots.draw(2, step)} == {2, 3}


def test_earlier_pivots_keep_their_share_of_the_draws_and_their_proportions() -> None:
    pivots = Curriculum(["pivot"] * 3, CurriculumConfig(), 0, [1.0, 2.0, 0.0])
    pivots.scale(range(3), total=4.0)
    pivots.add(["pivot"] * 2, [1.0, 3.0])  # half of the weight is theirs
    drawn = [index for step in range(3000) for index in pivots.draw(1, step)]
    shares = [drawn.count(index) / len(drawn) for index in range(5)]
    assert shares == pytest.approx([1 / 6, 1 / 3, 0, 1 / 8, 3 / 8], abs=0.03)


@pytest.mark.parametrize(("pivots", "count"), [(40, 32), (40, 8), (20, 32), (10, 10)])
def test_what_a_step_is_expected_to_draw_is_what_it_draws(pivots: int, count: int) -> None:
    """Its pivots are distinct, so weights of 19:1 say next to nothing where it draws most of them."""
    weighted = Curriculum(["pivot"] * pivots, CurriculumConfig(), 0, [1.9, 0.1] * (pivots // 2))
    expected = weighted.expected(count, 1)
    assert sum(expected.values()) == pytest.approx(count)
    drawn = [index for step in range(1, 401) for index in weighted.draw(count, step)]
    for index in (0, 1):
        assert sum(one % 2 == index for one in drawn) / 400 == pytest.approx(expected[index] * pivots / 2, rel=0.06)


def test_weights_that_say_less_than_they_ask_for_are_told() -> None:
    weights = [1.9, 0.1] * 20
    few, many = (Curriculum(["pivot"] * len(w), CurriculumConfig(), 0, w) for w in (weights, weights * 20))
    assert few.saturation(32, 1) == {"asked": pytest.approx(19), "drawn": pytest.approx(1.67, abs=0.01), "distinct": 40}
    assert many.saturation(32, 1) == {} == curriculum(4).saturation(32, 1)


@pytest.mark.parametrize("weights", [[1.0] * 12, [1.0] * 11 + [1.01]])
def test_replacements_are_others_as_long_as_there_are_any(weights: list[float]) -> None:
    pivots = Curriculum(["pivot"] * 12, CurriculumConfig(), 0, weights)
    for step in range(1, 100):
        first, second, third = pivots.draw(8, step), pivots.draw(3, step), pivots.draw(3, step)
        assert not set(first) & set(second) and len(set(second)) == 3
        free = set(range(12)) - set(first) - set(second)
        assert len(free & set(third)) == min(3, len(free))
        assert len(set(third)) == 3
        assert len(pivots._queue) <= 24


def test_replacements_do_not_change_how_often_a_pivot_comes() -> None:
    pivots = curriculum(12)
    drawn = [index for step in range(1, 201) for count in (5, 3) for index in pivots.draw(count, step)]
    assert all(drawn.count(index) == pytest.approx(len(drawn) / 12, abs=3) for index in range(12))
