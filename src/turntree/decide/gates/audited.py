"""The precision of a gate while it is on, from would-be cuts that run on; and its control, cuts at random."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from turntree.core import seeds
from turntree.core.config import Share
from turntree.core.errors import ConfigError
from turntree.core.protocols import Gate, GateDecision, GroupProgress
from turntree.decide.gates.divergence import GateAtTurn, PrefixDivergenceGate
from turntree.decide.gates.signals import PRINTED, SIGNALS, prefix_edit_distance_mean
from turntree.run.means import wilson


def build_gate(
    *,
    seed: int,
    turn: int = 10,
    threshold: float = 0.12,
    termination: float | None = None,
    unended: float | None = None,
    signal: str = prefix_edit_distance_mean.__name__,
    audit: float = 0.0,
) -> Gate:
    """The gate of the paper; the default is its operating point, d_10 < 0.12. That is calibrated for one model, group
    size and environment; `turntree gate calibrate` says whether your own rollouts support a point.

    Args:
        turn: Look at the group at this turn.
        threshold: Stop the group when the divergence of its rollouts is below this.
        termination: The OR rule: stop also from this share of ended rollouts on.
        unended: Its mirror: stop also up to this share of ended rollouts.
        signal: What is below the threshold: a signal of `turntree gate calibrate`.
        audit: Share of would-be cuts that are not cut, to measure precision.
    """
    if not 0 <= audit <= 1:
        raise ConfigError(f"must be in [0, 1], not {audit}", field="audit")
    known = {**SIGNALS, **PRINTED}
    if signal not in known:
        raise ConfigError(f"is {signal!r}", field="signal", hint=f"use one of {', '.join(known)}")
    gate = PrefixDivergenceGate(
        turn=turn, threshold=threshold, termination=termination, unended=unended, signal=known[signal]
    )
    return AuditedGate(gate=gate, share=audit, seed=seed) if audit else gate


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

    @property
    def first_look(self) -> int:
        return self.gate.first_look

    def decide(self, group: GroupProgress) -> GateDecision | None:
        decision = self.gate.decide(group)
        if decision is None or not decision.cut:
            return decision
        draw = _draw(self.seed, "gate audit", group)
        audited = draw < self.share
        numbers = {**decision.numbers, "audit_share": self.share}
        return replace(decision, cut=not audited, audited=audited, audit_share=self.share, final=True, numbers=numbers)


class GateMonitor:
    """Takes every finished group that the gate decided on once: the decision and the group's outcome.

    A cut group has no outcome (None). An audited one has, unless faults censored it; it was drawn with a known
    probability whatever its outcome, so that weighting by 1 / probability gives unbiased figures about the groups that
    the gate would cut. For the loss such a group counts once, like any other.
    """

    def __init__(self) -> None:
        self.told: list[tuple[GateDecision, bool | None]] = []  # with the zero variance of each group

    def record(self, decision: GateDecision, zero_variance: bool | None) -> None:
        """`zero_variance` is None for groups without an outcome. Raises ValueError for a cut group that has one."""
        if decision.cut and zero_variance is not None:
            raise ValueError("a cut group is censored: it has no outcome")
        self.told.append((decision, zero_variance))

    def precision(self) -> dict[str, Any] | None:
        """Of the groups that the gate would cut, the share without variance, with its 95% Wilson interval at the
        effective number of audits; None without audits."""
        would_be = [(one, zero) for one, zero in self.told if one.cut or one.audited]
        audits = [(1 / one.audit_share, zero) for one, zero in would_be if zero is not None]
        if not audits:
            return None
        weights = [weight for weight, _ in audits]
        total = math.fsum(weights)
        value = math.fsum(weight for weight, zero in audits if zero) / total
        effective = total**2 / math.fsum(weight**2 for weight in weights)
        low, high = wilson(value * effective, effective)
        return {"value": value, "low": low, "high": high, "audits": len(audits), "would_be_cuts": len(would_be)}


@dataclass(frozen=True, kw_only=True)
class RandomGate(GateAtTurn):
    """The control of an experiment: cuts groups that still run at a turn, whatever they do.

    Args:
        turn: The turn at which groups are cut.
        rate: The share of the groups that reach it.
    """

    rate: Share = 0.2
    seed: int = 0

    def reached(self, group: GroupProgress) -> tuple[bool, str, dict[str, float]]:
        cut = _draw(self.seed, "random gate", group) < self.rate
        return cut, "drawn to be cut" if cut else "drawn to go on", {"rate": self.rate}


def _draw(seed: int, what: str, group: GroupProgress) -> float:
    """A draw in [0, 1) that differs between groups, also where a task comes twice in one iteration."""
    again = (group.occurrence,) if group.occurrence else ()
    return seeds.generator(seed, what, group.task_id, group.iteration, *again).random()
