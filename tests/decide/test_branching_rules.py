"""Each rule against its formula, written out here."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from moments import forks_by_turn, moment, moments

from fixed_brancher import FixedBrancher
from turntree.core import parts, seeds
from turntree.core.config import Part
from turntree.core.errors import ConfigError
from turntree.core.protocols import BranchDecision, Brancher, ForkMoment
from turntree.decide.branching.published import ArpoBrancher, ReleasedArpoBrancher
from turntree.decide.branching.rules import EntropyBrancher, RandomBrancher

VOCABULARY = 50
RULES = ("entropy", "random", "arpo", "arpo_released")


def decided(brancher: Brancher, at: ForkMoment) -> BranchDecision:
    decision = brancher.decide(at)
    assert decision is not None
    return decision


def registered(rule: str, **options: Any) -> Any:
    return parts.build("branchers", Part(rule, options), vocabulary=VOCABULARY, seed=0)


# entropy


def entropy_rule(**settings: Any) -> EntropyBrancher:
    return EntropyBrancher(**{"vocabulary": VOCABULARY, "probe_tokens": 3, "tau": 0.5, **settings})


@pytest.mark.parametrize("seed", range(20))
def test_entropy_is_compared_as_means_over_the_probe_in_units_of_the_log_of_the_vocabulary(seed: int) -> None:
    draw = random.Random(seed)
    first, between, last = ([4 * draw.random() for _ in range(6)] for _ in range(3))
    change = (sum(last[:3]) / 3 - sum(first[:3]) / 3) / math.log(VOCABULARY)
    value = 0.4 + 0.9 * change
    decision = decided(entropy_rule(alpha=0.4, beta=0.9, tau=0.45), moment(first, between, last))
    assert decision.numbers["change"] == pytest.approx(change)
    assert decision.numbers["value"] == pytest.approx(value)
    assert decision.numbers["threshold"] == 0.45
    assert decision.branches == (2 if value > 0.45 else 1)


@pytest.mark.parametrize("seed", range(20))
def test_the_printed_rule_derives_z_new_paths_where_alpha_plus_beta_dh_exceeds_tau_in_every_iteration(
    seed: int,
) -> None:
    """P_t = alpha + beta dH_t > tau, Branch(Z). The released code's Z counts the rollout that is left."""
    draw = random.Random(seed)
    first, last = ([4 * draw.random() for _ in range(6)] for _ in range(2))
    value = 0.5 + 0.7 * (sum(last[:2]) - sum(first[:2])) / 2 / math.log(VOCABULARY)
    rule = ArpoBrancher(vocabulary=VOCABULARY, paths=2, probe_tokens=2, alpha=0.5, beta=0.7, tau=0.52)
    for iteration in range(3):
        for other in moments(5, seed=seed, iteration=iteration):  # what a pace would learn from
            rule.decide(other)
        asked = decided(rule, moment(first, last, iteration=iteration))
        assert asked.branches - 1 == (2 if value > 0.52 else 0)
    assert ReleasedArpoBrancher(vocabulary=VOCABULARY).branches == ArpoBrancher(vocabulary=VOCABULARY, paths=1).branches


def test_a_change_from_certain_to_uniform_is_one() -> None:
    uniform = [math.log(VOCABULARY)] * 5
    assert decided(entropy_rule(), moment([0.0] * 5, uniform)).numbers["change"] == pytest.approx(1.0)
    assert decided(entropy_rule(), moment(uniform, [0.0] * 5)).numbers["change"] == pytest.approx(-1.0)


def test_the_threshold_has_to_be_passed_not_met() -> None:
    level = [1.0] * 3
    assert decided(entropy_rule(alpha=0.5, tau=0.5), moment(level, level)).branches == 1
    assert decided(entropy_rule(alpha=0.5, tau=0.499), moment(level, level)).branches == 2


