"""The gate of Selective Rollout: stop a group whose rollouts have converged on one sequence of actions."""

from __future__ import annotations

import math
from dataclasses import dataclass

from turntree.core.errors import ConfigError
from turntree.core.protocols import Gate, GateDecision, GroupProgress
from turntree.decide.gates.signals import Signal, prefix_edit_distance_mean, termination_fraction


@dataclass(frozen=True, kw_only=True)
class PrefixDivergenceGate(Gate):
    """Cuts a group at turn `turn` if `signal < threshold` (Eq. 2), strictly; the defaults are the paper's point.

    `termination`: cut also where at least that share of the rollouts has ended before `turn` (the OR rule, Eq. 3);
    with `threshold=0` it is the only clause. `unended`: cut also where at most that share has (its mirror, E.9, which
    the paper rejects: no point of it is precise). `signal`: any function of a group and a turn; NaN never cuts.

    A group is *actionable* while a rollout of it is unfinished. When none is, there is nothing to save: the decision
    is "not cut" and says so, whatever the signal. (The paper's offline tables count such groups as cut.)
    """

    turn: int = 10
    threshold: float = 0.12
    termination: float | None = None
    unended: float | None = None
    signal: Signal = prefix_edit_distance_mean

    def __post_init__(self) -> None:
        if self.turn < 1:
            raise ConfigError(f"must be at least 1, not {self.turn}", field="turn")
        if not 0 <= self.threshold < math.inf:
            raise ConfigError(f"must be a number of at least 0, not {self.threshold}", field="threshold")
        if self.termination is not None and not 0 < self.termination <= 1:
            raise ConfigError(f"must be in (0, 1], not {self.termination}", field="termination")
        if self.unended is not None and not 0 <= self.unended < 1:
            raise ConfigError(f"must be in [0, 1), not {self.unended}", field="unended")

    @property
    def first_look(self) -> int:
        return self.turn

    def decide(self, group: GroupProgress) -> GateDecision | None:
        hopeless = unable(group)
        if hopeless is not None or turns_reached(group) < self.turn:
            return hopeless
        value = self.signal(group, self.turn)
        ended = termination_fraction(group, self.turn)
        name = self.signal.__name__
        numbers = {"turn": float(self.turn), name: value, "threshold": self.threshold, "termination_fraction": ended}
        if value < self.threshold:
            return GateDecision(cut=True, reason=f"{name} below threshold", numbers=numbers, final=True)
        if self.termination is not None and ended >= self.termination:
            return GateDecision(cut=True, reason="termination fraction reached", numbers=numbers, final=True)
        if self.unended is not None and ended <= self.unended:
            return GateDecision(cut=True, reason="few have ended", numbers=numbers, final=True)
        if math.isnan(value):
            return GateDecision(cut=False, reason=f"{name} unknown", numbers=numbers, final=True)
        return GateDecision(cut=False, reason=f"{name} not below threshold", numbers=numbers, final=True)


def turns_reached(group: GroupProgress) -> int:
    """How many turns every unfinished rollout has completed. There must be one."""
    return min(len(actions) for actions, done in zip(group.actions, group.finished, strict=True) if not done)


def unable(group: GroupProgress) -> GateDecision | None:
    """The decision for a group that no gate may cut, because nothing is left to save or nothing can be compared."""
    if all(group.finished):
        return GateDecision(cut=False, reason="nothing left to save", numbers={}, final=True)
    if len(group.actions) < 2:
        return GateDecision(cut=False, reason="fewer than two rollouts", numbers={}, final=True)
    return None
