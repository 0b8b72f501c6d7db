"""Online precision from audits: unbiased, alarmed when it falls, seldom alarmed when it does not."""

from __future__ import annotations

import random
import statistics

import pytest

from group_progress import progress
from turntree.core.protocols import GateDecision
from turntree.gates.compose import AuditedGate
from turntree.gates.divergence import PrefixDivergenceGate
from turntree.gates.monitor import GateMonitor, MonitorConfig, supported_threshold
from turntree.observe.statistics import clopper_pearson_low


def audited(share: float = 0.1, value: float = 0.0) -> GateDecision:
    numbers = {"prefix_edit_distance_mean": value}
    return GateDecision(cut=False, reason="r", numbers=numbers, final=True, audited=True, audit_share=share)


CUT = GateDecision(cut=True, reason="r", numbers={}, final=True)
PASSED = GateDecision(cut=False, reason="r", numbers={}, final=True)


def test_audits_estimate_the_precision_of_all_would_be_cuts_without_bias():
    """A gate of precision 0.7 over 400 converged groups, audited at 20%, many times over."""
    gate = [AuditedGate(gate=PrefixDivergenceGate(turn=1), share=0.2, seed=seed) for seed in range(40)]
    groups = [progress("a", "a", task_id=f"task {i}") for i in range(400)]
    estimates: list[float] = []
    for each in gate:
        monitor = GateMonitor()
        for index, group in enumerate(groups):
            decision = each.decide(group)
            monitor.record(decision, index % 10 < 7 if decision.audited else None)
        found = monitor.precision()
        assert found.would_be_cuts == 400
        estimates.append(found.value)
    assert statistics.mean(estimates) == pytest.approx(0.7, abs=0.02)


def test_audits_drawn_with_different_shares_are_weighted_by_what_they_stand_for():
    monitor = GateMonitor()
    monitor.record(audited(0.1), True)
    monitor.record(audited(0.5), False)
    assert monitor.precision().value == pytest.approx(10 / 12)
    monitor.record(PASSED, True)
    monitor.record(None, False)
    assert monitor.zero_variance_rate() == pytest.approx((10 + 1) / (12 + 2))


def test_without_audits_nothing_is_known():
    monitor = GateMonitor()
    monitor.record(CUT, None)
    found = monitor.precision()
    assert (found.value, found.low, found.high, found.audits, found.would_be_cuts) == (None, 0.0, 1.0, 0, 1)
    assert monitor.zero_variance_rate() is None and not monitor.alarm


def test_an_audit_lost_to_faults_counts_as_a_would_be_cut_without_an_outcome():
    monitor = GateMonitor()
    monitor.record(audited(), None)
    monitor.record(audited(), True)
    assert (monitor.precision().audits, monitor.precision().would_be_cuts) == (1, 2)


def test_a_cut_group_has_no_outcome():
    with pytest.raises(ValueError, match="censored"):
        GateMonitor().record(CUT, True)


def audits_until_alarm(precision: float, seed: int, most: int = 3000) -> int:
    draw, monitor = random.Random(seed), GateMonitor(MonitorConfig(floor=0.8, drop=0.2, false_alarms=0.05))
    for count in range(1, most + 1):
        monitor.record(audited(), draw.random() < precision)
        if monitor.alarm:
            return count
    return most


def test_false_alarms_are_as_rare_as_promised_at_the_floor():
    assert statistics.mean(audits_until_alarm(0.8, seed) for seed in range(60)) >= 1 / 0.05


def test_a_fall_below_the_floor_is_noticed_within_a_few_dozen_audits():
    assert statistics.mean(audits_until_alarm(0.4, seed) for seed in range(60)) < 15


def test_a_long_good_record_does_not_delay_the_alarm():
    monitor = GateMonitor()
    for _ in range(500):
        monitor.record(audited(), True)
    for _ in range(8):
        monitor.record(audited(), False)
    assert monitor.alarm


def test_recalibration_returns_the_largest_supported_threshold():
    monitor = GateMonitor()
    for index in range(60):
        monitor.record(audited(value=0.01 * (index % 6)), index % 6 < 4 or index % 12 == 4)
    found = monitor.recalibrated()
    assert found is not None and 0.04 < found < 0.05, "45 of 50 hold the floor, 45 of 60 do not"


def test_recalibration_switches_a_gate_off_that_nothing_supports():
    monitor = GateMonitor()
    for index in range(100):
        monitor.record(audited(value=index / 1000), index % 2 == 0)
    assert monitor.recalibrated() is None
    assert GateMonitor().recalibrated() is None


def test_a_supported_threshold_errs_as_seldom_as_promised():
    """Below 0.5 the groups are 75% without variance, short of the floor of 80%: any threshold returned is wrong."""
    wrong = 0
    for seed in range(300):
        draw = random.Random(seed)
        groups = [(draw.random() / 2, draw.random() < 0.75) for _ in range(60)]
        wrong += supported_threshold(groups, 0.8, 0.9) is not None
    assert wrong / 300 <= 0.1 + 0.03


def test_a_supported_threshold_has_the_bound_it_claims():
    draw = random.Random(1)
    groups = [(draw.random(), draw.random() < 0.97) for _ in range(80)]
    found = supported_threshold(groups, 0.8)
    inside = [zero for value, zero in groups if value < found]
    assert clopper_pearson_low(sum(inside), len(inside)) >= 0.8


@pytest.mark.parametrize("wrong", [{"floor": 1.0}, {"drop": 0.9}, {"false_alarms": 0.0}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=r"floor|false_alarms"):
        MonitorConfig(**wrong)
