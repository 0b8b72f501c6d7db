"""Several checkpoints, audits of would-be cuts, and the random control."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from group_progress import progress
from turntree.core.errors import ConfigError
from turntree.core.protocols import BranchDecision, GateDecision
from turntree.decide.gates.composed import AnyOf, AuditedGate, RandomGate
from turntree.decide.gates.divergence import PrefixDivergenceGate
from turntree.decide.gates.monitor import GateMonitor
from turntree.decide.gates.signals import best_progress

EVERY_TASK = [progress("aaa", "aaa", task_id=f"task {i}") for i in range(400)]


def checkpoints() -> AnyOf:
    return AnyOf((PrefixDivergenceGate(turn=2, threshold=0.1), PrefixDivergenceGate(turn=4, threshold=0.3)))


def test_a_later_checkpoint_is_asked_when_the_earlier_one_passed():
    gate = checkpoints()
    assert gate.decide(progress("aa", "ab")) is None
    assert gate.decide(progress("aba", "aaa")) is None
    decision = gate.decide(progress("aaba", "aaaa"))
    assert decision.cut and decision.numbers["1.prefix_edit_distance_mean"] == 0.25


def test_a_checkpoint_is_not_asked_again_about_a_group_that_it_let_pass():
    """A fault took the rollout that differed."""
    gate = checkpoints()
    assert gate.decide(progress("aa", "aa", "bc")) is None
    assert gate.decide(progress("aaa", "aaa")) is None
    assert gate.decide(progress("aaaa", "aaaa")).cut, "the next one decides at its own turn"


def test_an_audited_checkpoint_is_not_asked_again_either():
    first, second = checkpoints().gates
    gate = AnyOf((AuditedGate(gate=first, share=0.01), second))
    assert gate.decide(progress("aa", "aa", "bc")) is None
    assert gate.decide(progress("aaa", "aaa")) is None


def test_the_first_checkpoint_cuts_without_waiting_for_the_others():
    decision = checkpoints().decide(progress("aa", "aa"))
    assert decision.cut and {name[0] for name in decision.numbers} == {"0"}


def test_a_group_that_passed_every_checkpoint_is_settled():
    decision = checkpoints().decide(progress("aaaa", "bbbb"))
    assert not decision.cut and decision.final


def test_divergence_and_progress_catch_different_groups():
    both = AnyOf((
        PrefixDivergenceGate(turn=2, threshold=0.1),
        PrefixDivergenceGate(turn=2, threshold=0.2, signal=best_progress),
    ))  # fmt: skip
    assert both.decide(progress("ab", "cd", reported=[0.1, 0.0])).cut
    assert both.decide(progress("ab", "ab", reported=[0.9, 0.0])).cut
    assert not both.decide(progress("ab", "cd", reported=[0.9, 0.0])).cut


def test_an_audited_share_of_would_be_cuts_runs_on_and_says_so():
    gate = AuditedGate(gate=PrefixDivergenceGate(turn=3), share=0.25, seed=1)
    decisions = [gate.decide(group) for group in EVERY_TASK]
    assert all(decision.cut != decision.audited and decision.final for decision in decisions)
    assert all(decision.numbers["audit_share"] == 0.25 for decision in decisions)
    assert sum(decision.audited for decision in decisions) == pytest.approx(100, abs=30)


def test_an_audit_keeps_its_share_in_a_gate_of_gates():
    """The monitor weighs an audit by its share."""
    gate = AnyOf((AuditedGate(gate=PrefixDivergenceGate(turn=3), share=0.25, seed=1), PrefixDivergenceGate(turn=4)))
    monitor = GateMonitor()
    for group in EVERY_TASK:
        decision = gate.decide(group)
        monitor.record(decision, True if decision.audited else None)
    precision = monitor.precision()
    assert precision.value == 1.0 and precision.audits == pytest.approx(100, abs=30)


def test_decisions_hold_plain_numbers_and_no_unknown_ones():
    """What a log and a checkpoint cannot hold would end the run where they are written."""
    measured = {"mean": np.float32(0.25), "unknown": math.nan, "none": None}
    decision = GateDecision(cut=np.mean([0.0]) < 0.1, reason="", numbers=measured, final=np.bool_(True))
    assert decision.cut is True and decision.final is True and decision.numbers == {"mean": 0.25}
    fork = BranchDecision(branches=np.int64(2), reason="", numbers=measured, shared=np.int64(1))
    assert json.loads(json.dumps(dataclasses.asdict(fork), allow_nan=False))["branches"] == 2


def test_a_cut_by_terminations_does_not_log_a_signal_that_is_unknown():
    gate = PrefixDivergenceGate(turn=2, threshold=0.2, signal=best_progress, termination=0.5)
    decision = gate.decide(progress("a", "aa", finished=[0]))
    assert decision.cut and all(math.isfinite(value) for value in decision.numbers.values())


def test_whether_a_group_is_audited_depends_on_seed_task_and_iteration_only():
    def audited(seed: int, iteration: int) -> list[bool]:
        gate = AuditedGate(gate=PrefixDivergenceGate(turn=2), share=0.5, seed=seed)
        groups = [progress("aa", "aa", task_id=f"task {i}", iteration=iteration) for i in range(50)]
        return [gate.decide(group).audited for group in groups]

    assert audited(0, 0) == audited(0, 0)
    assert audited(0, 0) != audited(1, 0)
    assert audited(0, 0) != audited(0, 1)


def test_an_audit_changes_nothing_about_groups_that_pass():
    inner = PrefixDivergenceGate(turn=2)
    gate = AuditedGate(gate=inner, share=1.0)
    for group in (progress("ab", "cd"), progress("a", "b"), progress("aa", "aa", finished=[0, 1])):
        assert gate.decide(group) == inner.decide(group)


def test_the_random_control_cuts_at_its_rate_whatever_the_actions():
    gate = RandomGate(turn=3, rate=0.3, seed=2)
    cuts = [gate.decide(group).cut for group in EVERY_TASK]
    assert sum(cuts) == pytest.approx(120, abs=30)
    diverged = [progress("abc", "def", task_id=group.task_id) for group in EVERY_TASK]
    assert cuts == [gate.decide(group).cut for group in diverged]


@pytest.mark.parametrize(
    "build",
    [
        lambda: AnyOf(()),
        lambda: AuditedGate(gate=PrefixDivergenceGate(), share=0.0),
        lambda: RandomGate(turn=0, rate=0.1),
        lambda: RandomGate(turn=1, rate=1.1),
    ],
)
def test_impossible_settings_are_refused(build):
    with pytest.raises((ValueError, ConfigError), match=r"at least|must be"):
        build()
