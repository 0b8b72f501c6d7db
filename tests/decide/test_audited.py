"""The configured gate, audits of would-be cuts, the precision that they give, and the random control."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics

import numpy as np
import pytest

from group_progress import progress
from turntree.core import parts
from turntree.core.config import Part
from turntree.core.errors import ConfigError
from turntree.core.protocols import BranchDecision, GateDecision
from turntree.decide.gates.audited import AuditedGate, GateMonitor, RandomGate
from turntree.decide.gates.divergence import PrefixDivergenceGate
from turntree.run.means import wilson

EVERY_TASK = [progress("aaa", "aaa", task_id=f"task {i}") for i in range(400)]
CUT = GateDecision(cut=True, reason="r", numbers={}, final=True)
PASSED = GateDecision(cut=False, reason="r", numbers={}, final=True)


def built(**options):
    return parts.build("gates", Part("divergence", options), seed=0)


def test_the_default_is_the_paper_s_point():
    assert built() == PrefixDivergenceGate(turn=10, threshold=0.12)


def test_a_gate_is_built_from_plain_values():
    gate = built(turn=3, threshold=0.3, termination=0.9, audit=1.0)
    assert gate.first_look == 3 and gate.gate.termination == 0.9
    assert gate.decide(progress("aaa", "aaa")).audited


@pytest.mark.parametrize("wrong", [{"audit": 2.0}, {"turn": 0}, {"threshold": -1.0}, {"termination": 0.0}])
def test_an_impossible_option_is_named_by_its_key(wrong):
    with pytest.raises(ConfigError) as refused:
        built(**wrong)
    assert refused.value.field == f"gate.{next(iter(wrong))}"


def test_an_audited_share_of_would_be_cuts_runs_on_and_says_so():
    gate = AuditedGate(gate=PrefixDivergenceGate(turn=3), share=0.25, seed=1)
    decisions = [gate.decide(group) for group in EVERY_TASK]
    assert all(decision.cut != decision.audited and decision.final for decision in decisions)
    assert all(decision.numbers["audit_share"] == 0.25 for decision in decisions)
    assert sum(decision.audited for decision in decisions) == pytest.approx(100, abs=30)


def test_decisions_hold_plain_numbers_and_no_unknown_ones():
    """What a log and a checkpoint cannot hold would end the run where they are written."""
    measured = {"mean": np.float32(0.25), "unknown": math.nan, "none": None}
    decision = GateDecision(cut=np.mean([0.0]) < 0.1, reason="", numbers=measured, final=np.bool_(True))
    assert decision.cut is True and decision.final is True and decision.numbers == {"mean": 0.25}
    fork = BranchDecision(branches=np.int64(2), reason="", numbers=measured, shared=np.int64(1))
    assert json.loads(json.dumps(dataclasses.asdict(fork), allow_nan=False))["branches"] == 2


def test_a_cut_by_terminations_does_not_log_a_signal_that_is_unknown():
    gate = PrefixDivergenceGate(turn=2, threshold=0.2, signal=unknown, termination=0.5)
    decision = gate.decide(progress("a", "aa", finished=[0]))
    assert decision.cut and all(math.isfinite(value) for value in decision.numbers.values())


def unknown(group, turn):
    return math.nan


def test_whether_a_group_is_audited_depends_on_seed_task_and_iteration_only():
    def audited(seed: int, iteration: int) -> list[bool]:
        gate = AuditedGate(gate=PrefixDivergenceGate(turn=2), share=0.5, seed=seed)
        groups = [progress("aa", "aa", task_id=f"task {i}", iteration=iteration) for i in range(50)]
        return [gate.decide(group).audited for group in groups]

    assert audited(0, 0) == audited(0, 0)
    assert audited(0, 0) != audited(1, 0)
    assert audited(0, 0) != audited(0, 1)


@pytest.mark.parametrize(
    "gate", [AuditedGate(gate=PrefixDivergenceGate(turn=3), share=0.5), RandomGate(turn=3, rate=0.5)]
)
def test_a_task_that_comes_again_in_one_iteration_is_drawn_for_again(gate):
    again = [dataclasses.replace(group, occurrence=1) for group in EVERY_TASK]
    differ = [gate.decide(a).cut != gate.decide(b).cut for a, b in zip(EVERY_TASK, again, strict=True)]
    assert sum(differ) == pytest.approx(200, abs=50)


def test_an_audit_changes_nothing_about_groups_that_pass():
    inner = PrefixDivergenceGate(turn=2)
    gate = AuditedGate(gate=inner, share=1.0)
    for group in (progress("ab", "cd"), progress("a", "b"), progress("aa", "aa", finished=[0, 1])):
        assert gate.decide(group) == inner.decide(group)


# the precision that audits give


def audited(share: float = 0.1) -> GateDecision:
    return GateDecision(cut=False, reason="r", numbers={}, final=True, audited=True, audit_share=share)


def precision(*records):
    monitor = GateMonitor()
    for decision, zero_variance in records:
        monitor.record(decision, zero_variance)
    return monitor.precision()


def test_audits_estimate_the_precision_of_all_would_be_cuts_without_bias():
    """A gate of precision 0.7 over 400 converged groups, audited at 20%, many times over."""
    estimates: list[float] = []
    for seed in range(40):
        gate, monitor = AuditedGate(gate=PrefixDivergenceGate(turn=1), share=0.2, seed=seed), GateMonitor()
        for index, group in enumerate(EVERY_TASK):
            decision = gate.decide(group)
            monitor.record(decision, index % 10 < 7 if decision.audited else None)
        found = monitor.precision()
        assert found is not None and found["would_be_cuts"] == 400
        estimates.append(found["value"])
    assert statistics.mean(estimates) == pytest.approx(0.7, abs=0.02)


def test_audits_drawn_with_different_shares_are_weighted_by_what_they_stand_for():
    assert precision((audited(0.1), True), (audited(0.5), False))["value"] == pytest.approx(10 / 12)


def test_audits_of_unequal_weight_are_worth_fewer_of_equal_weight():
    """Kish's effective number: weights 10, 2, 2, 2 are worth 16^2 / 112 = 2.3 audits."""
    found = precision((audited(0.1), True), *[(audited(0.5), True)] * 3)
    assert (found["low"], found["high"]) == pytest.approx(wilson(256 / 112, 256 / 112))


