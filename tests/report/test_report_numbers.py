"""Small pure parts of the report: wording of numbers, selection of examples, curves, the table by kind."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from run_directories import candidate, candidates, write_profile

from turntree.report import wording
from turntree.report.figures import Curve, kinds_by_mean, lines, moving_mean, series, style
from turntree.report.html import choose
from turntree.report.read import Table, read_run
from turntree.report.results import Estimate, lambda_preview, mean_rho, threshold
from turntree.run.artifacts import PROFILE


@pytest.mark.parametrize(
    ("difference", "said"),
    [(0.145, "+14.5"), (-0.02, "−2.0"), (0.0, "0.0"), (-0.0001, "0.0"), (0.0004, "0.0"), (None, "–")],
)
def test_differences_carry_their_sign_and_zero_carries_none(difference: float | None, said: str) -> None:
    assert wording.points(difference) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.0, "0.0 s"), (59.94, "59.9 s"), (59.96, "1 min 00 s"), (754, "12 min 34 s"), (3725, "1 h 02 min"), (None, "–")],
)
def test_durations_are_read_in_the_largest_fitting_unit(seconds: float | None, said: str) -> None:
    assert wording.duration(seconds) == said


def test_an_interval_that_touches_zero_contains_it() -> None:
    assert Estimate(0.1, 0.0, 0.2, 9).contains_zero
    assert not Estimate(0.1, 0.001, 0.2, 9).contains_zero


def test_the_most_evenly_mixed_pivot_of_each_kind_is_the_example() -> None:
    actions = [("a", 1.0, 1)]
    rows = [candidate(0, turn, "go", wins, actions) for turn, wins in enumerate((1, 2, 3, 4))]
    rows += [candidate(1, 0, "take", 1, actions), candidate(1, 1, "open", 4, actions)]
    assert [(row["kind"], row["turn"]) for row in choose(rows, 0.6)] == [("go", 1), ("take", 0)]
    assert [row["turn"] for row in choose(rows, 0.5)] == [0, 0]  # a mean of 0.5 is no pivot then
    assert choose(rows, 0.25) == []


def test_the_table_by_kind_has_the_threshold_as_an_edge_and_every_candidate_once() -> None:
    grid = kinds_by_mean(candidates(), 0.5)
    assert grid["columns"] == ["all fail", "0–0.2", "0.2–0.4", "0.4–0.5", "0.5–0.6", "0.6–0.8", "0.8–1", "all succeed"]
    counted = {kind: [size for size, _, _ in cells] for kind, cells in grid["rows"].items()}
    assert counted == {"go": [0, 0, 0, 0, 1, 1, 0, 1], "take": [1, 0, 1, 0, 0, 0, 0, 0]}
    assert [tint for _, _, tint in grid["rows"]["go"]] == ["zero", *["selected"] * 3, *["easy"] * 3, "zero"]


def test_candidates_that_nobody_could_judge_have_a_column_of_their_own() -> None:
    unjudged = {**candidate(0, 0, "go", 0, []), "reward_mean": None, "reward_var": None}
    grid = kinds_by_mean([unjudged], 0.6)
    assert grid["columns"][-1] == "unjudged"
    assert [size for size, _, _ in grid["rows"]["go"]] == [0] * (len(grid["columns"]) - 1) + [1]


def test_a_curve_has_a_point_where_a_finite_number_was_logged() -> None:
    rows = [{"step": 1, "kl": 0.5, "by": {"go": 1.0}}, {"step": 2, "kl": None}, {"step": 3, "kl": math.nan, "by": {}}]
    assert series(rows, "kl") == [(1, 0.5)]
    assert series(rows, "by.go") == [(1, 1.0)]
    assert series(rows, "by.take") == []


def test_the_moving_mean_is_centred_and_keeps_a_line_as_it_is() -> None:
    assert moving_mean([0.0, 0.0, 10.0, 0.0, 0.0]) == pytest.approx([10 / 3, 2.5, 2.0, 2.5, 10 / 3])
    line = [float(step) for step in range(20)]
    assert moving_mean(line)[2:-2] == line[2:-2]


def test_rho_of_a_run_is_all_flat_tokens_over_all_unique_ones() -> None:
    assert mean_rho([{"rho": 2.0, "trained_tokens": 100}, {"rho": 4.0, "trained_tokens": 300}]) == 3.5
    assert mean_rho([{"step": 0}]) is None


def test_an_adaptive_profile_is_shown_at_the_lambda_that_it_was_made_for(tmp_path: Path) -> None:
    write_profile(tmp_path)
    header, rows = PROFILE.read(tmp_path / "profile.jsonl")
    header["config"]["profile"] = {**header["config"].get("profile", {}), "adaptive": {"threshold": 0.3}}
    run = replace(read_run(tmp_path), profile=Table(header, rows))
    assert threshold(run) == 0.3
    assert [row["threshold"] for row in lambda_preview(run)] == [0.3]


def test_a_line_has_the_colour_of_its_arm_in_every_chart(tmp_path: Path) -> None:
    names = [f"arm{n}" for n in range(6)]
    assert len({style(name, names) for name in names}) == len(names)
    what = Curve("loss", "Loss", "loss")
    chart = lines(what, {"arm0": [], "arm1": [(1.0, 2.0), (2.0, 1.0)]})
    assert chart is None or style("arm1", ["arm0", "arm1"])[0].lower() in chart.svg.lower()
