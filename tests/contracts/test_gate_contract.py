"""What every gate promises, over all that ship and one of a user's own."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from group_progress import HORIZON, played_out, progress, stopped_at
from turntree.core.protocols import Gate, GateDecision, GroupProgress
from turntree.decide.gates.audited import AuditedGate, RandomGate
from turntree.decide.gates.divergence import PrefixDivergenceGate
from turntree.decide.gates.signals import action_entropy

PLAIN = PrefixDivergenceGate(turn=3, threshold=0.5)
GATES: dict[str, Gate] = {
    "plain": PLAIN,
    "or rule": PrefixDivergenceGate(turn=3, threshold=0.3, termination=0.5),
    "other signal": PrefixDivergenceGate(turn=2, threshold=0.5, signal=action_entropy),
    "audited": AuditedGate(gate=PLAIN, share=0.5),
    "random": RandomGate(turn=3, rate=0.5),
}


@dataclass
class Asked:
    """The decisions on one group, turn by turn, as a scheduler asks for them."""

    turn: int
    group: GroupProgress
    decision: GateDecision | None


def ask(gate: Gate, rollouts: tuple[str, ...]) -> list[Asked]:
    groups = [(turn, stopped_at(rollouts, turn)) for turn in range(1, HORIZON + 1)]
    return [Asked(turn, group, gate.decide(group)) for turn, group in groups]


@pytest.mark.parametrize("name", GATES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(rollouts=played_out(), data=st.data())
def test_every_gate_keeps_its_promises(name: str, rollouts: tuple[str, ...], data: st.DataObject) -> None:
    gate = GATES[name]
    answers = ask(gate, rollouts)
    for one in answers:
        decision = one.decision
        if decision is None:
            assert not all(one.group.finished), "a group that ended gets a decision"
            continue
        assert decision.reason
        assert all(math.isfinite(value) for value in decision.numbers.values())
        assert not (decision.cut and all(one.group.finished)), "nothing left to save is not cut"
        assert not (decision.cut or decision.audited) or len(one.group.actions) >= 2
        assert not (decision.cut and decision.audited), "an audited group runs on"
        assert decision.final or not (decision.cut or decision.audited), "cutting and auditing end the matter"
        assert gate.decide(one.group) == decision, "the same group gets the same answer"
    moment = data.draw(st.sampled_from(answers))
    assert gate.decide(moment.group) == moment.decision, "whatever it was asked in between"


@pytest.mark.parametrize("name", [name for name in GATES if name != "random"])
def test_a_gate_cuts_a_group_whose_rollouts_are_all_the_same(name: str) -> None:
    groups = [progress(*["aaaaa"] * 4, task_id=f"task {i}") for i in range(40)]
    decisions = [GATES[name].decide(group) for group in groups]
    assert any(decision is not None and decision.cut for decision in decisions)


@pytest.mark.parametrize("name", [name for name in GATES if name != "random"])
def test_a_gate_lets_a_group_go_on_whose_rollouts_share_nothing(name: str) -> None:
    assert not any(one.decision is not None and one.decision.cut for one in ask(GATES[name], ("abcabc", "bcabca")))
