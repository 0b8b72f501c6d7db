"""Calibration on the published features, and on groups whose truth is known."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest

from turntree.core.outcome import GroupOutcome
from turntree.decide.gates.calibrate import PAPER_SIGNAL, CalibrateConfig, Grid, calibrate, operating_point, passing
from turntree.decide.gates.table import GroupTable
from turntree.run.statistics import clopper_pearson_low, successes_needed


def synthetic(groups: int, *, seed: int, noise: float = 0.0, turns=(4, 8), tasks: int | None = None) -> GroupTable:
    """d below 0.2 means no variance and d above 0.4 mixed rewards, except for a share `noise` of the former."""
    draw = random.Random(seed)
    zero = [draw.random() < 0.5 for _ in range(groups)]
    distance = np.array([[draw.uniform(0, 0.2) if z else draw.uniform(0.4, 1.0) for _ in turns] for z in zero])
    flipped = [z and draw.random() < noise for z in zero]
    mixed = [f or not z for z, f in zip(zero, flipped, strict=True)]
    return GroupTable(
        source="synthetic",
        max_turns=16,
        turns=turns,
        tasks=tuple(f"task {i % (tasks or groups)}" for i in range(groups)),
        outcomes=tuple(GroupOutcome.MIXED if m else GroupOutcome.ALL_FAIL for m in mixed),
        sizes_N=np.full(groups, 8.0),
        signals_NK={PAPER_SIGNAL: distance},
        actionable_NK=np.ones((groups, len(turns)), dtype=bool),
    )


def test_no_operating_point_of_the_published_buffer_is_supported(published):
    found = calibrate(published, CalibrateConfig())
    assert found["recommended"] is None
    assert found["refused"]["reason"].startswith("the data support no operating point among actionable groups: none of")
    assert (found["groups"], found["zero_variance"]) == (100, 39)
    assert [(row["turn"], row["cut"]) for row in found["rows"] if row["threshold"] == 0.12] == [
        (10, 21),
        (15, 14),
        (20, 9),
    ]


def test_the_result_is_plain_json(published):
    found = calibrate(published, CalibrateConfig())
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_a_signal_that_works_is_recommended_at_the_earliest_turn():
    found = calibrate(synthetic(120, seed=0), CalibrateConfig())
    assert found["refused"] is None
    assert found["recommended"]["turn"] == 4 and 0.15 < found["recommended"]["threshold"] <= 0.41
    assert found["recommended"]["actionable"]["precision_low"] > 0.9


def test_a_recommended_point_holds_on_groups_that_it_has_not_seen():
    point, _ = operating_point(synthetic(600, seed=0, noise=0.05), floor=0.8, confidence=0.95)
    assert point is not None
    fresh = synthetic(2000, seed=1, noise=0.05)
    cut = fresh.signals_NK[PAPER_SIGNAL][:, fresh.turns.index(point["turn"])] < point["threshold"]
    assert fresh.zero_variance_N[cut].mean() > 0.9


def test_a_precision_below_the_floor_is_refused_however_many_groups_there_are():
    point, reason = operating_point(synthetic(600, seed=1, noise=0.3), floor=0.8, confidence=0.95)
    assert point is None and reason is not None and "lower bound" in reason


def test_few_perfect_groups_are_refused_because_they_are_few():
    point, reason = operating_point(synthetic(20, seed=2), floor=0.8, confidence=0.95)
    assert point is None and reason is not None
    assert "for 2 pairs of signal and turn together" in reason
    assert "it takes 17 cuts" in reason, "0.8^17 < 0.05 / 2 < 0.8^16"


def noise(groups: int, seed: int) -> GroupTable:
    """Seven signals at four turns that know nothing of the groups."""
    draw, turns = np.random.default_rng(seed), (4, 6, 8, 10)
    table = synthetic(groups, seed=seed, turns=turns)
    return replace(table, signals_NK={f"noise {i}": draw.random((groups, len(turns))) for i in range(7)})


@pytest.mark.parametrize(("precision", "groups"), [(0.75, 100), (0.79, 300)])
def test_buffers_of_noise_get_a_recommendation_as_seldom_as_promised(precision, groups):
    """Every point has a true precision below the floor of 0.8, so any recommendation is wrong. A bound of every single
    point finds one in 44% and 87% of such buffers."""
    draw, wrong = np.random.default_rng(0), 0
    for seed in range(4):
        table = noise(groups, seed)
        grid = Grid.build(table)
        for _ in range(150):
            zero = draw.random(groups) < precision
            wrong += bool(grid.passing(zero, floor=0.8, confidence=0.95))
    assert wrong / 600 <= 0.05


def test_where_tasks_repeat_the_bound_speaks_of_further_groups_of_these_tasks_and_says_so():
    """Signals that tell tasks apart find those that happen to be hopeless. That is right about these tasks only."""
    draw, found, wrong = np.random.default_rng(0), 0, 0
    for seed in range(4):
        table = noise(300, seed)
        traits = {name: np.repeat(draw.random((75, 4)), 4, axis=0) for name in table.signals_NK}
        chance = np.repeat(draw.beta(0.28, 0.0744, 75), 4)  # mean 0.79, standard deviation 0.35
        grid = Grid.build(replace(table, signals_NK=traits))
        for _ in range(50):
            passed = grid.passing(draw.random(300) < chance, floor=0.8, confidence=0.95)
            found += bool(passed)
            wrong += any(chance[grid.cut_PN[index]].mean() < 0.8 for index in passed)
    assert found > 20 and wrong / 200 <= 0.05
    once, again = (calibrate(synthetic(24, seed=0, tasks=tasks), CalibrateConfig())["bound"] for tasks in (24, 6))
    assert "these tasks" not in once and again.endswith("on further groups of these tasks")


def test_the_best_of_many_noise_signals_is_refused_though_its_own_bound_keeps_the_floor():
    draw, table = np.random.default_rng(5), synthetic(60, seed=3, turns=(4,))
    table = replace(table, signals_NK={f"noise {i}": draw.choice([0.1, 0.9], size=(60, 1)) for i in range(200)})
    grid = Grid.build(table)
    cut, true = grid.cut_PN.sum(1), (grid.cut_PN & table.zero_variance_N).sum(1)
    assert any(clopper_pearson_low(int(t), int(c), 0.8) > 0.45 for t, c in zip(true, cut, strict=True))
    assert operating_point(table, floor=0.45, confidence=0.8)[0] is None


def test_a_recommended_bound_holds_for_all_signals_and_turns_together():
    """Of two turns each has half of the error: 0.025^(1/n) after n cuts without a false one."""
    point, _ = operating_point(synthetic(120, seed=0), floor=0.8, confidence=0.95)
    assert point is not None
    live = point["actionable"]
    assert live["fp"] == 0
    assert live["precision_low"] == pytest.approx(0.025 ** (1 / live["cut"]))


def test_a_test_ends_with_its_first_failure_and_begins_where_it_can_forgive():
    """One family of ten nested cuts, floor 0.5, each test at 90%; needed: 4 of 4, 5 of 5, 6 of 6, 6 of 7, 7 of 8."""
    needed, family = successes_needed(10, 0.5, 0.9), np.zeros(10, dtype=np.int64)
    assert list(needed[4:9]) == [4, 5, 6, 6, 7]
    cut = np.arange(1, 11)
    late = np.cumsum([0, 1, 1, 1, 1, 1, 1, 1, 1, 1])
    assert passing(cut, late, family, needed, 0) == [], "3 of 4 fails, and what comes later is not looked at"
    assert passing(cut, late, family, needed, 1) == [6, 7, 8, 9], "6 of 7 is the first test"
    assert passing(cut, np.minimum(cut, 5), family, needed, 0) == [3, 4], "5 of 6 ends it"
    two, both = np.repeat([0, 1], 10), np.concatenate([late, np.minimum(cut, 5)])
    assert passing(np.tile(cut, 2), both, two, needed, 0) == [13, 14], "a failure ends its own family only"
