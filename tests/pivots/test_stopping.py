"""Adaptive K: what stops early would have ended the same way, certainly or as often as it says."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import betabinom

from turntree.core.errors import ConfigError
from turntree.pivots.rows import Class, class_of
from turntree.pivots.stopping import AdaptiveConfig, Prior, StoppingRule, way_of

K = 16
outcomes = st.lists(st.sampled_from([0.0, 1.0]), min_size=K, max_size=K)


def row(successes: int, failures: int) -> dict:
    actions = [{"reward": 1.0, "count": successes}, {"reward": 0.0, "count": failures}]
    return {"successes": successes, "rollouts": successes + failures, "unjudged": 0, "actions": actions}


def stopping(rollouts: int = K, rows: tuple[dict, ...] = (), **settings) -> StoppingRule:
    prior = Prior(rollouts)
    prior.learn(rows)
    return StoppingRule(AdaptiveConfig(**settings), rollouts, prior)


@given(outcomes, st.sampled_from([0.3, 0.6, 1.0]))
def test_what_is_certain_early_is_what_all_rollouts_find(rewards, threshold):
    certain = stopping(confidence=1.0, threshold=threshold)
    for count in range(1, K + 1):
        forecast = certain.settled(rewards[:count])
        if forecast is not None:
            assert forecast.kind is way_of(rewards, threshold)


def test_certainty_comes_as_early_as_it_can():
    """Of 16, lambda = 0.6 lies between 9 and 10 successes."""
    certain = stopping(confidence=1.0)
    assert certain.settled([1.0] + [0.0] * 6) is None  # 10 of 16 are above lambda
    assert certain.settled([1.0] + [0.0] * 7).kind is Class.PIVOT  # at most 9 of 16
    assert certain.settled([0.0] + [1.0] * 9) is None  # 9 of 16 are below
    assert certain.settled([0.0] + [1.0] * 10).kind is Class.EASY
    assert certain.settled([0.0] * 15) is None, "the last one may succeed"


def test_rewards_that_are_not_judged_shorten_the_group():
    certain = stopping(confidence=1.0)
    assert certain.settled([None] * 6 + [1.0] + [0.0] * 5).kind is Class.PIVOT  # 5 of 10 at most
    assert certain.settled([None] * K).kind is Class.UNJUDGED


def test_fractional_rewards_can_be_certain_and_are_not_forecast():
    rule = stopping(confidence=0.6)
    assert rule.settled([0.5] * 6) is None
    assert rule.settled([0.0, 0.5, 0.5]) is None  # one success and two failures would be a pivot
    assert rule.settled([0.5, 0.25] + [0.0] * 8).kind is Class.PIVOT


def test_candidates_with_fractional_rewards_teach_the_prior_nothing():
    """Their successes and failures are not all of their rollouts."""
    halves = {"successes": 4, "rollouts": K, "unjudged": 0, "actions": [{"reward": 0.5, "count": 12}]}
    assert (stopping(rows=(halves,) * 50)._weights_G == stopping()._weights_G).all()


@pytest.mark.parametrize(("successes", "failures"), [(4, 0), (3, 1), (1, 1), (2, 3)])
def test_without_candidates_the_forecast_is_that_of_jeffreys_prior(successes, failures):
    """Eight rollouts: the successes to come are beta-binomial, and from five on the mean is above lambda = 0.6."""
    left = 8 - successes - failures
    to_come = betabinom(left, successes + 0.5, failures + 0.5)
    above = to_come.sf(4 - successes)  # more than four in all
    forecast = stopping(8, confidence=0.51).settled([1.0] * successes + [0.0] * failures)
    assert forecast is not None
    assert forecast.kind is (Class.EASY if above > 0.5 else Class.PIVOT)
    assert forecast.probability == pytest.approx(max(above, 1 - above), abs=0.015)


def test_only_failures_leave_a_pivot_or_all_fail():
    """None of four, Jeffreys' prior: that the other four fail too has the chance B(1/2, 8.5) / B(1/2, 4.5) = 0.72."""
    forecast = stopping(8, confidence=0.51).settled([0.0] * 4)
    assert forecast is not None and forecast.kind is Class.FAIL
    assert forecast.probability == pytest.approx(betabinom(4, 0.5, 4.5).pmf(0), abs=0.015)


