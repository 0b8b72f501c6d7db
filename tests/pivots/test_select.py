"""Selection: Eq. 5 exactly, every candidate counted once, mastered kinds kept by anchors."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.core.errors import ConfigError
from turntree.pivots.rows import classify
from turntree.pivots.select import SelectConfig, capped_shares, is_pivot, over_kinds, preview, select

PAPER = {"max_per_kind": 1.0, "anchor_share": 0.0}  # its form


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


@given(st.lists(st.sampled_from("abcd"), max_size=40), st.integers(0, 50), st.integers(0, 3))
def test_items_are_drawn_from_every_kind_alike_until_a_kind_has_no_more(kinds, wanted, seed):
    taken = over_kinds(range(len(kinds)), kinds, wanted, seed)
    assert taken == sorted(set(taken)) and len(taken) == min(wanted, len(kinds))
    drawn = Counter(kinds[place] for place in taken)
    most = max(drawn.values(), default=0)
    assert all(drawn[kind] >= min(most - 1, count) for kind, count in Counter(kinds).items())


def test_which_items_of_a_kind_are_drawn_is_a_matter_of_the_seed():
    kinds = ["go"] * 30 + ["take"] * 3
    drawn = {tuple(over_kinds(range(33), kinds, 9, seed)) for seed in range(4)}
    assert len(drawn) == 4 and all(set(places) >= {30, 31, 32} for places in drawn)


def test_a_pivot_has_variance_and_a_mean_strictly_below_lambda():
    assert [is_pivot(row(k, 10), 0.6) for k in (0, 1, 5, 6, 9, 10)] == [False, True, True, False, False, False]


def test_a_turn_that_always_succeeds_does_so_at_every_lambda():
    assert classify(row(16), 1.01) == "all succeed" and classify(row(15), 1.01) == "pivot"


def test_every_class_has_its_name():
    found = [classify(r, 0.6) for r in (row(0), row(16), row(8), row(12), UNJUDGED)]
    assert found == ["all fail", "all succeed", "pivot", "mixed but easy", "unjudged"]


@given(rows, st.sampled_from([0.3, 0.6, 1.0]), st.floats(0, 0.8), st.sampled_from([0.4, 0.5, 1.0]))
def test_the_counts_add_up_to_the_candidates(candidates, threshold, anchors, cap):
    config = SelectConfig(threshold=threshold, anchor_share=anchors, max_per_kind=cap)
    selection = select([*candidates, UNJUDGED], config)
    assert sum(selection.counts.values()) == len(candidates) + 1
    assert sum(r["role"] == "pivot" for r in selection.rows) == selection.counts["pivot"]


@given(rows)
def test_the_papers_form_is_exactly_the_pivots_in_order_all_alike(candidates):
    selection = select(candidates, SelectConfig(**PAPER))
    assert [r["turn"] for r in selection.rows] == [r["turn"] for r in candidates if is_pivot(r, 0.6)]
    assert all(r["weight"] == 1.0 for r in selection.rows)


def shares(selection, name, *, role=None) -> dict[str, float]:
    """Of the draws, by the values of a field of the rows."""
    rows = [r for r in selection.rows if role in (None, r["role"])]
    total = sum(r["weight"] for r in rows)
    found: dict[str, float] = {}
    for r in rows:
        found[r[name]] = found.get(r[name], 0.0) + r["weight"] / total
    return found


@given(rows, st.sampled_from([0.1, 0.3, 0.5, 1.0]), st.sampled_from([0.0, 0.3, 0.8]))
def test_no_kind_has_more_of_the_draws_than_its_cap_and_nothing_is_dropped(candidates, cap, anchors):
    selection = select(candidates, SelectConfig(max_per_kind=cap, anchor_share=anchors))
    of_pivots = shares(selection, "kind", role="pivot")
    assert all(share <= max(cap, 1 / len(of_pivots)) + 1e-9 for share in of_pivots.values())
    of_anchors = shares(selection, "kind", role="anchor")
    assert all(share == pytest.approx(1 / len(of_anchors)) for share in of_anchors.values())
    roles = [r["role"] for r in selection.rows]
    assert roles.count("anchor") <= round(roles.count("pivot") * anchors / (1 - anchors)), "steps draw distinct turns"
    pivots = [r["turn"] for r in candidates if is_pivot(r, 0.6)]
    assert [r["turn"] for r in selection.rows if r["role"] == "pivot"] == pivots
    if pivots and of_anchors:
        assert shares(selection, "role")["anchor"] == pytest.approx(anchors)
    assert sum(r["weight"] for r in selection.rows) == pytest.approx(len(selection.rows))


@given(st.dictionaries(st.sampled_from("abcde"), st.floats(0.01, 1000), min_size=1), st.floats(0.05, 1))
def test_capped_shares_add_up_and_kinds_below_the_cap_keep_their_proportions(sizes, cap):
    found = capped_shares(sizes, cap)
    top = max(cap, 1 / len(sizes))
    assert sum(found.values()) == pytest.approx(1) and max(found.values()) <= top + 1e-9
    below = [kind for kind in sizes if found[kind] < top - 1e-9]
    for one in below:
        for other in below:
            assert found[one] * sizes[other] == pytest.approx(found[other] * sizes[one])
    assert all(sizes[full] >= sizes[kind] for kind in below for full in sizes.keys() - set(below))


def test_a_policy_that_only_searches_is_paid_for_one_kind_in_three_at_most():
    """At hard games two thirds of the mixed turns are searches (docs/results/hard.md)."""
    candidates = [row(4, kind="search", turn=i) for i in range(90)]
    candidates += [row(4, kind=kind, turn=100 + i) for kind in ("take", "open", "put") for i in range(10)]
    assert shares(select(candidates, SelectConfig(**PAPER)), "kind")["search"] == pytest.approx(0.75)
    assert shares(select(candidates, SelectConfig()), "kind")["search"] == pytest.approx(0.3)


def test_a_set_without_pivots_has_no_anchors_either():
    assert select([row(16), row(0, turn=1)], SelectConfig()).rows == ()


def test_a_turn_of_constant_partial_reward_below_lambda_is_no_anchor():
    partial = {**row(16), "reward_mean": 0.125, "turn": 9}
    chosen = select([row(8), row(16, turn=1), partial], SelectConfig(threshold=0.6, anchor_share=0.5))
    assert [(one["turn"], one["role"]) for one in chosen.rows] == [(0, "pivot"), (1, "anchor")]


def test_a_lambda_above_one_keeps_turns_that_always_succeed_as_anchors():
    chosen = select([row(8), row(16, turn=1)], SelectConfig(threshold=1.01, anchor_share=0.5))
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


@given(
    st.lists(st.builds(at, st.sampled_from("xy"), st.sampled_from("ab"), st.integers(0, 9), st.sampled_from("tu"))),
    st.integers(0, 3),
)
def test_whatever_is_dropped_is_counted_once(candidates, duplicates):
    selection = select(candidates, SelectConfig(per_duplicate=duplicates))
    assert sum(selection.counts.values()) == len(candidates)
    assert selection.counts.get("pivot", 0) == len(selection.rows)


@pytest.mark.parametrize("given", [{"anchor_share": 0.9}, {"max_per_kind": 0.01}, {"weight": "variance"}])
def test_a_blind_draw_refuses_what_it_would_not_do(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        SelectConfig(rule="random", **given)
    assert error.value.field == next(iter(given))
    SelectConfig(rule="random", anchor_share=0, max_per_kind=1)
