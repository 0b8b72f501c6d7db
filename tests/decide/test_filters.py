"""Which groups teach nothing, before they are planted and after they are finished."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.core.errors import ConfigError
from turntree.core.labels import Credit, NodeCredit
from turntree.core.outcome import GroupOutcome, group_outcome
from turntree.core.protocols import FinishedGroup
from turntree.decide.filters.dapo import DapoFilter, allowed, refill
from turntree.decide.filters.greso import Greso, GresoConfig

FAIL, SUCCEED, MIXED, CENSORED = [0.0, 0.0], [1.0, 1.0], [0.0, 1.0], [None, None]
groups = st.lists(st.one_of(st.none(), st.sampled_from([0.0, 0.25, 1.0])), max_size=6)
plays = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([FAIL, SUCCEED, MIXED, CENSORED])), max_size=30)


@given(groups)
def test_a_group_is_kept_exactly_when_two_scored_rewards_differ(rewards):
    scored = [reward for reward in rewards if reward is not None]
    outcome = group_outcome(rewards)
    assert (outcome is GroupOutcome.MIXED) == (len(set(scored)) > 1)
    if outcome is not GroupOutcome.MIXED:
        wanted = "censored" if len(scored) < 2 else "all_succeed" if scored[0] >= 0.5 else "all_fail"
        assert outcome.value == wanted


def test_a_lone_scored_rollout_is_censored_and_not_called_zero_variance():
    assert group_outcome([1.0]) is GroupOutcome.CENSORED and not GroupOutcome.CENSORED.zero_variance
    assert group_outcome([-1.0, -1.0]) is GroupOutcome.ALL_FAIL


def test_the_reward_that_counts_as_success_is_the_users():
    assert group_outcome([0.4, 0.4], success=0.3) is GroupOutcome.ALL_SUCCEED
    nothing = Credit(nodes={}, rollout_tokens=0.0, rollouts=0.0, zero_variance=True)
    assert (
        DapoFilter(success=0.3).drop(FinishedGroup(task_id="t", iteration=0, rewards=(0.4, 0.4), credit=nothing))
        == "all_succeed"
    )


@pytest.mark.parametrize("rewards", [FAIL, SUCCEED])
def test_greso_goes_on_with_a_task_whose_equal_groups_teach_by_rewards_of_turns(rewards):
    greso = Greso()
    for iteration in range(7):
        for task, zero in (("taught", False), ("equal", True)):
            nodes = {} if zero else {3: NodeCredit(1.0, 0.0, 1.0)}
            credit = Credit(nodes=nodes, rollout_tokens=2.0, rollouts=2.0, zero_variance=zero)
            greso.finished(FinishedGroup(task_id=task, iteration=iteration, rewards=tuple(rewards), credit=credit))
    assert greso.skip_probability("taught") == 0.0 < greso.skip_probability("equal")


@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 60), st.floats(0, 3))
def test_a_refill_never_passes_its_cap_nor_what_is_missing(wanted, kept, started, cap):
    more = refill(cap, wanted=wanted, kept=kept, started=started)
    assert 0 <= more <= max(0, wanted - kept)
    assert more == 0 or started + more < wanted * (1 + cap) + 1


@pytest.mark.parametrize(
    ("cap", "wanted", "most"), [(0.1, 8, 1), (0.29, 100, 29), (0.5, 16, 8), (1.15, 20, 23), (0.07, 100, 7)]
)
def test_a_cap_is_a_share_of_the_batch_and_never_silently_none(cap, wanted, most):
    assert allowed(cap, wanted=wanted, started=wanted) == most


def test_without_a_cap_there_is_no_refill():
    assert refill(0.0, wanted=8, kept=3, started=8) == 0
    assert refill(1.0, wanted=8, kept=3, started=8) == 5
    assert refill(1.0, wanted=8, kept=3, started=14) == 2
    with pytest.raises(ConfigError, match="refill_cap"):
        DapoFilter(refill_cap=-1)


def skip_share(greso, task, draws=2000):
    return sum(greso.skip(task, iteration) is not None for iteration in range(draws)) / draws


@pytest.mark.parametrize(
    ("played", "kept"),
    [
        ([], 1.0),
        ([MIXED], 1.0),
        ([FAIL], 0.5),
        ([FAIL, FAIL, FAIL], 0.125),
        ([FAIL] * 30, 0.01),  # never given up for good
        ([FAIL, FAIL, MIXED], 1.0),  # a mixed group ends the streak
        ([FAIL, FAIL, SUCCEED], 0.7),  # so does the other kind, which has its own exploration
        ([FAIL, CENSORED, FAIL], 0.25),  # a censored group neither extends nor ends it
        ([CENSORED], 1.0),
    ],
)
def test_a_task_is_kept_with_the_exploration_probability_to_the_power_of_its_streak(played, kept):
    greso = Greso(GresoConfig(easy_exploration=0.7))
    for rewards in played:
        greso.record("t", rewards)
    assert greso.skip_probability("t") == pytest.approx(1 - kept)
    assert skip_share(greso, "t") == pytest.approx(1 - kept, abs=0.04)


def test_a_skip_says_why():
    greso = Greso(GresoConfig(hard_exploration=0.5))
    greso.record("t", FAIL)
    assert {greso.skip("t", i) for i in range(50)} == {"predicted all_fail", None}


def test_decisions_are_drawn_by_seed_task_and_iteration_and_by_nothing_else():
    def asked(seed, order):
        greso = Greso(GresoConfig(seed=seed))
        for task in "ab":
            greso.record(task, FAIL)
        return {(task, i): greso.skip(task, i) for i in range(40) for task in order}

    assert asked(0, "ab") == asked(0, "ba") != asked(1, "ab")
    told = asked(0, "ab")
    assert [told["a", i] for i in range(40)] != [told["b", i] for i in range(40)]


def test_exploration_falls_where_zero_variance_is_above_target_and_rises_below():
    greso = Greso()
    greso.record("old", FAIL)
    greso.skip("old", 1)
    for _ in range(2):
        greso.record("x", FAIL)  # 3 of 4 all fail, above 1/6; 0 of 4 all succeed, below 1/12
    greso.record("x", MIXED)
    greso.end_iteration()
    assert greso.exploration == {
        GroupOutcome.ALL_FAIL: pytest.approx(0.49),
        GroupOutcome.ALL_SUCCEED: pytest.approx(0.51),
    }


def test_a_share_at_its_target_is_explored_less_as_one_above_it():
    greso = Greso(GresoConfig(hard_target=0.5))
    greso.record("old", FAIL)
    greso.skip("old", 1)
    greso.record("x", MIXED)
    greso.end_iteration()
    assert greso.exploration[GroupOutcome.ALL_FAIL] == pytest.approx(0.49)


def test_exploration_stays_where_it_is_while_nothing_was_predicted_or_nothing_was_seen():
    greso = Greso()
    greso.skip("new", 0)
    greso.record("new", FAIL)
    greso.end_iteration()  # the first epoch: no task had a history
    greso.skip("new", 1)
    greso.record("new", CENSORED)
    greso.end_iteration()
    assert set(greso.exploration.values()) == {0.5}


def test_exploration_stays_within_its_bounds():
    greso = Greso(GresoConfig(hard_exploration=0.06, easy_exploration=0.94))
    for iteration in range(5):
        greso.record("t", FAIL)
        greso.skip("t", iteration)
        greso.end_iteration()
    assert greso.exploration == {GroupOutcome.ALL_FAIL: 0.05, GroupOutcome.ALL_SUCCEED: 0.95}


@given(plays, plays)
def test_a_resumed_history_goes_on_as_if_never_interrupted(before, after):
    straight, first = Greso(), Greso()
    for greso in (straight, first):
        play(greso, before)
    resumed = Greso()
    resumed.restore(json.loads(json.dumps(first.state())))
    assert play(straight, after) == play(resumed, after)
    assert straight.state() == resumed.state()


def test_an_iteration_that_was_interrupted_is_adjusted_for_all_of_its_groups():
    """What was predicted and played before the interruption counts after it."""
    greso = Greso()
    greso.record("old", FAIL)
    greso.skip("old", 1)
    resumed = Greso()
    resumed.restore(json.loads(json.dumps(greso.state())))
    resumed.record("x", MIXED)
    resumed.end_iteration()  # half of two all fail, above 1/6
    assert resumed.exploration[GroupOutcome.ALL_FAIL] == pytest.approx(0.49)


def test_what_was_predicted_in_one_iteration_adjusts_nothing_in_the_next():
    greso = Greso()
    greso.record("old", MIXED)
    greso.skip("old", 1)
    greso.end_iteration()
    after = dict(greso.exploration)
    greso.skip("new", 2)
    greso.record("new", FAIL)
    greso.end_iteration()
    assert greso.exploration == after


def play(greso, groups):
    told = []
    for iteration, (task, rewards) in enumerate(groups):
        told.append(greso.skip(task, iteration))
        greso.record(task, rewards)
        if iteration % 3 == 2:
            greso.end_iteration()
    return told


def test_a_foreign_or_impossible_state_is_refused():
    with pytest.raises(ConfigError, match="schema"):
        Greso().restore({"schema": "turntree.greso/0"})
    with pytest.raises(ConfigError, match="unknown key"):
        Greso().restore({**Greso().state(), "config": {"p_easy": 0.5}})
    with pytest.raises(ConfigError, match="it is from 0 to 1"):
        GresoConfig(easy_target=1.5)
    with pytest.raises(ConfigError, match=r"it is from 0\.05 to 0\.95"):
        GresoConfig(hard_exploration=0.01)


@pytest.mark.parametrize(
    "credit", [None, Credit({}, 0.0, 0.0, False), Credit({3: NodeCredit(1.0, 0.0, 1.0)}, 4.0, 4.0, False)]
)
def test_both_filters_take_the_same_groups_for_those_that_teach(credit):
    """A failure of the machine that left nothing to compare with is no sign that a task teaches (ReMax without its
    greedy rollout: there is credit, and no node in it)."""
    played = FinishedGroup(task_id="t", iteration=0, rewards=(None, 0.0, 0.0, 0.0), credit=credit)
    greso = Greso()
    greso.finished(played)
    teaches = credit is not None and credit.teaches
    assert (greso.history("t").outcome is GroupOutcome.MIXED) == teaches == (credit is not None and bool(credit.nodes))
    assert credit is None or (DapoFilter().drop(played) is None) == teaches
