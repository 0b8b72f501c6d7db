"""The precision of a gate online, from the would-be cuts that were audited, and an alarm for drift."""

from __future__ import annotations

import math
from dataclasses import dataclass

from turntree.core.protocols import GateDecision
from turntree.run.statistics import wilson


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """`floor`: the precision that the gate is meant to have. `drop`: the alarm is tuned to a fall by that much below
    it. `false_alarms`: while the precision keeps the floor, at least 1/`false_alarms` audits pass on average until a
    false alarm."""

    floor: float = 0.8
    drop: float = 0.2
    false_alarms: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.drop < self.floor < 1:
            raise ValueError(f"needs 0 < drop < floor < 1, not drop {self.drop}, floor {self.floor}")
        if not 0 < self.false_alarms < 1:
            raise ValueError(f"false_alarms must be in (0, 1), not {self.false_alarms}")


@dataclass(frozen=True, kw_only=True)
class OnlinePrecision:
    """`value` is None without audits. `low` and `high`: 95% Wilson interval at the effective number of audits."""

    value: float | None
    low: float
    high: float
    audits: int
    would_be_cuts: int


class GateMonitor:
    """Takes every finished group that the gate decided on once: the decision and the group's outcome.

    A cut group has no outcome (None). An audited one has, unless faults censored it; it was drawn with a known
    probability whatever its outcome, so that weighting by 1 / probability gives unbiased figures about the groups that
    the gate would cut. For the loss such a group counts once, like any other.
    """

    def __init__(self, config: MonitorConfig | None = None) -> None:
        self.config = config or MonitorConfig()
        self.evidence = 1.0
        self._audits: list[tuple[float, bool]] = []  # weight, zero variance
        self._cut = self._lost = 0

    def record(self, decision: GateDecision, zero_variance: bool | None) -> None:
        """`zero_variance` is None for groups without an outcome. Raises ValueError for a cut group that has one."""
        if decision.cut:
            if zero_variance is not None:
                raise ValueError("a cut group is censored: it has no outcome")
            self._cut += 1
        elif zero_variance is None:
            self._lost += decision.audited
        elif decision.audited:
            self._audits.append((1 / decision.audit_share, zero_variance))
            self._watch(zero_variance)

    @property
    def alarm(self) -> bool:
        """Whether the audits say that the precision has fallen below the floor."""
        return self.evidence >= 1 / self.config.false_alarms

    def precision(self) -> OnlinePrecision:
        """Of the groups that the gate would cut, the share without variance; audits weigh 1 / their probability."""
        weights = [weight for weight, _ in self._audits]
        total, cuts = math.fsum(weights), self._cut + self._lost + len(self._audits)
        if not weights:
            return OnlinePrecision(value=None, low=0.0, high=1.0, audits=0, would_be_cuts=cuts)
        value = math.fsum(weight for weight, zero in self._audits if zero) / total
        effective = total**2 / math.fsum(weight**2 for weight in weights)
        low, high = wilson(value * effective, effective)
        return OnlinePrecision(value=value, low=low, high=high, audits=len(weights), would_be_cuts=cuts)

    def _watch(self, zero_variance: bool) -> None:
        """A CUSUM of likelihood ratios, floor - drop against floor. While precision >= floor each ratio is at most 1 on
        average, so the mean number of audits until it exceeds 1/a is at least 1/a (Shin, Ramdas and Rinaldo 2024)."""
        floor, fallen = self.config.floor, self.config.floor - self.config.drop
        ratio = fallen / floor if zero_variance else (1 - fallen) / (1 - floor)
        self.evidence = max(1.0, self.evidence) * ratio
