"""The gate of Selective Rollout: stop a group whose rollouts have converged on one sequence of actions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from turntree.core.protocols import Gate, GateDecision, GroupProgress
from turntree.decide.gates.signals import (
    Signal,
    edit_distances,
    prefix_edit_distance_mean,
    prefixes,
    termination_fraction,
)

Bounds = Callable[[GroupProgress, int, int], tuple[float, float]]


def edit_distance_bounds(group: GroupProgress, turn: int, reached: int) -> tuple[float, float]:
    """The least and the largest `prefix_edit_distance_mean` at `turn` that the first `reached` turns allow.

    With t turns of two sequences known and both K long in the end, lev(t) <= lev(K) <= lev(t) + K - t: an alignment of
    the prefixes extends by K - t substitutions, and one of the whole, cut where it leaves the prefixes, costs no less
    than it saves (triangle inequality). Equal continuations reach the lower bound, all-different ones of two unfinished
    rollouts the upper. A pair of ended rollouts is known exactly.
    """
    size = len(group.actions)
    if size < 2:
        return 0.0, 0.0
    low = edit_distances(prefixes(group, reached))
    high = low + (turn - reached) * (1 - np.eye(size, dtype=np.int64))
    ended = np.flatnonzero(group.finished)
    if len(ended) > 1:
        padded = prefixes(group, turn)
        low[np.ix_(ended, ended)] = high[np.ix_(ended, ended)] = edit_distances([padded[index] for index in ended])
    pairs = size * (size - 1) * turn
    return int(low.sum()) / pairs, int(high.sum()) / pairs


@dataclass(frozen=True, kw_only=True)
class PrefixDivergenceGate(Gate):
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

    @property
    def first_look(self) -> int:
        return self.turn if self.bounds is None else 1

    @property
    def last_look(self) -> int:
        return self.turn

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
    """The decision for a group that no gate may cut, because nothing is left to save or nothing can be compared."""
    if all(group.finished):
        return GateDecision(cut=False, reason="nothing left to save", numbers={}, final=True)
    if len(group.actions) < 2:
        return GateDecision(cut=False, reason="fewer than two rollouts", numbers={}, final=True)
    return None
