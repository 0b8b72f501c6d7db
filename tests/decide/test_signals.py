"""The seven signals against their formulas, written out here, and at their corners."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from group_progress import HORIZON, played_out, progress, stopped_at
from turntree.decide.gates.signals import (
    SIGNALS,
    action_bigram_jaccard_mean,
    action_bigram_jaccard_mean_printed,
    action_entropy,
    action_entropy_printed,
    obs_unique_ratio,
    obs_unique_ratio_printed,
    prefix_edit_distance_mean,
    prefix_edit_distance_mean_printed,
    termination_fraction,
    termination_fraction_printed,
    unique_action_ratio,
    unique_prefix_ratio,
)

TURNS = st.integers(1, HORIZON)


def levenshtein(a: tuple, b: tuple) -> int:
    if not a or not b:
        return len(a) + len(b)
    return min(levenshtein(a[1:], b) + 1, levenshtein(a, b[1:]) + 1, levenshtein(a[1:], b[1:]) + (a[0] != b[0]))


@given(played_out(min_size=2), st.integers(1, 4))
def test_the_edit_distance_is_the_recursive_definition_on_padded_prefixes(rollouts, turn):
    padded = [(*rollout[:turn], *["END"] * (turn - len(rollout))) for rollout in rollouts]
    pairs = [levenshtein(a, b) / turn for a, b in combinations(padded, 2)]
    assert prefix_edit_distance_mean(stopped_at(rollouts, turn), turn) == pytest.approx(sum(pairs) / len(pairs))


def test_padding_deflates_the_distance_of_early_finishers():
    group = progress("ab", "cd", finished=[0, 1])
    assert prefix_edit_distance_mean(group, 5) == 2 / 5
    assert prefix_edit_distance_mean(group, 2) == 1.0


def test_actions_are_compared_whole_not_letter_by_letter():
    assert prefix_edit_distance_mean(progress(["go to desk 1"], ["go to desk 2"]), 1) == 1.0


def test_a_distance_at_group_size_8_and_turn_10_is_a_multiple_of_1_in_280():
    group = progress(*["aaaaaaaaaa"] * 7, "aaaabaaaaa")
    assert prefix_edit_distance_mean(group, 10) == 7 / 280


def test_turns_after_the_checked_one_are_not_looked_at():
    short, ahead = progress("abc", "abd"), progress("abcxyz", "abdyzxc")
    for name, signal in SIGNALS.items():
        assert signal(short, 3) == signal(ahead, 3), name


@given(played_out(min_size=2), TURNS)
def test_bigrams_are_compared_as_sets_with_end_as_a_symbol(rollouts, turn):
    padded = [rollout[:turn].ljust(turn, "$") for rollout in rollouts]
    sets = [{rollout[i : i + 2] for i in range(turn - 1)} for rollout in padded]
    expected = [1 - len(a & b) / len(a | b) if a | b else 0.0 for a, b in combinations(sets, 2)]
    value = action_bigram_jaccard_mean(stopped_at(rollouts, turn), turn)
    assert value == pytest.approx(sum(expected) / len(expected))


def test_at_turn_1_there_is_no_bigram_to_differ_in():
    assert action_bigram_jaccard_mean(progress("a", "b"), 1) == 0.0


def test_one_of_two_bigrams_shared_twice_counts_once():
    assert action_bigram_jaccard_mean(progress("abab", "abcc"), 4) == 1 - 1 / 4  # {ab, ba} and {ab, bc, cc}


def test_ratios_count_distinct_prefixes_and_distinct_last_actions():
    group = progress("aax", "abx", "aax", "aa", finished=[3])
    assert unique_prefix_ratio(group, 3) == 3 / 4
    assert unique_action_ratio(group, 3) == 2 / 4  # x and END
    assert unique_action_ratio(group, 2) == 2 / 4


def test_entropy_is_normalised_by_the_group_size_and_zero_without_a_sign():
    assert action_entropy(progress("a", "b", "c", "d"), 1) == pytest.approx(1.0)
    assert action_entropy(progress("a", "a", "b", "b"), 1) == pytest.approx(0.5)
    same = action_entropy(progress("a", "a", "a"), 1)
    assert same == 0.0 and math.copysign(1, same) == 1.0


def test_observations_are_those_before_the_action_and_end_where_there_is_none():
    seen = [["task", "left"], ["task", "right"], ["task"]]
    group = progress("ab", "ab", "a", finished=[2], observations=seen)
    assert obs_unique_ratio(group, 1) == 1 / 3
    assert obs_unique_ratio(group, 2) == 3 / 3


def test_ending_exactly_at_the_checked_turn_is_not_counted_as_terminated():
    group = progress("ab", "abc", "abcd", finished=[0, 1])
    assert termination_fraction(group, 3) == 1 / 3
    assert termination_fraction(group, 4) == 2 / 3


def test_an_unfinished_rollout_behind_the_turn_has_not_terminated():
    assert termination_fraction(progress("a", "abc"), 3) == 0.0


@given(played_out(), TURNS)
def test_signals_are_shares_and_converged_groups_have_no_divergence(rollouts, turn):
    group, converged = stopped_at(rollouts, turn), stopped_at([rollouts[0]] * len(rollouts), turn)
    for name, signal in SIGNALS.items():
        assert 0.0 <= signal(group, turn) <= 1.0 + 1e-12, name
        if name != "termination_fraction":
            assert signal(converged, turn) == (1 / len(rollouts) if "unique" in name else 0.0), name


@given(played_out(min_size=2), TURNS, st.randoms(use_true_random=False))
def test_the_order_of_the_rollouts_does_not_matter(rollouts, turn, random):
    shuffled = random.sample(rollouts, len(rollouts))
    for name, signal in SIGNALS.items():
        assert signal(stopped_at(shuffled, turn), turn) == pytest.approx(signal(stopped_at(rollouts, turn), turn)), name


@given(played_out(min_size=2), st.integers(1, 4))
def test_the_printed_signals_are_those_of_the_papers_text(rollouts, turn):
    """Appendix B: the longer length divides, bigrams are of actions taken, the entropy is Shannon's, and a rollout that
    ends at step K has finished by step K."""
    played = stopped_at(rollouts, turn)
    pairs = list(combinations([rollout[:turn] for rollout in rollouts], 2))
    distances = [levenshtein(a, b) / max(len(a), len(b), 1) for a, b in pairs]
    assert prefix_edit_distance_mean_printed(played, turn) == pytest.approx(sum(distances) / len(pairs))
    sets = [(set(pairwise(a)), set(pairwise(b))) for a, b in pairs]
    apart = [1 - len(a & b) / len(a | b) if a | b else 0.0 for a, b in sets]
    assert action_bigram_jaccard_mean_printed(played, turn) == pytest.approx(sum(apart) / len(pairs))
    taken = Counter(rollout[turn - 1] if len(rollout) >= turn else None for rollout in rollouts)
    shares = [count / len(rollouts) for count in taken.values()]
    assert action_entropy_printed(played, turn) == pytest.approx(-sum(p * math.log(p) for p in shares), abs=1e-12)
    ended = [done and len(actions) <= turn for actions, done in zip(played.actions, played.finished, strict=True)]
    assert termination_fraction_printed(played, turn) == pytest.approx(sum(ended) / len(rollouts))


def test_the_printed_observation_is_the_one_after_the_action():
    group = progress("ab", "ac", observations=["txy", "txz"])
    assert obs_unique_ratio(group, 2) == 1 / 2
    assert obs_unique_ratio_printed(group, 2) == 1.0
