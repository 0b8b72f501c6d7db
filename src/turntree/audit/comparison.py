"""Every remedy alone and together on one log, or why a remedy cannot be judged; and the gate that the log supports."""

from __future__ import annotations

from typing import Any

import numpy as np

from turntree.audit.played import TOKENS, TURNS, Played
from turntree.audit.remedies import GateCuts, Remedies, estimate, refill
from turntree.core.errors import InputError
from turntree.core.outcome import GroupOutcome, group_outcome
from turntree.decide.filters.greso import GresoConfig
from turntree.decide.gates.calibrate import operating_point
from turntree.decide.gates.divergence import PrefixDivergenceGate
from turntree.decide.gates.signals import SIGNALS
from turntree.decide.gates.table import progress_at, shown_at, table_from_groups
from turntree.logs.groups import LoggedGroup

NO_ITERATIONS = "the log does not say in which iteration a group was played"


PIVOT_THRESHOLD = 0.6  # lambda_diff of the pivot selection
PRECISION_FLOOR = 0.8  # least share of zero-variance groups among those that a recommended gate cuts
GATE_MAY_LOSE = 0.1  # largest share of the groups with a gradient that a recommended gate may cut


def compare(played: Played, success: float) -> dict[str, Any]:
    """`remedies`: DAPO's filter, GRESO, the recommended gate and pivot selection, each alone; `gate_paper`: the gate at
    the paper's setting, which the data may not support; `together`: the first three, as an online run composes them. A
    remedy is None where the log lacks what it needs; `absent` says what is missing."""
    history, no_turns = _no_history(played), _no_turns(played)
    gate, found = (None, no_turns) if no_turns else recommend(played)
    online = Remedies(
        greso=None if history else GresoConfig(success=success),
        gate=None if gate is None else cuts(played, gate),
        dapo=True,
    )
    rules = {
        "dapo": Remedies(dapo=True),
        "greso": online.greso and Remedies(greso=online.greso),
        "gate": online.gate and Remedies(gate=online.gate),
        "gate_paper": None if no_turns else Remedies(gate=cuts(played, PAPER_GATE)),
        "pivots": None if history else Remedies(pivots=PIVOT_THRESHOLD),
        "together": online,
    }
    refused = found if isinstance(found, str) else None
    absent = {"greso": history, "pivots": history, "gate": refused, "gate_paper": no_turns}
    return {
        "remedies": {name: None if rule is None else estimate(played, rule) for name, rule in rules.items()},
        "refill": refill(played),
        "gate": {
            "recommended": None if refused else found,
            "refused": refused,
            "paper": {
                "turn": PAPER_GATE.turn,
                "threshold": PAPER_GATE.threshold,
                "signal": PAPER_GATE.signal.__name__,
                "termination": PAPER_GATE.termination,
            },
        },
        "absent": {name: reason for name, reason in absent.items() if reason},
    }


def _no_history(played: Played) -> str | None:
    """Why history predicts nothing here; None where it can."""
    if not played.has_iterations:
        return NO_ITERATIONS
    plays = {(group.task, group.iteration) for group in played.groups}
    return "no task comes back in a later iteration" if len(plays) == len({task for task, _ in plays}) else None


def _no_turns(played: Played) -> str | None:
    if TURNS not in played.spent:
        return f"{played.absent[TURNS]}: a gate compares the actions of each turn"
    if played.horizon < 2:
        return "every rollout has one turn, so nothing can be stopped mid-rollout"
    return None


# which groups a gate would have stopped, and what they spent after its turn

PAPER_GATE = PrefixDivergenceGate()
CONFIDENCE = 0.95  # of the lower bound of a recommended gate's precision
LATEST = 2000  # groups that a gate is calibrated on: those of the latest policy, and few enough to calibrate in seconds


def recommend(played: Played) -> tuple[PrefixDivergenceGate | None, dict[str, Any] | str]:
    """The gate that the latest groups of the log support, with the measurements of calibration; else None and why.

    Late in a run most groups have zero variance, and even a gate that cuts nearly all groups is precise. So the gate
    may also cut at most a share `GATE_MAY_LOSE` of the groups with a gradient.
    """
    latest = [played.groups[i] for i in np.flatnonzero(played.scored_N)[-LATEST:]]
    try:
        table = table_from_groups(latest, source="the log")
    except InputError as error:  # a gate compares rollouts that began independently, and no group has two
        return None, str(error)
    chosen, refused = operating_point(table, floor=PRECISION_FLOOR, confidence=CONFIDENCE)
    if chosen is None:
        return None, refused or ""
    gate = PrefixDivergenceGate(
        turn=chosen["turn"],
        threshold=chosen["threshold"],
        termination=chosen["termination"],
        signal=SIGNALS[chosen["signal"]],
    )
    mixed = [group for group in latest if group_outcome(group.rewards) is GroupOutcome.MIXED]
    horizon = max(len(rollout.actions) for group in latest for rollout in group.rollouts)
    lost = sum(_is_cut(group, gate, horizon) for group in mixed) / len(mixed) if mixed else 0.0
    if lost > GATE_MAY_LOSE:
        return None, (
            f"{chosen['rule']} has the precision, but would also cut {lost:.0%} of the groups with a gradient, more "
            f"than {GATE_MAY_LOSE:.0%}; where {table.zero_variance_N.mean():.0%} have none, precision is easy to reach"
        )
    measured = ("rule", "signal", "turn", "threshold", "termination", "actionable", "saved")
    return gate, {
        **{key: chosen[key] for key in measured},
        "mixed_lost_share": lost,
        "groups": len(table.tasks),
        "floor": PRECISION_FLOOR,
        "confidence": CONFIDENCE,
    }


def cuts(played: Played, gate: PrefixDivergenceGate) -> GateCuts:
    """Ask the gate about every group as it was after `gate.turn` turns.

    Forked rollouts (they share their prefix) and those that a fault had ended by then are not shown to the gate, but
    what they spent later counts as saved too."""
    told = all(rollout.turn_tokens is not None for group in played.groups for rollout in group.rollouts)
    units = [unit for unit in (TOKENS, TURNS) if unit in played.spent] if told else [TURNS]
    cut_N = np.zeros(len(played.groups), dtype=bool)
    after = {unit: np.zeros(len(played.groups), dtype=np.int64) for unit in units}
    for i, group in enumerate(played.groups):
        cut_N[i] = _is_cut(group, gate, played.horizon)
        for unit in units:
            after[unit][i] = _after(group, gate.turn, unit)
    return GateCuts(cut_N=cut_N, after=after)


def _is_cut(group: LoggedGroup, gate: PrefixDivergenceGate, horizon: int) -> bool:
    shown = shown_at(group, gate.turn)
    decision = gate.decide(progress_at(group, shown, gate.turn, horizon)) if len(shown) > 1 else None
    return decision is not None and decision.cut


def _after(group: LoggedGroup, turn: int, unit: str) -> int:
    if unit == TURNS:
        return sum(max(0, len(rollout.actions) - max(turn, rollout.shared_turns)) for rollout in group.rollouts)
    return sum(sum((rollout.turn_tokens or ())[turn:]) for rollout in group.rollouts)