@pytest.mark.parametrize("probe", [1, 2, 3])
def test_branches_share_the_tokens_before_the_last_of_the_probe(probe: int) -> None:
    decision = decided(entropy_rule(probe_tokens=probe, tau=-1.0), moment([0.0] * 4, [1.0] * 4))
    assert (decision.branches, decision.shared) == (2, probe - 1)


def test_a_turn_that_ends_within_the_probe_does_not_fork() -> None:
    eager = entropy_rule(tau=-1.0)
    assert eager.decide(moment([0.0] * 9, [5.0] * 2)) is None
    assert decided(eager, moment([0.0] * 9, [5.0] * 3)).branches == 2


def test_a_first_turn_that_is_shorter_than_the_probe_counts_as_far_as_it_goes() -> None:
    decision = decided(entropy_rule(), moment([1.0, 2.0], [2.0] * 3))
    assert decision.numbers["initial_entropy"] == 1.5


@pytest.mark.parametrize(("budget", "branches"), [(0, 1), (1, 2), (2, 3), (3, 4), (9, 4)])
@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("entropy", {"probe_tokens": 1, "tau": -9.0}),
        ("random", {"probe_tokens": 1, "rate": 1.0}),
        ("arpo_released", {"alpha": 1.0}),
    ],
)
def test_a_fork_has_as_many_branches_as_asked_for_and_as_the_budget_allows(
    rule: str, options: dict[str, Any], budget: int, branches: int
) -> None:
    decision = decided(registered(rule, branches=4, **options), moment([1.0], [1.0], budget=budget))
    assert decision.branches == branches
    assert ("no leaf is left" in decision.reason) == (budget == 0)


# pace


def entropy_at_its_pace() -> EntropyBrancher:
    return EntropyBrancher(vocabulary=VOCABULARY, probe_tokens=1)


def random_at_that_pace() -> RandomBrancher:
    return RandomBrancher(rate=None, probe_tokens=1)


PACED: dict[str, Callable[[], Brancher]] = {"entropy": entropy_at_its_pace, "random": random_at_that_pace}


@pytest.mark.parametrize("rule", PACED)
@pytest.mark.parametrize("budget", [1, 2, 4])
def test_equally_long_rollouts_spend_their_budget_whole_and_evenly_over_their_turns(rule: str, budget: int) -> None:
    brancher = PACED[rule]()
    forks_by_turn(brancher, 0, lambda draw: 6, rollouts=400, budget=budget)
    added = forks_by_turn(brancher, 1, lambda draw: 6, rollouts=400, budget=budget)
    assert sum(added.values()) == 400 * budget
    assert all(added[turn] == pytest.approx(80 * budget, rel=0.35) for turn in range(2, 7)), added


@pytest.mark.parametrize("rule", PACED)
def test_rollouts_that_end_early_leave_a_rest_and_nobody_forks_more_than_the_budget(rule: str) -> None:
    brancher = PACED[rule]()
    _, second, third = (
        forks_by_turn(brancher, iteration, lambda draw: draw.randint(2, 9), rollouts=400, budget=2)
        for iteration in range(3)
    )
    assert 0.6 * 800 < second.total() < 800
    assert 0.6 * 800 < third.total() < 800


def chance(rise: float) -> float:
    """P of a rise in entropy."""
    return 0.5 + 0.2 * rise / math.log(VOCABULARY)


def test_alpha_and_beta_without_tau_are_refused_because_they_would_change_nothing() -> None:
    for given in ({"alpha": 0.4}, {"beta": 1.0}):
        with pytest.raises(ConfigError):
            registered("entropy", **given)
        registered("entropy", tau=0.5, **given)