def test_a_class_is_settled_only_by_rewards_that_have_it():
    """Candidates of 30% on average: after four failures a pivot is likely, and a row of failures is not selected."""
    rule = stopping(confidence=0.9, rows=tuple(row(5, 11) for _ in range(300)))
    likely = rule._forecast(0, 4, K - 4)
    assert likely.kind is Class.PIVOT and likely.probability > 0.9
    assert rule.settled([0.0] * 4) is None
    assert rule.settled([0.0] * 4 + [1.0]).kind is Class.PIVOT


def test_the_prior_depends_on_the_counts_alone():
    rows = [row(k, K - k) for k in (0, 0, 3, 16, 16, 9)] + [row(4, 0), row(1, 5)]
    forwards, backwards = Prior(K), Prior(K)
    forwards.learn(rows)
    for one in reversed(rows):
        backwards.learn([one])
    assert forwards.weights().tobytes() == backwards.weights().tobytes()
    assert forwards.weights().sum() == pytest.approx(1)


def test_the_prior_finds_the_policies_that_were_planted():
    rng = random.Random(0)
    prior = Prior(K)
    for number in range(600):
        chance = (0.0, 1.0, 0.5)[number % 3]
        wins = sum(rng.random() < chance for _ in range(K))
        prior.learn([row(wins, K - wins)])
    weights = prior.weights()
    assert weights[:8].sum() == pytest.approx(1 / 3, abs=0.03)
    assert weights[-8:].sum() == pytest.approx(1 / 3, abs=0.03)
    assert weights[26:39].sum() > 0.25


def test_thousands_of_rollouts_of_one_candidate_are_evidence():
    """0.5 ** 1200 is 0 as a float: one such candidate made every probability NaN, and nothing ever settled."""
    rule = stopping(2000, (row(600, 600),))
    assert rule.settled([1.0] * 20) is not None


@pytest.mark.parametrize("confidence", [0.9, 0.97])
def test_the_rule_errs_no_more_often_than_it_says(confidence):
    rng = random.Random(1)
    config = AdaptiveConfig(confidence=confidence)
    prior = Prior(K)
    used = wrong = 0
    doubt = 0.0
    for _ in range(25):
        rule, rows = StoppingRule(config, K, prior), []
        for _ in range(40):
            chance = rng.choice([0.0, 0.03, 0.3, 0.6, 0.95, 1.0, 1.0])
            rewards = [float(rng.random() < chance) for _ in range(K)]
            count = next(look for look in config.looks(K) if rule.settled(rewards[:look]) is not None)
            forecast = rule.settled(rewards[:count])
            used += count
            wrong += forecast.kind is not way_of(rewards, config.threshold)
            doubt += 1 - forecast.probability
            rows.append(row(int(sum(rewards[:count])), count - int(sum(rewards[:count]))))
        prior.learn(rows)
    assert wrong / 1000 < 1 - confidence
    assert abs(wrong - doubt) / 1000 < 0.015, "the expected disagreement is the one that occurs"
    assert used < 0.8 * K * 1000


def test_looks_end_with_all_rollouts():
    assert AdaptiveConfig().looks(16) == [4, 6, 8, 10, 12, 14, 16]
    assert AdaptiveConfig(first=8, step=5).looks(16) == [8, 13, 16]
    AdaptiveConfig().check(5)
    with pytest.raises(ConfigError, match=r"'adaptive\.first': the first look is after 4 rollouts of 4"):
        AdaptiveConfig().check(4)


def test_equal_fractional_rewards_have_no_variance():
    assert class_of([0.7] * 3, 0.6) is Class.SUCCEED
    assert class_of([0.1] * 3, 0.6) is Class.FAIL, "the policy has not mastered what is rewarded by a tenth"


@pytest.mark.parametrize("bad", [{"confidence": 0.5}, {"threshold": 0.0}, {"first": 0}, {"step": 0}, {"audit": 1.5}])
def test_impossible_settings_are_refused(bad):
    with pytest.raises(ConfigError):
        AdaptiveConfig(**bad)
