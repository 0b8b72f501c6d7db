"""The gate of the paper: when it decides, what it cuts, and that deciding early never changes the rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from group_progress import HORIZON, played_out, progress, stopped_at
from turntree.decide.gates.divergence import PrefixDivergenceGate, edit_distance_bounds
from turntree.decide.gates.signals import best_progress, prefix_edit_distance_mean, termination_fraction


def test_the_threshold_is_strict():
    group = progress("aaaa", "aaab")  # d_4 = 1/4
    at, above = PrefixDivergenceGate(turn=4, threshold=0.25), PrefixDivergenceGate(turn=4, threshold=0.2501)
    assert not at.decide(group).cut
    assert above.decide(group).cut


def test_a_group_is_judged_once_its_slowest_rollout_has_reached_the_turn():
    gate = PrefixDivergenceGate(turn=3, threshold=0.5)
    assert gate.decide(progress("aaaa", "aa")) is None
    assert gate.decide(progress("aaaa", "aaab")).cut
    assert gate.decide(progress("aaaa", "a", finished=[1])).cut is False  # (END, END) against (a, a): 2/3


def test_a_group_with_nothing_left_to_save_is_not_cut():
    decision = PrefixDivergenceGate(turn=2, threshold=1.0).decide(progress("aa", "aa", finished=[0, 1]))
    assert (decision.cut, decision.final, decision.reason) == (False, True, "nothing left to save")


def test_one_unfinished_rollout_is_enough_to_save_something():
    assert PrefixDivergenceGate(turn=2, threshold=0.5).decide(progress("aa", "aa", finished=[0])).cut


def test_a_single_rollout_cannot_converge():
    assert not PrefixDivergenceGate(turn=1, threshold=0.5).decide(progress("a")).cut


def test_the_or_rule_cuts_where_enough_rollouts_have_ended():
    group = progress("a", "b", "c", "defg", finished=[0, 1, 2])
    plain = PrefixDivergenceGate(turn=4, threshold=0.1)
    assert not plain.decide(group).cut
    assert PrefixDivergenceGate(turn=4, threshold=0.1, termination=0.75).decide(group).cut
    assert not PrefixDivergenceGate(turn=4, threshold=0.1, termination=0.76).decide(group).cut


def test_a_decision_carries_the_numbers_it_was_made_of():
    decision = PrefixDivergenceGate(turn=4, threshold=0.3).decide(progress("aaaa", "aaab", "a", finished=[2]))
    assert decision.numbers == {
        "turn": 4,
        "prefix_edit_distance_mean": pytest.approx((1 + 3 + 3) / 12),
        "threshold": 0.3,
        "termination_fraction": pytest.approx(1 / 3),
    }


def test_a_signal_of_the_users_own_is_a_plain_function():
    def first_action_agrees(group, turn):
        return float(len({actions[0] for actions in group.actions}) - 1)

    gate = PrefixDivergenceGate(turn=2, threshold=0.5, signal=first_action_agrees)
    assert gate.decide(progress("ax", "ay")).cut
    assert not gate.decide(progress("xa", "ya")).cut


def test_progress_of_the_environment_is_a_signal_and_unknown_progress_never_cuts():
    gate = PrefixDivergenceGate(turn=2, threshold=0.1, signal=best_progress)
    assert gate.decide(progress("ax", "by", reported=[0.0, 0.05])).cut
    assert not gate.decide(progress("ax", "by", reported=[0.0, 0.5])).cut
    unknown = gate.decide(progress("aa", "aa"))
    assert not unknown.cut and unknown.reason == "best_progress unknown"


@pytest.mark.parametrize("wrong", [{"turn": 0}, {"threshold": -0.1}, {"threshold": float("nan")}, {"termination": 0}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PrefixDivergenceGate(**wrong)


@given(played_out(min_size=2), st.integers(1, HORIZON), st.data())
def test_what_a_group_becomes_lies_within_the_bounds(rollouts, turn, data):
    group = stopped_at(rollouts, data.draw(st.integers(1, turn)))
    reached = min((len(a) for a, done in zip(group.actions, group.finished, strict=True) if not done), default=turn)
    low, high = edit_distance_bounds(group, turn, min(reached, turn))
    assert low <= prefix_edit_distance_mean(stopped_at(rollouts, turn), turn) <= high


def test_both_bounds_are_reached():
    seen, turn = ("ab", "ac", "ab"), 5
    low, high = edit_distance_bounds(progress(*seen), turn, 2)
    assert low == pytest.approx(prefix_edit_distance_mean(progress(*(s + "xyz" for s in seen)), turn))
    different = [s + tail for s, tail in zip(seen, ("def", "ghi", "jkl"), strict=True)]
    assert high == pytest.approx(prefix_edit_distance_mean(progress(*different), turn))


@given(
    played_out(min_size=2),
    st.integers(2, HORIZON),
    st.floats(0, 1),
    st.none() | st.floats(0.05, 1),
    st.integers(1, HORIZON),
)
def test_an_early_decision_is_the_one_the_rule_makes_at_its_turn(rollouts, turn, threshold, termination, moment):
    gate = PrefixDivergenceGate(turn=turn, threshold=threshold, termination=termination, bounds=edit_distance_bounds)
    early = gate.decide(stopped_at(rollouts, min(moment, turn - 1)))
    whole = stopped_at(rollouts, turn)
    converged = prefix_edit_distance_mean(whole, turn) < threshold
    ended = termination is not None and termination_fraction(whole, turn) >= termination
    if early is not None and early.reason != "nothing left to save":
        assert early.final and early.cut == (converged or ended)


def test_bounds_settle_both_answers_before_the_turn():
    gate = PrefixDivergenceGate(turn=4, threshold=0.3, bounds=edit_distance_bounds)
    assert gate.decide(progress("a", "b")) is None  # between 1/4 and 4/4
    assert gate.decide(progress("ab", "cd")).cut is False  # at least 2/4
    assert gate.decide(progress("aaa", "aaa")).cut  # at most 1/4
