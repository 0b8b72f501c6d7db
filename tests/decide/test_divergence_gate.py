"""The gate of the paper: when it decides, and what it cuts."""

from __future__ import annotations

import math

import pytest

from group_progress import progress
from turntree.core import parts
from turntree.core.config import Part
from turntree.core.errors import ConfigError
from turntree.decide.gates.divergence import PrefixDivergenceGate


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


def test_an_unknown_signal_never_cuts():
    def unknown(group, turn):
        return math.nan

    decision = PrefixDivergenceGate(turn=2, threshold=0.1, signal=unknown).decide(progress("aa", "aa"))
    assert not decision.cut and decision.reason == "unknown unknown"


@pytest.mark.parametrize("wrong", [{"turn": 0}, {"threshold": -0.1}, {"threshold": float("nan")}, {"termination": 0}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ConfigError) as refused:
        PrefixDivergenceGate(**wrong)
    assert refused.value.field == next(iter(wrong))


def test_the_mirror_of_the_or_rule_cuts_where_few_have_ended_and_a_gate_takes_any_signal_by_name():
    def build(**options):
        return parts.build("gates", Part("divergence", {"turn": 2, "threshold": 0.0, **options}), seed=0)

    running, one_over = progress("ab", "cd", "ef"), progress("ab", "c", "ef", finished=[1])
    assert build(unended=0.2).decide(running).cut
    assert not build(unended=0.2).decide(one_over).cut
    assert not build().decide(running).cut
    early = progress("a", "b", "abcd", finished=[0, 1])  # the first two are 1/4 apart with END, and 1 without
    assert build(turn=4, threshold=0.7).decide(early).cut
    assert not build(turn=4, threshold=0.7, signal="prefix_edit_distance_mean_printed").decide(early).cut
    with pytest.raises(ConfigError, match="use one of prefix_edit"):
        build(signal="entropy")
