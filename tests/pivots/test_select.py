"""Selection: Eq. 5 exactly, every candidate counted once, mastered kinds kept by anchors."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from turntree.core.errors import ConfigError
from turntree.pivots.select import SelectConfig, classify, is_pivot, preview, select


def row(successes: int, rollouts: int = 16, kind: str = "take", turn: int = 0, trace: str = "t") -> dict:
    mean = successes / rollouts
    return {
        "trace_id": trace,
        "turn": turn,
        "kind": kind,
        "reward_mean": mean,
        "reward_var": mean * (1 - mean),
    }


UNJUDGED = {"trace_id": "u", "turn": 0, "kind": "take", "reward_mean": None, "reward_var": None}
rows = st.lists(
    st.builds(row, st.integers(0, 16), kind=st.sampled_from(["take", "open", "go"]), turn=st.integers(0, 10**6)),
    min_size=1,
    max_size=60,
)


def test_a_pivot_has_variance_and_a_mean_strictly_below_lambda():
    assert [is_pivot(row(k, 10), 0.6) for k in (0, 1, 5, 6, 9, 10)] == [False, True, True, False, False, False]


def test_every_class_has_its_name():
    found = [classify(r, 0.6) for r in (row(0), row(16), row(8), row(12), UNJUDGED)]
    assert found == ["all fail", "all succeed", "pivot", "mixed but easy", "unjudged"]


@given(rows, st.sampled_from([0.3, 0.6, 1.0]), st.floats(0, 0.8), st.sampled_from([0.4, 0.5, 1.0]))
def test_the_counts_add_up_to_the_candidates(candidates, threshold, anchors, cap):
    kinds = {r["kind"] for r in candidates if is_pivot(r, threshold)}
    assume(not kinds or len(kinds) * cap >= 1)
    config = SelectConfig(threshold=threshold, anchor_share=anchors, max_per_kind=cap)
    selection = select([*candidates, UNJUDGED], config)
    assert sum(selection.counts.values()) == len(candidates) + 1
    assert sum(r["role"] == "pivot" for r in selection.rows) == selection.counts["pivot"]


@given(rows)
def test_without_options_the_selection_is_exactly_the_pivots_in_order(candidates):
    selection = select(candidates, SelectConfig())
    assert [r["turn"] for r in selection.rows] == [r["turn"] for r in candidates if is_pivot(r, 0.6)]


def test_anchors_are_mastered_turns_spread_over_kinds():
    mastered = [row(16, kind="open", turn=i) for i in range(50)] + [row(15, kind="use", turn=i) for i in range(3)]
    selection = select([row(4, turn=i) for i in range(8)] + mastered, SelectConfig(anchor_share=0.5))
    anchors = [r["kind"] for r in selection.rows if r["role"] == "anchor"]
    assert sorted(anchors) == ["open"] * 5 + ["use"] * 3


def test_a_turn_of_constant_partial_reward_below_lambda_is_no_anchor():
    partial = {**row(16), "reward_mean": 0.125, "turn": 9}
    chosen = select([row(8), row(16, turn=1), partial], SelectConfig(threshold=0.6, anchor_share=0.5))
    assert [(one["turn"], one["role"]) for one in chosen.rows] == [(0, "pivot"), (1, "anchor")]


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"max_per_kind": 0.0}, "max_per_kind"), ({"anchor_share": 1.0}, "anchor_share"),
        ({"rule": "random", "weight": "variance"}, "weight"),
    ],
)  # fmt: skip
def test_a_refused_setting_is_named(values, field):
    with pytest.raises(ConfigError, match=field):
        SelectConfig(**values)


def test_random_pivots_are_as_many_and_blind_to_the_profile():
    candidates = [row(4, turn=i) for i in range(30)] + [row(16, turn=100 + i) for i in range(70)]
    drawn = select(candidates, SelectConfig(rule="random", seed=3)).rows
    assert len(drawn) == 30
    assert {r["role"] for r in drawn} == {"random"}
    assert 5 <= sum(r["reward_mean"] == 0.25 for r in drawn) <= 15  # about 30% of any blind draw
    assert drawn == select(candidates, SelectConfig(rule="random", seed=3)).rows
    assert drawn != select(candidates, SelectConfig(rule="random", seed=4)).rows


def test_the_cap_bounds_the_largest_kind_only():
    candidates = [row(4, kind="go", turn=i) for i in range(90)] + [row(4, kind="take", turn=i) for i in range(10)]
    kinds = [r["kind"] for r in select(candidates, SelectConfig(max_per_kind=0.5)).rows]
    assert (kinds.count("go"), kinds.count("take")) == (10, 10)


def test_the_cap_holds_for_every_kind():
    sizes = {"go": 1000, "take": 900, "open": 100}
    candidates = [row(4, kind=kind, turn=i) for kind, size in sizes.items() for i in range(size)]
    selection = select(candidates, SelectConfig(max_per_kind=0.4))
    kinds = [r["kind"] for r in selection.rows]
    assert {kind: kinds.count(kind) for kind in sizes} == {"go": 200, "take": 200, "open": 100}
    assert selection.counts == {"pivot": 500, "pivot over its kind's cap": 1500}


def test_too_few_kinds_for_a_cap_is_an_error():
    with pytest.raises(ConfigError, match="1 kinds of action"):
        select([row(4, turn=i) for i in range(10)], SelectConfig(max_per_kind=0.5))


def test_a_blind_draw_says_what_it_drew():
    candidates = [row(4, turn=i) for i in range(3)] + [row(16, turn=9), UNJUDGED]
    assert select(candidates, SelectConfig(rule="random")).counts == {"drawn": 3, "not drawn": 1, "unjudged": 1}


def test_the_preview_counts_what_each_lambda_keeps():
    candidates = [row(2), row(8, kind="open"), row(14)]
    assert [r["pivots"] for r in preview(candidates, (0.2, 0.6, 1.01))] == [1, 2, 3]


@pytest.mark.parametrize("bad", [{"threshold": 0.0}, {"threshold": 2.0}, {"anchor_share": 1.0}, {"max_per_kind": 0.0}])
def test_impossible_settings_are_refused(bad):
    with pytest.raises(ConfigError):
        SelectConfig(**bad)


def at(state: str, action: str, number: int = 0, trace: str = "t", kind: str = "take") -> dict:
    return {**row(4, kind=kind, turn=number, trace=trace), "state": state, "demonstrated": action}


def test_one_of_equal_demonstrations_at_equal_states_is_kept():
    candidates = [at("s", "take cup 1", trace=name) for name in "abc"] + [at("s", "open box 1"), at("r", "take cup 1")]
    selection = select(candidates, SelectConfig())
    assert selection.counts == {"pivot": 3, "pivot that is a duplicate": 2}
    assert len(selection.rows) == 3
    assert len(select(candidates, SelectConfig(per_duplicate=0)).rows) == 5


def test_no_action_and_no_trajectory_fills_the_set():
    candidates = [at(f"s{i}", "look", i, trace=f"t{i % 3}") for i in range(12)] + [at("r", "take cup 1", 99)]
    assert select(candidates, SelectConfig(per_action=5)).counts == {"pivot": 6, "pivot over its action's limit": 7}
    selection = select(candidates, SelectConfig(per_trajectory=2))
    assert selection.counts == {"pivot": 7, "pivot over its trajectory's limit": 6}
    assert max([r["trace_id"] for r in selection.rows].count(name) for name in ("t", "t0", "t1", "t2")) == 2


def test_a_quota_is_a_number_and_a_star_stands_for_every_other_kind():
    sizes = {"go": 9, "take": 8, "open": 7}
    candidates = [row(4, kind=kind, turn=i) for kind, size in sizes.items() for i in range(size)]
    selection = select(candidates, SelectConfig(quota={"go": 5, "*": 2}))
    kinds = [r["kind"] for r in selection.rows]
    assert {kind: kinds.count(kind) for kind in sizes} == {"go": 5, "take": 2, "open": 2}
    assert selection.counts == {"pivot": 9, "pivot over its kind's quota": 15}
    assert selection == select(candidates, SelectConfig(quota={"go": 5, "*": 2}))
    assert [r["kind"] for r in select(candidates, SelectConfig(quota={"go": 0})).rows].count("go") == 0


@given(
    st.lists(st.builds(at, st.sampled_from("xy"), st.sampled_from("ab"), st.integers(0, 9), st.sampled_from("tu"))),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_whatever_is_dropped_is_counted_once(candidates, duplicates, trajectory, action):
    config = SelectConfig(per_duplicate=duplicates, per_trajectory=trajectory, per_action=action, quota={"*": 5})
    selection = select(candidates, config)
    assert sum(selection.counts.values()) == len(candidates)
    assert selection.counts.get("pivot", 0) == len(selection.rows) <= 5


def test_weights_rise_with_importance_and_are_never_zero():
    rows = [important(0, 0.9), important(1, 0.1), important(2, -0.5), row(8, turn=3)]
    weights = [r["weight"] for r in select(rows, SelectConfig(weight="both")).rows]
    assert weights[0] > weights[1] >= weights[2] > 0 and sum(weights) / 4 == pytest.approx(1)


def test_states_on_which_nothing_hangs_are_drawn_alike():
    rows = [important(0, -0.2), important(1, -0.1)]
    assert [r["weight"] for r in select(rows, SelectConfig(weight="importance")).rows] == [1.0, 1.0]


def test_weights_by_importance_without_a_measurement_are_refused():
    for rows in ([row(8)], [important(0, None)]):
        with pytest.raises(ConfigError, match="turntree importance"):
            select(rows, SelectConfig(weight="both"))


def important(turn: int, difference: float | None) -> dict:
    error = None if difference is None else 0.1
    return {**row(8, turn=turn), "importance": {"difference": difference, "error": error}}
