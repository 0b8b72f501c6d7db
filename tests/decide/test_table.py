"""Tables from rollout logs: what is counted, and what is refused in one line."""

from __future__ import annotations

import numpy as np
import pytest

from turntree.core.errors import InputError
from turntree.decide.gates.calibrate import sweep
from turntree.decide.gates.table import default_turns, table_from_groups
from turntree.logs.groups import LoggedGroup, LoggedRollout


def rollout(actions: str, reward: float | None, *, tokens: int | None = 10, forked: bool = False) -> LoggedRollout:
    turn_tokens = None if tokens is None else (tokens,) * len(actions)
    return LoggedRollout(actions=tuple(actions), reward=reward, turn_tokens=turn_tokens, forked=forked)


def group(name: str, *rollouts: LoggedRollout, task_type: str | None = None) -> LoggedGroup:
    return LoggedGroup(id=name, task=name, rollouts=rollouts, task_type=task_type)


CONVERGED = group("converged", rollout("aabbcc", 0.0), rollout("aabb", 0.0))
MIXED = group("mixed", rollout("abcd", 1.0), rollout("dcba", 0.0), task_type="find")
ENDED = group("ended", rollout("aa", 1.0), rollout("aa", 1.0))


def table(*groups: LoggedGroup, turns=(2,), **options):
    return table_from_groups(list(groups), source="rollouts.jsonl", turns=turns, **options)


def test_signals_and_outcomes_are_those_of_the_groups():
    found = table(CONVERGED, MIXED, ENDED)
    assert found.signals_NK["prefix_edit_distance_mean"][:, 0].tolist() == [0.0, 1.0, 0.0]
    assert [outcome.value for outcome in found.outcomes] == ["all_fail", "mixed", "all_succeed"]
    assert found.max_turns == 6


def test_a_cut_saves_the_tokens_and_turns_that_came_after_it_and_nothing_of_what_had_ended():
    (row,) = sweep(table(CONVERGED, MIXED, ENDED), [0.5], turn=2)
    assert (row["cut"], row["actionable"]["cut"], row["actionable"]["nothing_left"]) == (2, 1, 1)
    assert row["saved"]["turns"] == pytest.approx({"safe": 6 / 22, "raw": 6 / 22, "amount": 6, "of": 22})
    assert row["saved"]["tokens"] == pytest.approx({"safe": 60 / 220, "raw": 60 / 220, "amount": 60, "of": 220})


def test_a_mixed_group_that_is_cut_is_a_raw_saving_and_no_safe_one_and_costs_its_advantages():
    (row,) = sweep(table(CONVERGED, MIXED, group("other", rollout("xyzz", 1), rollout("zzyx", 0))), [2.0], turn=2)
    assert row["saved"]["turns"] == pytest.approx({"safe": 6 / 26, "raw": 14 / 26, "amount": 14, "of": 26})
    assert row["l2_preserved"] == 0.0


def test_what_cannot_be_compared_is_left_out_and_counted():
    gated = group("gated", rollout("aa", None), rollout("aa", None))
    partly = group("partly", rollout("ab", 1.0), rollout("ba", 0.0), rollout("a", None))
    forked = group("forked", rollout("abc", 1.0), rollout("abd", 0.0, forked=True))
    text = group("text", rollout("", 1.0), rollout("", 0.0))
    found = table(CONVERGED, gated, partly, forked, text)
    assert found.tasks == ("converged", "partly")
    assert found.sizes_N.tolist() == [2, 2]
    assert found.dropped == {
        "groups of fewer than two rollouts that can be compared": 3,
        "rollouts that share their first turns with another": 1,
        "rollouts whose turns are not told apart": 2,
        "rollouts without a reward": 3,
    }


def test_a_log_without_tokens_or_observations_says_so():
    found = table(CONVERGED, group("mute", rollout("ab", 1.0, tokens=None), rollout("ba", 0.0)))
    assert [savings.unit for savings in found.savings] == ["turns"]
    assert set(found.absent) == {"tokens", "obs_unique_ratio"}
    assert "obs_unique_ratio" not in found.signals_NK
    (row,) = sweep(found, [0.5], turn=2)
    assert row["saved"]["tokens"] is None and row["saved"]["turns"] is not None


def test_a_log_of_gated_groups_only_is_refused_with_the_reason():
    with pytest.raises(InputError, match=r"^rollouts.jsonl: holds no group that can be judged; left out: .*reward"):
        table(group("gated", rollout("aa", None), rollout("aa", None)))


def test_the_default_turns_are_the_paper_s_at_its_horizon():
    assert default_turns(30) == (5, 10, 15, 20)
    assert default_turns(16) == (3, 5, 8, 11)
    assert default_turns(1) == (1,)


def test_the_published_table_has_a_hundred_groups_in_the_order_of_the_buffer(published):
    found = published
    assert found.turns == (10, 15, 20) and len(set(found.tasks)) == 100
    assert found.tasks[0].startswith("pick_two_obj_and_place-SoapBar")
    assert np.bincount([["mixed", "all_fail", "all_succeed"].index(o) for o in found.outcomes]).tolist() == [61, 25, 14]
