"""Where the budget went: every figure adds up, and what the log cannot tell is null with the reason."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logs_of_groups import CENSORED, FAIL, MIXED, SUCCEED, group

from turntree.audit.audit import AuditConfig, audit
from turntree.audit.played import play
from turntree.audit.waste import cost, counts, dilution, never_teaching, over_time, overall
from turntree.core.errors import InputError
from turntree.logs.groups import LoggedGroup, LoggedRollout

rewards = st.lists(st.sampled_from([0.0, 0.5, 1.0, None]), min_size=1, max_size=4)
logs = st.lists(st.tuples(st.sampled_from("abc"), rewards, st.integers(0, 3)), min_size=1, max_size=12)


def built(log):
    return play([group(task, each, iteration) for task, each, iteration in sorted(log, key=lambda row: row[2])])


@given(logs)
def test_outcomes_partition_the_groups_and_their_budget(log):
    played, kinds = built(log), ("mixed", "all_fail", "all_succeed", "censored")
    told = counts(played)
    assert sum(told[kind] for kind in kinds) == told["groups"] == len(log)
    for spent in cost(played).values():
        assert sum(spent[kind] for kind in kinds) == spent["total"]
        assert spent["all_fail"] + spent["all_succeed"] == spent["zero_variance"]
    rows = over_time(played)
    assert sum(row["scored"] for row in rows) == overall(played)["scored"]
    assert sum(row["zero_variance"] for row in rows) == overall(played)["zero_variance"]


@given(logs)
def test_the_rate_is_that_of_a_direct_count_over_groups_with_two_scored_rollouts(log):
    scored = [[r for r in each if r is not None] for _, each, _ in log]
    judged = [each for each in scored if len(each) >= 2]
    flat = sum(len(set(each)) == 1 for each in judged)
    found = overall(built(log))
    assert (found["zero_variance"], found["scored"]) == (flat, len(judged))
    assert found["zero_variance_rate"] == (flat / len(judged) if judged else None)
    assert found["low"] - 1e-9 <= (flat / len(judged) if judged else 0) <= found["high"] + 1e-9


def test_a_task_counts_once_in_the_interval_however_often_it_was_played():
    """Five tasks that are always flat and five that never are: the groups say nothing more of other tasks."""
    once, often = (
        overall(play([group(str(task), FAIL if task < 5 else MIXED, i) for i in range(times) for task in range(10)]))
        for times in (1, 40)
    )
    assert often["zero_variance_rate"] == once["zero_variance_rate"] == 0.5 and often["scored"] == 400
    assert (often["low"], often["high"]) == pytest.approx((once["low"], once["high"]))


def test_what_all_tasks_share_is_no_certainty_about_others():
    spent = cost(play([group(task, FAIL, actions=("x",)) for task in "abc"]))["turns"]
    assert spent["zero_variance_share"] == 1.0 and spent["zero_variance_interval"] == pytest.approx(
        [0.292, 1.0], abs=1e-3
    )


def test_turns_that_rollouts_share_are_counted_once():
    """In all units alike: the second rollout forked from the first after two turns."""
    first = LoggedRollout(actions=("aa", "bb", "cc"), reward=1.0, turn_tokens=(5, 5, 5))
    second = LoggedRollout(actions=("aa", "bb", "dd"), reward=0.0, turn_tokens=(0, 0, 5), forked=True)
    spent = cost(play([LoggedGroup(id="1", task="a", rollouts=(first, second))]))
    assert {unit: row["total"] for unit, row in spent.items()} == {"tokens": 20, "turns": 4, "characters": 8}


def test_dilution_is_the_share_of_the_scored_rollouts_that_no_gradient_comes_from():
    long_flat = group("a", (0.0, 0.0, 0.0, None), actions=("x",) * 4)
    found = dilution(play([long_flat, group("b", MIXED, actions=("x",)), group("c", CENSORED, actions=("x",) * 50)]))
    assert found == {"share": 3 / 5, "amplification": pytest.approx(5 / 2)}
    assert dilution(play([group("a", FAIL)])) == {"share": 1.0, "amplification": None}


class TestTasks:
    def test_a_task_never_taught_after_enough_epochs_without_a_mixed_group(self):
        log = [group(task, rewards, i) for i in range(3) for task, rewards in (("hard", FAIL), ("either", MIXED))]
        log += [group("easy", SUCCEED, i, actions=("x",) * 9) for i in range(4)] + [
            group("seen twice", FAIL, i) for i in range(2)
        ]
        log += [
            group("hard", CENSORED, 3),
            group("changes", FAIL, 0),
            group("changes", SUCCEED, 1),
            group("changes", FAIL, 2),
        ]
        found = never_teaching(play(log), epochs=3)
        assert [(row["task"], row["groups"], row["ending"]) for row in found["rows"]] == [
            ("easy", 4, "all_succeed"),
            ("hard", 3, "all_fail"),  # the censored group is spent, but is no evidence
            ("changes", 3, "either"),
        ]
        assert found["tasks_with_enough_epochs"] == 4 and found["never_taught"] == 3
        assert found["rows"][0]["mixed_share_at_most"] == pytest.approx(
            3.841 / (4 + 3.841), abs=1e-3
        )  # Wilson at 0 of 4
        assert found["rows"][1]["spent"]["turns"] == 4 * 4
        share = 10 / 13  # of these tasks' groups
        assert found["expected_by_chance"] == pytest.approx(3 * share**3 + share**4)


class TestAbsence:
    def test_unknown_units_are_left_out_with_the_reason_and_not_guessed(self):
        bare = LoggedGroup(id="g", task="t", rollouts=(LoggedRollout(actions=(), reward=0.0, characters=5),) * 2)
        found = audit([bare], AuditConfig())
        assert set(found["cost"]) == {"characters"}
        assert found["over_time"] is None and found["remedies"]["gate"] is found["remedies"]["greso"] is None
        assert found["absent"] == {
            "greso": "the log does not say in which iteration a group was played",
            "pivots": "the log does not say in which iteration a group was played",
            "gate": "2 rollouts of the log do not say their turns: a gate compares the actions of each turn",
            "gate_paper": "2 rollouts of the log do not say their turns: a gate compares the actions of each turn",
            "tokens": "2 rollouts of the log do not say their tokens",
            "turns": "2 rollouts of the log do not say their turns",
            "over_time": "the log does not say in which iteration a group was played",
        }
        assert found["headline"] == "100% of your groups bought no gradient; they cost 100% of the generated text."

    def test_one_rollout_without_tokens_is_enough_for_the_unit_to_be_unknown(self):
        known, unknown = (LoggedRollout(actions=("a", "b"), reward=0.0, tokens=tokens) for tokens in (3, None))
        found = audit([LoggedGroup(id="g", task="t", rollouts=(known, unknown))], AuditConfig())
        assert set(found["cost"]) == {"turns", "characters"}

    def test_a_task_that_never_comes_back_leaves_nothing_to_predict_from(self):
        found = audit([group("a", FAIL, 0), group("b", MIXED, 1)], AuditConfig())
        assert found["absent"]["greso"] == found["absent"]["pivots"] == "no task comes back in a later iteration"

    def test_rollouts_of_one_turn_have_no_middle(self):
        found = audit([group("a", FAIL, actions=("x",))], AuditConfig())
        assert found["absent"]["gate_paper"] == "every rollout has one turn, so nothing can be stopped mid-rollout"

    def test_a_log_without_two_scored_rollouts_in_any_group_is_refused(self):
        with pytest.raises(InputError, match="none of the 1 groups has two scored rollouts"):
            audit([group("a", CENSORED)], AuditConfig())
