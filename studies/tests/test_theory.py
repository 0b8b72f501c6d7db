"""The statements of the papers as laws, on finite action spaces, and that the policy part measures what it predicts."""

import json
import math

import numpy as np
import pytest
import theory_finite as finite
from hypothesis import given, settings
from hypothesis import strategies as st

from run import studies
from turntree.credit.comparisons import grpo_advantages

rates = st.floats(0.01, 0.99)
sizes = st.integers(2, 24)


def test_every_statement_holds_on_random_instances() -> None:
    draws = np.random.default_rng(1)
    assert set(finite.proposition_3_1(draws, 20)["exceptions"].values()) == {0}
    assert max(finite.theorem_3_2(draws, 60)["largest_relative_error"].values()) < 1e-9
    third = finite.theorem_3_3(draws, 60)
    assert max(third["largest_error"].values()) < 1e-9
    assert third["mass_did_not_rise"] == 0
    assert finite.group_update(draws)["largest_error"] < 1e-12


def test_the_policy_gradient_may_be_written_over_macro_actions_that_are_cut_by_what_was_said_before() -> None:
    """ARPO's theorem; a cut by what comes is no macro-action, and its baseline biases."""
    found = finite.macro_actions(np.random.default_rng(3), 3)["largest_error"]
    assert max(found[name] for name in ("by_history", "every_token", "whole")) < 1e-12
    assert found["cut_by_the_end"] > 1e-3


def test_variance_at_the_reference_does_not_order_the_scores_on_the_path() -> None:
    """Theorem 3.2 is about the variance under pi_beta. A state that is mixed at pi_0 may be solved there."""
    mixed, hard = finite.theorem_3_2(np.random.default_rng(0), 2)["counterexample"]["states"]
    assert mixed["variance_at_reference"] > hard["variance_at_reference"]
    assert mixed["score"] < hard["score"]


@given(rates, sizes)
def test_a_group_of_grpo_gains_no_more_than_the_deviation_and_its_update_is_no_longer_than_one(p, size) -> None:
    gain, sigma = finite.expected_deviation(p, size), math.sqrt(p * (1 - p))
    assert gain <= sigma + 1e-12
    assert finite.slope_of_groups(p, size) * sigma <= 1 + 1e-12
    assert finite.slope_of_groups(p, size) <= math.sqrt(size - 1) + 1e-9


@given(rates, st.integers(1, 7))
def test_the_expected_deviation_is_that_of_the_library_s_advantages(p, successes) -> None:
    """The sum of A_i r_i over a group of 8 is its deviation times 8."""
    rewards = [1.0] * successes + [0.0] * (8 - successes)
    along = math.fsum(a * r for a, r in zip(grpo_advantages(rewards, eps=0.0), rewards, strict=True))
    assert along / 8 == pytest.approx(math.sqrt(successes / 8 * (1 - successes / 8)))


@settings(max_examples=25)
@given(st.floats(0.05, 0.9), st.floats(0.4, 3.0), st.sampled_from([2, 8, 16]))
def test_grpo_with_a_kl_term_rests_beyond_the_mass_of_theorem_3_3(rho, beta, size) -> None:
    rest = finite.resting_mass(rho, beta, size)
    assert rest is not None
    logit = math.log(rest / (1 - rest)) - math.log(rho / (1 - rho))
    assert logit == pytest.approx(finite.slope_of_groups(rest, size) / beta, rel=1e-6)
    theorem = 1 / (1 + (1 - rho) / rho * math.exp(-1 / beta))
    assert rest >= theorem - 1e-9  # equal for groups of 2, whose c is 1


def test_large_groups_are_stopped_by_nothing_where_beta_is_small() -> None:
    assert finite.resting_mass(0.5, 2.0, None) is not None
    assert finite.resting_mass(0.5, 0.5, None) is None


def test_a_policy_gradient_changes_the_distribution_within_both_sets() -> None:
    flow = finite.gradient_flow(np.random.default_rng(0), 40)
    assert flow["accepted"]["moved"] > 0.01
    assert flow["refused"]["moved"] > 0.01
    assert flow["accepted"]["sharper"] == 1.0
    assert flow["refused"]["sharper"] == 0.0


def test_predictions_are_met_by_the_library_s_gradients_on_the_embedded_policy(tmp_path, capsys) -> None:
    small = ("--instances", "20", "--states", "2", "--set", "candidates=12", "--set", "samples=8", "--set", "draws=400")
    games = ("--set", "demonstrator.count=3", "--set", "steps=2", "--set", "group_size=4")
    studies.main(["theory", "--out", str(tmp_path / "theory.json"), *small, *games], standalone_mode=False)
    assert "Theorem 3.3" in capsys.readouterr().out
    found = json.loads((tmp_path / "theory.json").read_text())["policy"]
    assert found["signal"]["largest_fisher_error"] < 1e-6
    assert found["signal"]["largest_gain_error"] < 0.5
    dilution = found["dilution"]
    assert dilution["largest_error_of_an_update"] < 1e-4
    for row in dilution["removed"]:
        assert row["measured"] == pytest.approx(row["predicted"], rel=1e-4)
        assert row["cosine"] == pytest.approx(1.0, abs=1e-6)
    for row in found["allocation"]["rules"][:4]:
        assert row["measured"] == pytest.approx(row["predicted"], rel=0.3)
    assert found["zero_variance"]["norm_without"] == 0.0
