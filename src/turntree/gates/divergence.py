"""The gate of Selective Rollout: stop a group whose rollouts have converged on one sequence of actions."""

from __future__ import annotations

import math
from dataclasses import dataclass

from turntree.core.protocols import GateDecision, GroupProgress
from turntree.gates.bounds import Bounds
from turntree.gates.signals import Signal, prefix_edit_distance_mean, termination_fraction

Numbers = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class PrefixDivergenceGate:
    """Cuts a group at turn `turn` if `signal < threshold` (Eq. 2), strictly; the defaults are the paper's point.

    `termination`: cut also where at least that share of the rollouts has ended before `turn` (the OR rule, Eq. 3);
    with `threshold=0` it is the only clause. `signal`: any function of a group and a turn; NaN never cuts. `bounds`
    of that signal (`edit_distance_bounds` for d_K): decide before `turn` where they leave only one answer; the rule
    itself does not change.

    A group is *actionable* while a rollout of it is unfinished. When none is, there is nothing to save: the decision
    is "not cut" and says so, whatever the signal. (The paper's offline tables count such groups as cut.)
    """

    turn: int = 10
    threshold: float = 0.12
    termination: float | None = None
    signal: Signal = prefix_edit_distance_mean
    bounds: Bounds | None = None

    def __post_init__(self) -> None:
        if self.turn < 1:
            raise ValueError(f"turn must be at least 1, not {self.turn}")
        if not 0 <= self.threshold < math.inf:
            raise ValueError(f"threshold must be a number of at least 0, not {self.threshold}")
        if self.termination is not None and not 0 < self.termination <= 1:
            raise ValueError(f"termination must be in (0, 1], not {self.termination}")

    def decide(self, group: GroupProgress) -> GateDecision | None:
        hopeless = unable(group)
        if hopeless is not None:
            return hopeless
        reached = turns_reached(group)
        return self._decide_at_turn(group) if reached >= self.turn else self._decide_early(group, reached)

    def _decide_at_turn(self, group: GroupProgress) -> GateDecision:
        value = self.signal(group, self.turn)
        ended = termination_fraction(group, self.turn)
        name = self.signal.__name__
        numbers = {"turn": float(self.turn), name: value, "threshold": self.threshold, "termination_fraction": ended}
        if value < self.threshold:
            return GateDecision(cut=True, reason=f"{name} below threshold", numbers=numbers, final=True)
        if self.termination is not None and ended >= self.termination:
            return GateDecision(cut=True, reason="termination fraction reached", numbers=numbers, final=True)
        if math.isnan(value):
            numbers.pop(name)
            return GateDecision(cut=False, reason=f"{name} unknown", numbers=numbers, final=True)
        return GateDecision(cut=False, reason=f"{name} not below threshold", numbers=numbers, final=True)

    def _decide_early(self, group: GroupProgress, reached: int) -> GateDecision | None:
        if self.bounds is None:
            return None
        low, high = self.bounds(group, self.turn, reached)
        ended = termination_fraction(group, self.turn)  # can only grow: up to all that have not passed the turn
        may_end = sum(len(actions) < self.turn for actions in group.actions) / len(group.actions)
        enough = self.termination is not None and ended >= self.termination
        numbers = {"turn": float(reached), "low": low, "high": high, "threshold": self.threshold}
        numbers["termination_fraction"] = ended
        if high < self.threshold or enough:
            return GateDecision(cut=True, reason="settled early: will converge", numbers=numbers, final=True)
        if low >= self.threshold and (self.termination is None or may_end < self.termination):
            return GateDecision(cut=False, reason="settled early: cannot converge", numbers=numbers, final=True)
        return None


def turns_reached(group: GroupProgress) -> int:
    """How many turns every unfinished rollout has completed. There must be one."""
    return min(len(actions) for actions, done in zip(group.actions, group.finished, strict=True) if not done)


def unable(group: GroupProgress) -> GateDecision | None:
    """The decision on a group that no gate may cut: nothing is left to save, or nothing can be compared."""
    if all(group.finished):
        return GateDecision(cut=False, reason="nothing left to save", numbers={}, final=True)
    if len(group.actions) < 2:
        return GateDecision(cut=False, reason="fewer than two rollouts", numbers={}, final=True)
    return None
