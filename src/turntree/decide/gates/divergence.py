"""The gate of Selective Rollout: stop a group whose rollouts have converged on one sequence of actions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from turntree.core.config import Amount, Between, Bounded, Positive
from turntree.core.protocols import Gate, GateDecision, GroupProgress
from turntree.decide.gates.signals import Signal, prefix_edit_distance_mean, termination_fraction


@dataclass(frozen=True, kw_only=True)
class GateAtTurn(Bounded, Gate):
    """Decides once, when every unfinished rollout has completed `turn` turns."""

    turn: Positive = 10

    @property
    def first_look(self) -> int:
        return self.turn

    def decide(self, group: GroupProgress) -> GateDecision | None:
        if all(group.finished):
            return GateDecision(cut=False, reason="nothing left to save", numbers={}, final=True)
        if len(group.actions) < 2:
            return GateDecision(cut=False, reason="fewer than two rollouts", numbers={}, final=True)
        pairs = zip(group.actions, group.finished, strict=True)
        if min(len(actions) for actions, done in pairs if not done) < self.turn:
            return None
        cut, reason, numbers = self.reached(group)
        return GateDecision(cut=cut, reason=reason, numbers={"turn": float(self.turn), **numbers}, final=True)

    def reached(self, group: GroupProgress) -> tuple[bool, str, dict[str, float]]:
        """Whether to cut, why, and the numbers that say so."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class PrefixDivergenceGate(GateAtTurn):
    """Cuts a group at turn `turn` if `signal < threshold` (Eq. 2), strictly; the defaults are the paper's point.

    `termination`: cut also where at least that share of the rollouts has ended before `turn` (the OR rule, Eq. 3);
    with `threshold=0` it is the only clause. `unended`: cut also where at most that share has (its mirror, E.9, which
    the paper rejects: no point of it is precise). `signal`: any function of a group and a turn; NaN never cuts.

    A group is *actionable* while a rollout of it is unfinished. When none is, there is nothing to save: the decision
    is "not cut" and says so, whatever the signal. (The paper's offline tables count such groups as cut.)
    """

    threshold: Amount = 0.12
    termination: Annotated[float, Between(above=0, most=1)] | None = None
    unended: Annotated[float, Between(0, below=1)] | None = None
    signal: Signal = prefix_edit_distance_mean

    def reached(self, group: GroupProgress) -> tuple[bool, str, dict[str, float]]:
        value, ended = self.signal(group, self.turn), termination_fraction(group, self.turn)
        name = self.signal.__name__
        numbers = {name: value, "threshold": self.threshold, "termination_fraction": ended}
        if value < self.threshold:
            return True, f"{name} below threshold", numbers
        if self.termination is not None and ended >= self.termination:
            return True, "termination fraction reached", numbers
        if self.unended is not None and ended <= self.unended:
            return True, "few have ended", numbers
        return False, f"{name} unknown" if math.isnan(value) else f"{name} not below threshold", numbers
