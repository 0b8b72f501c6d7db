"""The sweep on the published features: what comes out of the paper's tables, and what cannot."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from turntree.core.errors import InputError
from turntree.decide.gates.calibrate import Point, cut_mask, measure, sweep
from turntree.decide.gates.features import read_features
from turntree.decide.gates.table import GroupTable


@pytest.fixture(scope="module")
def published(shared_data: Path) -> GroupTable:
    return read_features(shared_data / "selective_rollout" / "hybrid_gate_features.csv")


# Table 1: threshold, cut, TP, FP, precision, recall, safe and raw in percent
TABLE_1 = [
    (0.10, 20, 16, 4, 0.80, 0.41, 10.7, 13.3),
    (0.12, 21, 17, 4, 0.81, 0.44, 11.3, 14.0),
    (0.14, 24, 18, 6, 0.75, 0.46, 12.0, 16.0),
    (0.18, 25, 19, 6, 0.76, 0.49, 12.7, 16.7),
]


@pytest.mark.parametrize(("threshold", "cut", "tp", "fp", "precision", "recall", "safe", "raw"), TABLE_1)
def test_four_rows_of_table_1_come_out_exactly(published, threshold, cut, tp, fp, precision, recall, safe, raw):
    (row,) = sweep(published, [threshold], turn=10)
    assert (row["cut"], row["tp"], row["fp"]) == (cut, tp, fp)
    assert (round(row["precision"], 2), round(row["recall"], 2)) == (precision, recall)
    assert (round(100 * row["safe"], 1), round(100 * row["raw"], 1)) == (safe, raw)
    assert row["l2_preserved"] == pytest.approx(math.sqrt((61 - fp) / 61))


def test_the_two_most_careful_rows_of_table_1_cannot_come_out_of_the_published_features(published):
    five, eight = sweep(published, [0.05, 0.08], turn=10)
    assert (five["cut"], five["tp"], five["fp"]) == (14, 11, 3)  # printed: 9, 9, 0
    assert (eight["cut"], eight["tp"], eight["fp"]) == (19, 15, 4)  # printed: 14, 13, 1
    at_zero = published.signals_NK["prefix_edit_distance_mean"][:, 0] == 0
    assert (at_zero & ~published.zero_variance_N).sum() == 3, (
        "mixed groups with equal prefixes: no threshold spares them"
    )


def test_most_of_what_is_cut_at_later_turns_had_ended_already(published):
    rows = {turn: sweep(published, [0.12], turn=turn)[0] for turn in (10, 15, 20)}
    assert [rows[turn]["cut"] for turn in rows] == [21, 14, 9]
    assert [rows[turn]["actionable"]["cut"] for turn in rows] == [17, 8, 3]
    assert [rows[turn]["actionable"]["nothing_left"] for turn in rows] == [4, 6, 6]


def test_no_threshold_at_turn_10_exceeds_0_765_on_actionable_groups(published):
    values = np.unique(published.signals_NK["prefix_edit_distance_mean"][:, 0])
    rows = sweep(published, [*(values + 1e-9), 2.0], turn=10)
    assert max(row["actionable"]["precision"] or 0 for row in rows) == pytest.approx(13 / 17)


def test_the_or_rule_of_table_12_adds_two_groups_and_saves_nothing_more(published):
    (plain,), (both,) = (sweep(published, [0.12], turn=10, termination=t) for t in (None, 0.9))
    assert (both["cut"], both["tp"], both["fp"]) == (23, 19, 4)
    (alone,) = sweep(published, [0.0], turn=10, termination=0.9)
    assert (alone["cut"], alone["tp"], alone["fp"]) == (6, 6, 0)
    assert both["actionable"]["cut"] == plain["actionable"]["cut"], "both had ended in every rollout"
    assert alone["actionable"]["cut"] == 0


def test_what_the_table_does_not_know_is_null_with_a_reason(published):
    (row,) = sweep(published, [0.12], turn=10)
    assert row["saved"] == {"turns": None, "tokens": None}
    assert set(published.absent) == {"turns", "tokens"}


def test_an_empty_cut_has_no_precision(published):
    (row,) = sweep(published, [0.0], turn=10)
    assert (row["cut"], row["precision"], row["precision_low"], row["l2_preserved"]) == (0, None, 0.0, 1.0)


def test_an_unknown_signal_is_named(published):
    with pytest.raises(InputError, match="does not have the signal 'entropy'"):
        sweep(published, [0.1], turn=10, signal="entropy")


def test_masks_and_points_say_what_they_mean(published):
    point = Point(turn=10, threshold=0.12, termination=0.9)
    assert str(point) == "prefix_edit_distance_mean < 0.12 or termination_fraction >= 0.9 at turn 10"
    assert str(Point(turn=3, threshold=0.1)) == "prefix_edit_distance_mean < 0.1 at turn 3"
    assert str(Point(turn=3, threshold=0.0, termination=0.9)) == "termination_fraction >= 0.9 at turn 3"
    assert measure(published, cut_mask(published, point), 10)["cut"] == 23


def test_a_signal_that_rises_with_convergence_cuts_from_its_threshold_on(published):
    """Six groups had ended in nine of ten rollouts at turn 10, all of them without variance: the OR rule's second
    clause, counted by hand above."""
    (row,) = sweep(published, [0.9], turn=10, signal="termination_fraction")
    assert (row["cut"], row["tp"], row["fp"]) == (6, 6, 0)
    with pytest.raises(InputError, match="already the second clause"):
        sweep(published, [0.9], turn=10, signal="termination_fraction", termination=0.9)


def test_the_low_tau_rule_is_nowhere_precise_enough_as_the_paper_says(published):
    """E.9: "No operating point clears the 0.80 precision floor at any K", of d < d_L or tau <= t_L; with a second
    clause for the other end (R4) it is no better. Counted here from the columns."""
    d, tau = (published.signals_NK[name] for name in ("prefix_edit_distance_mean", "termination_fraction"))
    zero = published.zero_variance_N
    for column, turn in enumerate(published.turns):
        for low in (0.0, 0.05, 0.10, 0.15):
            for row in sweep(published, [0.02, 0.12, 0.30], turn=turn, unended=low):
                cut = (d[:, column] < row["threshold"]) | (tau[:, column] <= low)
                assert (row["cut"], row["tp"]) == (cut.sum(), (cut & zero).sum())
                assert row["precision"] < 0.8
            (four,) = sweep(published, [0.12], turn=turn, termination=0.9, unended=low)
            cut = (d[:, column] < 0.12) | (tau[:, column] <= low) | (tau[:, column] >= 0.9)
            assert (four["cut"], four["tp"]) == (cut.sum(), (cut & zero).sum())
    four = Point(turn=10, threshold=0.12, termination=0.9, unended=0.1)
    assert str(four).endswith("termination_fraction >= 0.9 or termination_fraction <= 0.1 at turn 10")