def test_groups_that_the_gate_let_pass_say_nothing_of_its_precision():
    assert precision((audited(), True), *[(PASSED, False)] * 20) == precision((audited(), True))


def test_without_audits_nothing_is_known():
    assert precision((CUT, None)) is None


def test_an_audit_lost_to_faults_counts_as_a_would_be_cut_without_an_outcome():
    found = precision((audited(), None), (audited(), True))
    assert (found["audits"], found["would_be_cuts"]) == (1, 2)


def test_a_cut_group_has_no_outcome():
    with pytest.raises(ValueError, match="censored"):
        GateMonitor().record(CUT, True)


# the control


def test_the_random_control_cuts_at_its_rate_whatever_the_actions():
    gate = RandomGate(turn=3, rate=0.3, seed=2)
    cuts = [gate.decide(group).cut for group in EVERY_TASK]
    assert sum(cuts) == pytest.approx(120, abs=30)
    diverged = [progress("abc", "def", task_id=group.task_id) for group in EVERY_TASK]
    assert cuts == [gate.decide(group).cut for group in diverged]


@pytest.mark.parametrize("wrong", [{"turn": 0}, {"rate": 1.1}])
def test_impossible_settings_of_the_control_are_refused(wrong):
    with pytest.raises(ConfigError) as refused:
        RandomGate(**wrong)
    assert refused.value.field == next(iter(wrong))
