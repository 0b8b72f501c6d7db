"""Tables from rollout logs and from feature files: what is counted, and what is refused in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from turntree.core.errors import InputError
from turntree.decide.gates.calibrate import sweep
from turntree.decide.gates.features import read_features
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


HEADER = "K,task_id,label,reward_var,prefix_edit_distance_mean,termination_fraction"


def features(tmp_path: Path, *rows: str, header: str = HEADER) -> Path:
    path = tmp_path / "features.csv"
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return path


def test_a_feature_table_needs_its_lengths_for_savings_and_takes_ended_groups_for_not_actionable(tmp_path):
    path = features(tmp_path, "4,a,all_succeed,0,0.0,1.0", "4,b,mixed,0.25,0.5,0.5")
    found = read_features(path, max_turns=8)
    assert found.turns == (4,) and found.max_turns == 8
    assert found.actionable_NK[:, 0].tolist() == [False, True]
    assert "turn or token counts" in found.absent["tokens"] and found.absent["action_entropy"] == "no such column"


def test_groups_of_one_task_are_told_apart_by_their_iteration(tmp_path):
    path = features(
        tmp_path, "4,a,mixed,0.1,0", "4,a,all_fail,0.2,1", header="K,task_id,label,action_entropy,iteration"
    )
    found = read_features(path)
    assert found.tasks == ("a", "a")
    assert found.zero_variance_N.tolist() == [False, True]


@pytest.mark.parametrize(
    ("rows", "header", "message"),
    [
        (["x,a,mixed,0.1,0.5,0"], HEADER, "features.csv:2: field 'K': 'x' is not a number"),
        (["2.5,a,mixed,0.1,0.5,0"], HEADER, "features.csv:2: field 'K': '2.5' is not a whole number of turns"),
        (["4,a,fail,0.1,0.5,0"], HEADER, "features.csv:2: field 'label': 'fail' is not an outcome; mixed, all_fail"),
        (["4,a,mixed,0.1,nan,0"], HEADER, "features.csv:2: field 'prefix_edit_distance_mean': 'nan' is not a number"),
        (["4,a,mixed,0.1,0.5"], HEADER, "features.csv:2: has another number of fields"),
        (["4,a,mixed,0.1,0.5,0,9"], HEADER, "features.csv:2: has another number of fields"),
        (["4,a,mixed,0.1,0.5,0", "4,a,mixed,0.1,0.5,0"], HEADER, "features.csv:3: field 'task_id': 'a' has a row at K"),
        (["4,a,mixed,0.1,0.5,0", "5,b,mixed,0.1,0.5,0"], HEADER, "features.csv:2: field 'K': 'a' has no row at K = 5"),
        (["4,a,mixed,0.1,0.5,0", "5,a,all_fail,0,0.5,0"], HEADER, "features.csv:3: field 'label': 'a' has another"),
        (["a,mixed,0.5"], "task_id,label,action_entropy", "features.csv:1: field 'K': the column is missing"),
        (["4,a,mixed"], "K,task_id,label", "features.csv:1: has no column with a signal; a feature table has"),
        ([], HEADER, "features.csv: holds no group that can be judged; the file is empty"),
    ],
)
def test_a_wrong_feature_table_is_one_line_with_file_line_and_field(tmp_path, rows, header, message):
    with pytest.raises(InputError) as refused:
        read_features(features(tmp_path, *rows, header=header))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_published_table_has_a_hundred_groups_in_the_order_of_the_buffer(shared_data):
    found = read_features(shared_data / "selective_rollout" / "hybrid_gate_features.csv")
    assert found.turns == (10, 15, 20) and len(set(found.tasks)) == 100
    assert found.tasks[0].startswith("pick_two_obj_and_place-SoapBar")
    assert np.bincount([["mixed", "all_fail", "all_succeed"].index(o) for o in found.outcomes]).tolist() == [61, 25, 14]