def test_the_threshold_is_the_quantile_of_the_iteration_before_that_spends_the_budget() -> None:
    """Ten moments at turn 2, five of which had a third: 1.5 lie ahead, so 2/3 fork where one leaf is left to add."""
    brancher = EntropyBrancher(vocabulary=VOCABULARY, probe_tokens=1)
    for number in range(10):
        first = decided(brancher, moment([0.0], [float(number)], key=(number,)))
        assert first.branches == 1 + (number > 0), "at first wherever entropy rose"
    for number in range(5):
        brancher.decide(moment([0.0], [0.0], [10.0 + number], key=(number,)))
    decision = decided(brancher, moment([0.0], [4.5], budget=1, iteration=1))
    assert decision.numbers["rate"] == pytest.approx(1 / 1.5)
    assert decision.numbers["threshold"] == pytest.approx(chance(4.0)), "ten of fifteen values lie above it"
    assert decision.branches == 2
    assert decided(brancher, moment([0.0], [4.0], budget=1, iteration=1)).branches == 1
    assert decided(brancher, moment([0.0], [-1.0], budget=2, iteration=1)).branches == 2, "all of them: rate 1"
    assert decided(brancher, moment([0.0], [99.0], budget=0, iteration=1)).branches == 1


def test_a_turn_is_compared_with_earlier_moments_at_the_same_turn() -> None:
    """Whatever the entropy of other turns: else late turns, which are calmer, would never fork."""
    brancher = EntropyBrancher(vocabulary=VOCABULARY, probe_tokens=1)
    for number in range(20):
        brancher.decide(moment([0.0], [1.0 + number / 20], key=(number,)))
        brancher.decide(moment([0.0], [1.0], [number / 20], key=(number,)))
    calm, wild = moment([0.0], [1.0], [0.7], iteration=1, budget=1), moment([0.0], [1.2], iteration=1, budget=1)
    assert decided(brancher, calm).numbers["rate"] == 1.0
    assert decided(brancher, wild).numbers["rate"] == 0.5
    middle = decided(brancher, wild).numbers["threshold"]
    assert middle == pytest.approx(chance(1.45)), "ten of the twenty at turn 2 are above"
    assert decided(brancher, wild).branches == 1


def test_a_fork_that_spends_two_leaves_comes_half_as_often() -> None:
    rates: list[float] = []
    for branches in (2, 3):
        brancher = EntropyBrancher(vocabulary=VOCABULARY, probe_tokens=1, branches=branches)
        for turn in range(2, 7):
            brancher.decide(moment(*[[1.0]] * turn))
        rates.append(decided(brancher, moment([1.0], [1.0], budget=2, iteration=1)).numbers["rate"])
    assert rates == pytest.approx([2 / 5, 1 / 5])


def test_what_lies_ahead_is_counted_over_independent_rollouts_only() -> None:
    def rate_after(keys: list[tuple[int, ...]]) -> float:
        brancher = entropy_at_its_pace()
        for key in keys:
            for turn in range(2, 5):
                brancher.decide(moment(*[[1.0]] * turn, key=key))
        return decided(brancher, moment([1.0], [1.0], budget=1, iteration=1)).numbers["rate"]

    assert rate_after([(0,), (1,)]) == rate_after([(0,), (0, 1), (0, 2), (1,)]) == pytest.approx(1 / 3)


def test_the_pace_is_that_of_the_last_four_iterations_and_of_no_earlier_one() -> None:
    """One long iteration, then short ones: four later it is forgotten, three later it is not."""

    def rate_after(short: int) -> float:
        brancher = entropy_at_its_pace()
        for iteration, last in enumerate([12, *[2] * short]):
            for turn in range(2, last + 1):
                brancher.decide(moment(*[[1.0]] * turn, iteration=iteration))
        return decided(brancher, moment([1.0], [1.0], budget=1, iteration=short + 1)).numbers["rate"]

    assert rate_after(3) == pytest.approx(4 / 14) and rate_after(4) == 1.0


