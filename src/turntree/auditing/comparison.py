"""Every remedy alone and together on one log, or the reason why a remedy cannot be judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from turntree.auditing.gate import PAPER_GATE, cuts, describe, recommend
from turntree.auditing.played import TURNS, Played
from turntree.auditing.remedies import PivotRule, Remedies, estimate, refill
from turntree.core.config import Between
from turntree.core.errors import ConfigError
from turntree.core.outcome import SUCCESS_REWARD
from turntree.filters.dapo import DapoFilter
from turntree.filters.greso import GresoConfig

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
