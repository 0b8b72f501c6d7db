"""The drift alarm: silent at its stated rate where nothing fell, heard where something did."""

import json
import random
from statistics import fmean, variance

import pytest
from scipy.stats import t as student
from scipy.stats import ttest_1samp

from turntree.core.errors import ConfigError
from turntree.training.drift import DriftConfig, DriftMonitor

GROUP = 8


def group(draw, rate):
    """Mean reward of one group at a pivot whose own difficulty scatters around the kind's rate."""
    own = min(1.0, max(0.0, rate + draw.uniform(-0.3, 0.3)))
    return sum(draw.random() < own for _ in range(GROUP)) / GROUP


def live_alarms(draw, rates, *, window=16, **settings):
    """Alarms of a run: one kind whose rate goes through `rates`, a group each; and a second kind that stays."""
    monitor = DriftMonitor(DriftConfig(window=window, **settings), {"moves", "stays"})
    return [
        alarm
        for index, rate in enumerate(rates)
        for kind, now in (("moves", rate), ("stays", 0.5))
        for alarm in monitor.live(kind, index, group(draw, now))
    ]


def held_out_alarms(draw, start, now, *, checks=10, states=24, **settings):
    monitor = DriftMonitor(DriftConfig(**settings), {"any"})
    own = [min(1.0, max(0.0, draw.gauss(0.0, 0.3))) for _ in range(states)]

    def acceptance(rate):
        chances = [min(1.0, max(0.0, rate + x - 0.1)) for x in own]
        return {"kind": [sum(draw.random() < p for p in [chance] * 4) / 4 for chance in chances]}

    assert monitor.held_out(acceptance(start)) == []
    return [alarm for _ in range(checks) for alarm in monitor.held_out(acceptance(now))]


def test_live_alarms_where_nothing_fell_are_as_rare_as_stated_even_at_zero_tolerance() -> None:
    draw = random.Random(0)
    runs = 400
    false = sum(bool(live_alarms(draw, [0.6] * 200, tolerance=0.0, false_alarms=0.2)) for _ in range(runs))
    assert false / runs < 0.1 + 3 * (0.1 * 0.9 / runs) ** 0.5  # half of the rate belongs to live rewards


def test_held_out_alarms_where_nothing_fell_are_as_rare_as_stated_even_at_zero_tolerance() -> None:
    draw = random.Random(1)
    runs = 400
    false = sum(bool(held_out_alarms(draw, 0.6, 0.6, tolerance=0.0, false_alarms=0.2)) for _ in range(runs))
    assert false / runs < 0.1 + 3 * (0.1 * 0.9 / runs) ** 0.5


def test_the_rate_is_not_so_small_that_nothing_is_ever_said() -> None:
    """Without the correction for looks and kinds the rate above would be far exceeded; with it, some remain."""
    draw = random.Random(2)
    assert any(live_alarms(draw, [0.6] * 200, tolerance=0.0, false_alarms=0.9) for _ in range(60))


def test_a_kind_that_is_forgotten_is_named_once_with_its_numbers() -> None:
    alarms = live_alarms(random.Random(3), [0.8] * 40 + [0.3] * 120)
    assert [(alarm["where"], alarm["kind"]) for alarm in alarms] == [("live", "moves")]
    assert alarms[0]["start"] == pytest.approx(0.8, abs=0.1)
    assert alarms[0]["now"] == pytest.approx(0.3, abs=0.15)
    assert alarms[0]["p_value"] < 0.05
    held_out = held_out_alarms(random.Random(3), 0.8, 0.4)
    assert [(alarm["where"], alarm["kind"]) for alarm in held_out] == [("held_out", "kind")]


def test_a_fall_within_the_tolerance_and_a_rise_are_no_alarm() -> None:
    draw = random.Random(4)
    assert not any(live_alarms(draw, [0.6] * 32 + [0.5] * 200, tolerance=0.15) for _ in range(30))
    assert not any(live_alarms(draw, [0.3] * 32 + [0.8] * 200, tolerance=0.0) for _ in range(30))


def test_a_certain_fall_needs_no_variance() -> None:
    monitor = DriftMonitor(DriftConfig(window=8), {"k"})
    alarms = [alarm for i in range(16) for alarm in monitor.live("k", i, 1.0 if i < 8 else 0.0)]
    assert alarms == [{"where": "live", "kind": "k", "start": 1.0, "now": 0.0, "p_value": 0.0}]


