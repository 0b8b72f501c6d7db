"""Online precision from audits: unbiased, alarmed when it falls, seldom alarmed when it does not."""

from __future__ import annotations

import random
import statistics

import pytest

from group_progress import progress
from turntree.core.protocols import GateDecision
from turntree.decide.gates.composed import AuditedGate
from turntree.decide.gates.divergence import PrefixDivergenceGate
from turntree.decide.gates.monitor import GateMonitor, MonitorConfig


def audited(share: float = 0.1) -> GateDecision:
    return GateDecision(cut=False, reason="r", numbers={}, final=True, audited=True, audit_share=share)


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


def test_groups_that_the_gate_let_pass_say_nothing_of_its_precision():
    monitor = GateMonitor()
    monitor.record(audited(), True)
    before = monitor.precision()
    for _ in range(20):
        monitor.record(PASSED, False)
    assert monitor.precision() == before and before.value == 1.0 and not monitor.alarm


def test_without_audits_nothing_is_known():
    monitor = GateMonitor()
    monitor.record(CUT, None)
    found = monitor.precision()
    assert (found.value, found.low, found.high, found.audits, found.would_be_cuts) == (None, 0.0, 1.0, 0, 1)
    assert not monitor.alarm


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


@pytest.mark.parametrize("wrong", [{"floor": 1.0}, {"drop": 0.9}, {"false_alarms": 0.0}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=r"floor|false_alarms"):
        MonitorConfig(**wrong)