@pytest.mark.parametrize("rule", PACED)
def test_an_iteration_without_a_moment_teaches_nothing(rule: str) -> None:
    brancher = PACED[rule]()
    for turn in (2, 3):
        brancher.decide(moment(*[[1.0]] * turn))
    assert decided(brancher, moment([1.0], [1.0], budget=1, iteration=7)).numbers["rate"] == 0.5
    assert json.loads(json.dumps(PACED[rule]().state())) == {"window": []}


# random


def test_random_forks_at_its_rate_whatever_was_sampled() -> None:
    brancher = RandomBrancher(rate=0.3, probe_tokens=1)
    forks = [decided(brancher, one).branches == 2 for one in moments(300, seed=3) if one.budget]
    assert sum(forks) / len(forks) == pytest.approx(0.3, abs=4 * math.sqrt(0.21 / len(forks)))
    one, other = moment([0.0], [0.0], [0.0]), moment([9.0], [5.0], [7.0, 1.0])
    assert brancher.decide(one) == brancher.decide(other)


def test_random_draws_anew_for_every_task_rollout_turn_and_seed() -> None:
    level = [[1.0]] * 2
    asked = [moment(*level, task=f"t{n}") for n in range(99)]
    asked += [moment(*level, key=(n,)) for n in range(99)] + [moment(*level, seed=n) for n in range(99)]
    asked += [moment(*level, *level[:1] * n) for n in range(99)]
    outcomes = [decided(RandomBrancher(rate=0.5, probe_tokens=1), one).branches for one in asked]
    for start in range(0, len(asked), 99):
        assert 25 < outcomes[start : start + 99].count(2) < 75


def test_random_at_the_pace_of_entropy_has_its_rates_and_shares_its_tokens() -> None:
    entropy = EntropyBrancher(vocabulary=VOCABULARY, probe_tokens=3)
    coin = RandomBrancher(rate=None, probe_tokens=3)
    compared = 0
    for iteration in range(3):
        for one in moments(20, iteration=iteration):
            ours, theirs = coin.decide(one), entropy.decide(one)
            assert (ours is None) == (theirs is None) == (len(one.entropies[-1]) < 3)
            if ours is None or theirs is None:
                continue
            assert iteration == 0 or ours.numbers["rate"] == theirs.numbers["rate"]
            assert {each.shared for each in (ours, theirs) if each.branches > 1} <= {2}
            compared += iteration > 0
    assert compared > 100


# fixed


def test_fixed_forks_at_its_turns_and_is_silent_at_others() -> None:
    brancher = FixedBrancher(turns=(2, 4), branches=3)
    at = {turn: brancher.decide(moment(*[[1.0]] * turn)) for turn in range(2, 6)}
    assert {turn: None if d is None else (d.branches, d.shared) for turn, d in at.items()} == {
        2: (3, 0),
        3: None,
        4: (3, 0),
        5: None,
    }


# as released


def coin(at: ForkMoment) -> float:
    return seeds.generator(at.seed, "branch", at.task_id, *at.key, at.turn).random()


@pytest.mark.parametrize("seed", range(30))
def test_the_released_rule_sums_what_its_paper_averages_and_looks_at_the_turn_before(seed: int) -> None:
    """u = clip(U - w dH, 0, 1) <= p, dH of the turn that ended in the call, over its first 20 tokens at most."""
    draw = random.Random(seed)
    first, ended, new = ([6 * draw.random() for _ in range(draw.randint(1, 30))] for _ in range(3))
    at = moment(first, ended, new, seed=seed)
    change = (sum(ended[:20]) - sum(first[:20])) / math.log(VOCABULARY)
    u = min(1.0, max(0.0, coin(at) - 0.5 * change))
    decision = decided(ReleasedArpoBrancher(vocabulary=VOCABULARY, alpha=0.4, beta=0.5), at)
    assert decision.numbers["u"] == pytest.approx(u)
    assert decision.numbers["change"] == pytest.approx(change)
    assert (decision.branches, decision.shared) == ((2, 0) if u <= 0.4 else (1, 0))