def test_few_states_are_no_evidence() -> None:
    monitor = DriftMonitor(DriftConfig(), {"k"})
    monitor.held_out({"rare": [1.0] * 7, "common": [1.0] * 8})
    assert [alarm["kind"] for alarm in monitor.held_out({"rare": [0.0] * 7, "common": [0.0] * 8})] == ["common"]


def test_every_kind_of_a_check_is_watched_from_when_it_first_came_up() -> None:
    monitor = DriftMonitor(DriftConfig(), {"k"})
    good, bad = [1.0] * 8, [0.0] * 8
    assert monitor.held_out({"b": good, "c": good}) == []
    alarms = monitor.held_out({"a": good, "b": bad, "c": bad})
    assert [alarm["kind"] for alarm in alarms] == ["b", "c"]
    assert [alarm["kind"] for alarm in monitor.held_out({"a": bad, "b": bad, "c": bad})] == ["a"]


def test_a_check_is_judged_by_student_s_t_of_its_paired_differences() -> None:
    monitor = DriftMonitor(DriftConfig(tolerance=0.1, false_alarms=0.9), {"k"})
    before, after = [1.0] * 10, [0.25, 0.5, 0.75, 1.0, 0.0] * 2
    monitor.held_out({"k": before})
    (alarm,) = monitor.held_out({"k": after})
    test = ttest_1samp([one - other for one, other in zip(before, after, strict=True)], 0.1, alternative="greater")
    assert alarm == {"where": "held_out", "kind": "k", "start": 1.0, "now": 0.5, "p_value": pytest.approx(test.pvalue)}


def test_a_block_is_judged_by_welch_s_variance_with_the_freedom_of_the_smaller_one() -> None:
    first, block = [1.0, 0.5] * 4, [0.0, 0.5, 0.25, 0.25] * 2
    monitor = DriftMonitor(DriftConfig(tolerance=0.1, false_alarms=0.9, window=8), {"k"})
    alarms = [alarm for index, value in enumerate(first + block) for alarm in monitor.live("k", index, value)]
    spread = (variance(first) + variance(block)) / 8
    p_value = student.sf((fmean(first) - fmean(block) - 0.1) / spread**0.5, 7)
    assert alarms == [{"where": "live", "kind": "k", "start": 0.75, "now": 0.25, "p_value": pytest.approx(p_value)}]


def test_censored_states_are_left_out_of_both_sides() -> None:
    monitor = DriftMonitor(DriftConfig(), {"k"})
    monitor.held_out({"k": [1.0] * 8 + [None] * 8})
    assert monitor.held_out({"k": [1.0] * 4 + [None] * 4 + [0.0] * 8}) == []


def test_pivots_that_retired_are_left_out_of_the_start() -> None:
    """The mastered half leaves; what stays was never better, so nothing fell."""

    def alarms(retired):
        monitor = DriftMonitor(DriftConfig(window=20), {"k"})
        for index in range(20):
            monitor.live("k", index, 1.0 if index < 10 else 0.0)
        return [alarm for index in range(20) for alarm in monitor.live("k", 10 + index % 10, 0.0, retired)]

    assert alarms(retired=range(10)) == []
    assert len(alarms(retired=())) == 1


def test_a_restored_monitor_says_what_the_first_would_have_said() -> None:
    values = [group(random.Random(i), 0.8 if i < 30 else 0.3) for i in range(90)]
    config = DriftConfig(window=16)

    def go(monitor, start, stop):
        found = [alarm for i in range(start, stop) for alarm in monitor.live("k", i, values[i])]
        return found + monitor.held_out({"k": [1.0 if stop < 60 else 0.0] * 8})

    whole, first, second = (DriftMonitor(config, {"k"}) for _ in range(3))
    expected = go(whole, 0, 40) + go(whole, 40, 90)
    before = go(first, 0, 40)
    second.restore(json.loads(json.dumps(first.state())))
    assert before + go(second, 40, 90) == expected
    assert len(expected) == 2


def test_impossible_settings_are_refused() -> None:
    for wrong in ({"false_alarms": 0.0}, {"false_alarms": 1.0}, {"tolerance": -0.1}, {"window": 3}):
        with pytest.raises(ConfigError):
            DriftConfig(**wrong)
