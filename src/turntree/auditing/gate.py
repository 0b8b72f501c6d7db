"""A gate on logged groups: which groups it would have stopped, and what they spent after its turn."""

from __future__ import annotations

from typing import Any

import numpy as np

from turntree.auditing.played import TOKENS, TURNS, Played
from turntree.auditing.remedies import GateCuts
from turntree.core.errors import InputError
from turntree.core.outcome import GroupOutcome, group_outcome
from turntree.gates.calibrate import CalibrationConfig, calibrate
from turntree.gates.divergence import PrefixDivergenceGate
from turntree.gates.signals import SIGNALS
from turntree.gates.table import progress_at, table_from_groups
from turntree.logs.groups import LoggedGroup

PAPER_GATE = PrefixDivergenceGate()
LATEST = 2000  # groups that a gate is calibrated on: those of the latest policy, and few enough to calibrate in seconds


def recommend(
    played: Played, *, floor: float, may_lose: float
) -> tuple[PrefixDivergenceGate | None, dict[str, Any] | str]:
    """The gate that the latest groups of the log support, with the measurements of calibration; else None and why.

    Late in a run most groups have zero variance, and even a gate that cuts nearly all groups is precise. So the gate
    may also cut at most a share `may_lose` of the groups with a gradient.
    """
    latest = [played.groups[i].logged() for i in np.flatnonzero(played.scored_N)[-LATEST:]]
    config = CalibrationConfig(floor=floor, repeats=5, resamples=200)
    try:
        table = table_from_groups(latest, source="the log")
    except InputError as error:  # a gate compares rollouts that began independently, and no group has two
        return None, str(error)
    calibrated = calibrate(table, config)
    chosen = calibrated["recommended"]
    if chosen is None:
        return None, calibrated["refused"]["reason"]
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
            f"than {may_lose:.0%}; where {calibrated['zero_variance_rate']:.0%} have none, precision is easy to reach"
        )
    kept = ("rule", "signal", "turn", "threshold", "termination", "actionable", "saved", "intervals")
    told = {key: chosen[key] for key in kept}
    return gate, {
        **told,
        "mixed_lost_share": lost,
        "groups": calibrated["groups"],
        "floor": floor,
        "confidence": config.confidence,
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