def test_the_released_rule_forks_with_probability_p_plus_w_times_the_change_clipped() -> None:
    brancher = ReleasedArpoBrancher(vocabulary=VOCABULARY, alpha=0.3, beta=0.4)
    for change, chance in ((0.0, 0.3), (1.0, 0.7), (-0.5, 0.1), (-3.0, 0.0), (3.0, 1.0)):
        ended = [5.0, change * math.log(VOCABULARY)]
        asked = [moment([5.0, 0.0], ended, [1.0], key=(n,)) for n in range(800)]
        share = sum(decided(brancher, one).branches == 2 for one in asked) / 800
        assert share == pytest.approx(chance, abs=0.07)


def test_after_the_first_iteration_the_released_rule_keeps_some_other_questions_initial_entropy() -> None:
    scale = math.log(VOCABULARY)
    brancher = ReleasedArpoBrancher(vocabulary=VOCABULARY)
    for task, initial in (("b", 3.0), ("a", 1.0), ("c", 0.5)):
        own = decided(brancher, moment([initial], [2.0], task=task))
        assert own.numbers["change"] == 0.0, "at the first call the turn before is the first turn"
    own = decided(brancher, moment([3.0], [2.0], [2.0], task="b"))
    assert own.numbers["change"] == pytest.approx((2.0 - 3.0) / scale), "the first iteration compares with its own"
    for iteration in (1, 5):
        stale = decided(brancher, moment([3.0], [2.0], task="b", iteration=iteration))
        assert stale.numbers["change"] == pytest.approx((3.0 - 1.0) / scale), "that of the task which came first"
        unknown = decided(brancher, moment([3.0], [2.0], task="b", key=(9,), iteration=iteration))
        assert unknown.numbers["change"] == 0.0, "a slot that nobody had"


# configurations


@pytest.mark.parametrize(
    ("rule", "wrong", "why"),
    [
        ("entropy", {"branches": 1}, "field 'brancher.branches': is 1; it is at least 2"),
        ("random", {"branches": 1}, "field 'brancher.branches': is 1; it is at least 2"),
        ("arpo_released", {"branches": 1}, "field 'brancher.branches': is 1; it is at least 2"),
        ("entropy", {"probe_tokens": 0}, "field 'brancher.probe_tokens': is 0; it is at least 1"),
        ("random", {"probe_tokens": 0}, "field 'brancher.probe_tokens': is 0; it is at least 1"),
        ("random", {"rate": 1.5}, "field 'brancher.rate': is 1.5; it is from 0 to 1"),
        ("entropy", {"beta": 0.0}, "field 'brancher.beta': must be above 0"),
        ("arpo_released", {"beta": -0.1}, "field 'brancher.beta': must be at least 0"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_in_one_line(rule: str, wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        registered(rule, **wrong)
    assert "\n" not in str(refused.value)


def test_a_brancher_says_whether_its_branches_split_turns_and_whether_its_forks_are_biased() -> None:
    built = {rule: registered(rule) for rule in RULES}
    assert [rule for rule in RULES if built[rule].splits_turns] == ["entropy", "random", "arpo"]
    assert not any(registered(rule, probe_tokens=1).splits_turns for rule in ("entropy", "random"))
    assert [rule for rule in RULES if built[rule].biased] == ["arpo"]
    fork = decided(registered("random", probe_tokens=4, rate=1.0), moment([1.0], [1.0] * 4))
    assert fork.shared == 3


def test_the_registered_branchers_are_built_from_their_options() -> None:
    for rule in RULES:
        whole = parts.resolve("branchers", Part(rule))
        assert parts.build("branchers", whole, vocabulary=VOCABULARY, seed=0).state() is not None
    with pytest.raises(ConfigError, match=r"'branchers?\.turns': unknown key"):
        parts.build("branchers", Part("entropy", {"turns": [2]}), vocabulary=VOCABULARY, seed=0)
