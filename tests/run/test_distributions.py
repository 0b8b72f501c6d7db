"""Our distributions and pairings against SciPy's, which an installation need not have."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching
from scipy.special import betaincinv
from scipy.stats import binom, binomtest, t

from turntree.run.distributions import at_least, binomial, share_of_tail, student
from turntree.run.statistics import successes_needed
from turntree.verify.matching import most_pairs

COUNTS = st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(1, n), st.just(n)))
SHARES = st.floats(0.001, 0.999)


@given(COUNTS, SHARES)
def test_chances_of_counts_are_the_binomial_ones(counts, share):
    won, trials = counts
    assert math.isclose(
        float(binomial(won, trials, share)), binom.pmf(won, trials, share), rel_tol=1e-9, abs_tol=1e-300
    )
    assert math.isclose(at_least(won, trials, share), binom.sf(won - 1, trials, share), rel_tol=1e-9, abs_tol=1e-250)
    assert binomial(np.arange(trials + 1), trials, share).sum() == pytest.approx(1)


def test_chances_of_nothing_and_of_certainty_are_no_special_cases():
    assert binomial([0, 5, 4], 5, [0.0, 1.0, 1.0]).tolist() == [1.0, 1.0, 0.0] and float(binomial(0, 0, 0.3)) == 1.0


@given(COUNTS, st.sampled_from([0.05, 0.025, 1e-3, 1e-6]))
def test_the_share_of_a_tail_is_the_quantile_of_the_beta_distribution(counts, tail):
    won, trials = counts
    assert share_of_tail(won, trials, tail) == pytest.approx(betaincinv(won, trials - won + 1, tail), rel=1e-9)


@given(st.integers(1, 3000), st.sampled_from([0.8, 0.9, 0.975, 0.995]))
@settings(max_examples=60)
def test_quantiles_of_student_are_those_of_scipy(free, below):
    assert student(below, free) == pytest.approx(t.ppf(below, free), rel=1e-9)


@pytest.mark.parametrize("floor", [0.5, 0.8, 0.99])
@pytest.mark.parametrize("confidence", [0.95, 0.9999])
def test_the_fewest_successes_are_the_quantiles_of_the_tail(floor, confidence):
    wanted = binom.isf(1 - confidence, np.arange(301), floor).astype(int) + 1
    assert (successes_needed(300, floor, confidence) == wanted).all()


@given(st.integers(0, 60), st.integers(0, 60))
def test_the_sign_test_is_the_exact_binomial_one(lost, won):
    if lost + won:
        exact = binomtest(lost, lost + won, alternative="greater").pvalue
        assert at_least(lost, lost + won, 0.5) == pytest.approx(exact, rel=1e-9)


@given(st.integers(1, 7).flatmap(lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), max_size=7)))
def test_as_many_calls_are_paired_as_can_be(near):
    wide = len(near[0]) if near else 0
    found = most_pairs(range(len(near)), range(wide), lambda row, column: near[row][column])
    best = int((maximum_bipartite_matching(csr_array(np.array(near, dtype=int))) >= 0).sum()) if near else 0
    assert found == best
