"""Every remedy alone and together on one log, or why a remedy cannot be judged; and the gate that the log supports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np

from turntree.audit.played import TOKENS, TURNS, Played
from turntree.audit.remedies import GateCuts, PivotRule, Remedies, estimate, refill
from turntree.core.config import Between
from turntree.core.errors import ConfigError, InputError
from turntree.core.outcome import SUCCESS_REWARD, GroupOutcome, group_outcome
from turntree.decide.filters.dapo import DapoFilter
from turntree.decide.filters.greso import GresoConfig
from turntree.decide.gates.calibrate import operating_point
from turntree.decide.gates.divergence import PrefixDivergenceGate
from turntree.decide.gates.signals import SIGNALS
from turntree.decide.gates.table import progress_at, table_from_groups
from turntree.logs.groups import LoggedGroup

NO_ITERATIONS = "the log does not say in which iteration a group was played"


@dataclass(frozen=True, kw_only=True)
class AuditConfig:
    """The assumptions of an audit."""

    epochs: int = 3
    """Scored groups that a task needs before it can be listed as never teaching."""
    success: float = SUCCESS_REWARD
    """A reward from this on is a success."""
    pivot_threshold: float = 0.6
    """lambda_diff of the pivot selection."""
    precision_floor: float = 0.8
    """Least share of zero-variance groups among those that a recommended gate cuts."""
    gate_may_lose: Annotated[float, Between(0, 1)] = 0.1
    """Largest share of the groups with a gradient that a recommended gate may cut."""
    greso: GresoConfig = field(default_factory=GresoConfig)

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ConfigError("is below 1", field="epochs", hint="how many groups of a task are evidence")
        if not 0 < self.precision_floor < 1:
            raise ConfigError("must be between 0 and 1", field="precision_floor")


def compare(played: Played, config: AuditConfig) -> dict[str, Any]:
    """`remedies`: DAPO's filter, GRESO, the recommended gate and pivot selection, each alone; `gate_paper`: the gate at
    the paper's setting, which the data may not support; `together`: the first three, as an online run composes them;
    `together_with_pivots`: all four. A remedy is None where the log lacks what it needs; `absent` says what is missing.
    `overlap`: the savings that adding up DAPO, GRESO and the gate would count twice."""
    history, no_turns = _no_history(played), _no_turns(played)
    gate, told = (
        (None, no_turns) if no_turns else recommend(played, floor=config.precision_floor, may_lose=config.gate_may_lose)
    )
    greso = None if history else replace(config.greso, success=config.success)
    pivots = None if history else PivotRule(threshold=config.pivot_threshold)
    online = Remedies(
        greso=greso, gate=None if gate is None else cuts(played, gate), dapo=DapoFilter(success=config.success)
    )
    rules = {
        "dapo": Remedies(dapo=online.dapo),
        "greso": greso and Remedies(greso=greso),
        "gate": online.gate and Remedies(gate=online.gate),
        "gate_paper": None if no_turns else Remedies(gate=cuts(played, PAPER_GATE)),
        "pivots": pivots and Remedies(pivots=pivots),
        "together": online,
        "together_with_pivots": pivots and replace(online, pivots=pivots),
    }
    estimates = {name: None if rule is None else estimate(played, rule) for name, rule in rules.items()}
    return {
        "remedies": estimates,
        "refill": refill(played),
        "overlap": _overlap([estimates[name] for name in ("dapo", "greso", "gate")], estimates["together"] or {}),
        "gate": {
            "recommended": None if isinstance(told, str) else told,
            "refused": told if isinstance(told, str) else None,
            "paper": describe(PAPER_GATE),
        },
        "absent": {
            **({"greso": history, "pivots": history} if history else {}),
            **({"gate": told} if isinstance(told, str) else {}),
            **({"gate_paper": no_turns} if no_turns else {}),
        },
    }


def _overlap(parts: Sequence[dict[str, Any] | None], together: dict[str, Any]) -> dict[str, Any]:
    """By unit; None where a part is unknown."""

    def twice(saved: str, unit: str) -> float | None:
        values = [part[saved][unit] for part in parts if part is not None]
        union = together[saved][unit]
        return None if union is None or None in values else sum(values) - union

    return {
        saved: {unit: twice(saved, unit) for unit in together[saved]} for saved in ("rollout_saved", "training_saved")
    }


def _no_history(played: Played) -> str | None:
    """Why history predicts nothing here; None where it can."""
    if not played.has_iterations:
        return NO_ITERATIONS
    plays = {(group.task, group.iteration) for group in played.groups}
    return "no task comes back in a later iteration" if len(plays) == len({task for task, _ in plays}) else None


def _no_turns(played: Played) -> str | None:
    if not played.has_turns:
        return f"{played.absent[TURNS]}: a gate compares the actions of each turn"
    if played.horizon < 2:
        return "every rollout has one turn, so nothing can be stopped mid-rollout"
    return None


# which groups a gate would have stopped, and what they spent after its turn

PAPER_GATE = PrefixDivergenceGate()
CONFIDENCE = 0.95  # of the lower bound of a recommended gate's precision
LATEST = 2000  # groups that a gate is calibrated on: those of the latest policy, and few enough to calibrate in seconds


def recommend(
    played: Played, *, floor: float, may_lose: float
) -> tuple[PrefixDivergenceGate | None, dict[str, Any] | str]:
    """The gate that the latest groups of the log support, with the measurements of calibration; else None and why.

    Late in a run most groups have zero variance, and even a gate that cuts nearly all groups is precise. So the gate
    may also cut at most a share `may_lose` of the groups with a gradient.
    """
    latest = [played.groups[i].logged() for i in np.flatnonzero(played.scored_N)[-LATEST:]]
    try:
        table = table_from_groups(latest, source="the log")
    except InputError as error:  # a gate compares rollouts that began independently, and no group has two
        return None, str(error)
    chosen, refused = operating_point(table, floor=floor, confidence=CONFIDENCE)
    if chosen is None:
        return None, refused or ""
    gate = PrefixDivergenceGate(
        turn=chosen["turn"],
        threshold=chosen["threshold"],
        termination=chosen["termination"],
        signal=SIGNALS[chosen["signal"]],
    )
    lost = _share_lost(latest, gate)
    if lost > may_lose:
        return None, (
            f"{chosen['rule']} has the precision, but would also cut {lost:.0%} of the groups with a gradient, more "
            f"than {may_lose:.0%}; where {table.zero_variance_N.mean():.0%} have none, precision is easy to reach"
        )
    kept = ("rule", "signal", "turn", "threshold", "termination", "actionable", "saved")
    told = {key: chosen[key] for key in kept}
    return gate, {
        **told,
        "mixed_lost_share": lost,
        "groups": len(table.tasks),
        "floor": floor,
        "confidence": CONFIDENCE,
    }


def _share_lost(groups: list[LoggedGroup], gate: PrefixDivergenceGate) -> float:
    mixed = [group for group in groups if group_outcome(group.rewards) is GroupOutcome.MIXED]
    horizon = max(len(rollout.actions) for group in groups for rollout in group.rollouts)
    return sum(_is_cut(group, gate, horizon) for group in mixed) / len(mixed) if mixed else 0.0


def cuts(played: Played, gate: PrefixDivergenceGate) -> GateCuts:
    """Ask the gate about every group as it was after `gate.turn` turns.

    Censored rollouts (they were not there) and forked ones (they share their prefix) are not shown to the gate, but
    what they spent later counts as saved too."""
    units = [unit for unit in (TOKENS, TURNS) if unit in played.spent] if played.knows_turn_tokens else [TURNS]
    cut_N = np.zeros(len(played.groups), dtype=bool)
    after = {unit: np.zeros(len(played.groups), dtype=np.int64) for unit in units}
    for i, compact in enumerate(played.groups):
        group = compact.logged()
        cut_N[i] = _is_cut(group, gate, played.horizon)
        for unit in units:
            after[unit][i] = _after(group, gate.turn, unit)
    return GateCuts(turn=gate.turn, cut_N=cut_N, after=after)


def _is_cut(group: LoggedGroup, gate: PrefixDivergenceGate, horizon: int) -> bool:
    shown = [rollout for rollout in group.rollouts if not (rollout.reward is None or rollout.forked or rollout.refill)]
    decision = gate.decide(progress_at(group, shown, gate.turn, horizon)) if len(shown) > 1 else None
    return decision is not None and decision.cut


def _after(group: LoggedGroup, turn: int, unit: str) -> int:
    if unit == TURNS:
        return sum(max(0, len(rollout.actions) - turn) for rollout in group.rollouts)
    return sum(sum((rollout.turn_tokens or ())[turn:]) for rollout in group.rollouts)


def describe(gate: PrefixDivergenceGate) -> dict[str, Any]:
    """The gate in plain values."""
    return {
        "turn": gate.turn,
        "threshold": gate.threshold,
        "signal": gate.signal.__name__,
        "termination": gate.termination,
    }
