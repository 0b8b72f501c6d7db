"""Gates made of gates (several checkpoints, an audited share), and the control of an experiment: cuts at random."""

from __future__ import annotations

from dataclasses import dataclass, replace

from turntree.core import seeds
from turntree.core.errors import ConfigError
from turntree.core.protocols import Gate, GateDecision, GroupProgress
from turntree.decide.gates.divergence import turns_reached, unable


@dataclass(frozen=True)
class AnyOf(Gate):
    """Cuts as soon as one of its gates does: several checkpoints, or signals of several kinds.

    It decides nothing until one cuts or all have decided; the numbers of gate i are called `i.name`. A checkpoint that
    let a group pass at its turn is not asked again: a fault may have taken a rollout out of the group since.
    """

    gates: tuple[Gate, ...]

    def __post_init__(self) -> None:
        if not self.gates:
            raise ValueError("needs at least one gate")

    @property
    def first_look(self) -> int:
        return min(gate.first_look for gate in self.gates)

    def decide(self, group: GroupProgress) -> GateDecision | None:
        decisions = [_passed(gate, group) or gate.decide(group) for gate in self.gates]
        known = [decision for decision in decisions if decision is not None]
        numbers = {
            f"{i}.{name}": value
            for i, decision in enumerate(decisions)
            if decision is not None
            for name, value in decision.numbers.items()
        }
        first = next((decision for decision in known if decision.cut or decision.audited), None)
        if first is not None:
            return replace(first, numbers=numbers)
        if len(known) == len(self.gates) and all(decision.final for decision in known):
            return replace(known[-1], numbers=numbers)
        return None


@dataclass(frozen=True, kw_only=True)
class AuditedGate(Gate):
    """Lets a random `share` of the groups that `gate` would cut run on to their end, marked `audited`.

    Their outcomes are the only unbiased measure of the gate's precision while it is on (`GateMonitor`). The draw
    depends only on (seed, task, iteration, occurrence), so each would-be cut is audited with probability `share`
    independent of its outcome. An audited group represents 1/share of them; the decision records the share.
    """

    gate: Gate
    share: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"the audited share must be in (0, 1], not {self.share}")

    @property
    def first_look(self) -> int:
        return self.gate.first_look

    @property
    def last_look(self) -> int | None:
        return self.gate.last_look

    def decide(self, group: GroupProgress) -> GateDecision | None:
        decision = self.gate.decide(group)
        if decision is None or not decision.cut:
            return decision
        draw = _draw(self.seed, "gate audit", group)
        audited = draw < self.share
        numbers = {**decision.numbers, "audit_share": self.share}
        return replace(decision, cut=not audited, audited=audited, audit_share=self.share, final=True, numbers=numbers)


@dataclass(frozen=True, kw_only=True)
class RandomGate(Gate):
    """The control: cuts a share `rate` of the groups that still run at `turn`, at random, with the same rules
    otherwise."""

    turn: int
    rate: float
    seed: int = 0

    def __post_init__(self) -> None:
        if self.turn < 1:
            raise ConfigError(f"must be at least 1, not {self.turn}", field="turn")
        if not 0 <= self.rate <= 1:
            raise ConfigError(f"must be in [0, 1], not {self.rate}", field="rate")

    @property
    def first_look(self) -> int:
        return self.turn

    def decide(self, group: GroupProgress) -> GateDecision | None:
        hopeless = unable(group)
        if hopeless is not None or turns_reached(group) < self.turn:
            return hopeless
        cut = _draw(self.seed, "random gate", group) < self.rate
        numbers = {"turn": float(self.turn), "rate": self.rate}
        return GateDecision(cut=cut, reason="drawn to be cut" if cut else "drawn to go on", numbers=numbers, final=True)


def _passed(gate: Gate, group: GroupProgress) -> GateDecision | None:
    """The decision of a checkpoint whose turn is over: it did not cut then."""
    last = gate.last_look
    if last is None or all(group.finished) or turns_reached(group) <= last:
        return None
    return GateDecision(cut=False, reason=f"passed at turn {last}", numbers={}, final=True)


def _draw(seed: int, what: str, group: GroupProgress) -> float:
    """A draw in [0, 1) that differs between groups, also where a task comes twice in one iteration."""
    again = (group.occurrence,) if group.occurrence else ()
    return seeds.generator(seed, what, group.task_id, group.iteration, *again).random()
