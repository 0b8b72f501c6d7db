"""`turntree audit`: from logs of any framework to all figures of the report; unknown ones are null, with the reason."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from turntree.audit import waste
from turntree.audit.comparison import NO_ITERATIONS, compare
from turntree.audit.config import AuditConfig
from turntree.audit.played import CHARACTERS, TOKENS, TURNS, play
from turntree.core.errors import InputError
from turntree.logs.groups import LoggedGroup
from turntree.logs.read import open_log

SCHEMA = "turntree.audit/3"
ASSUMPTIONS = (
    "A group has zero variance when its scored rewards differ by at most 1e-8; groups with fewer than two scored "
    "rollouts are censored and not part of any rate.",
    "Outcomes are those of the log: a policy trained on other groups would have had other outcomes.",
    "Unfiltered training is assumed to train on every scored rollout, also in zero-variance groups.",
    "GRESO is replayed with its authors' settings, over 20 seeds, asking only about iterations before the present one. "
    "Online another prompt takes the place of a skipped one: what it saves here is budget for others.",
    "Pivot selection takes whole tasks as states, because a log has no rollouts from inside its episodes: the first "
    "scored group of a task is its profile; only tasks that were mixed there, with a mean below lambda, are played "
    "again.",
    "The gate is measured on the groups that it was chosen on; cross-validation guards its precision, not its savings.",
    "Intervals of shares are for other tasks like these (95%, a task is the unit); decisions stay as they were.",
    "Rollouts that look like failures are suspected by their texts and endings; no figure but those of the suspicion "
    "leaves them out.",
    "Savings in generation are turns and tokens not generated; prompt and observation tokens are not in rollout logs.",
)


def run_audit(paths: Sequence[Path], config: AuditConfig) -> dict[str, Any]:
    """The audit, with the `log`: what was read and dropped, and its framework's filter."""
    log = open_log(paths, config.log_format)
    try:
        result = audit(log, config)
    except InputError as error:
        lost = ", ".join(f"{count} {why} (first: {log.report.first[why]})" for why, count in log.report.dropped.items())
        if not lost or error.path is not None:
            raise
        raise InputError(f"{error.problem}; dropped: {lost}", path=paths[0], hint=error.hint) from error
    setting = log.format.filter_setting
    return {**result, "log": {"paths": list(map(str, paths)), "filter_setting": setting, **log.report.to_json()}}


def audit(groups: Iterable[LoggedGroup], config: AuditConfig) -> dict[str, Any]:
    """All figures as a JSON value. Raises `InputError` where no group has two scored rollouts."""
    played = play(groups, success=config.success)
    if not played.scored_N.any():
        raise InputError(
            f"none of the {len(played.groups)} groups has two scored rollouts",
            hint="an audit compares rollouts of one prompt; log several of each",
        )
    result = {
        "schema": SCHEMA,
        "success": config.success,
        "counts": waste.counts(played),
        **waste.overall(played),
        "failures": waste.failures(played, config.success),
        "cost": waste.cost(played),
        "over_time": waste.over_time(played),
        "by_task_type": waste.by_task_type(played),
        "dilution": waste.dilution(played),
        **compare(played, config.success),
        "tasks": waste.never_teaching(played, config.epochs),
        "assumptions": list(ASSUMPTIONS),
    }
    result["absent"] |= played.absent | ({} if played.has_iterations else {"over_time": NO_ITERATIONS})
    return {"headline": headline(result), **result}


def headline(result: dict[str, Any]) -> str:
    """The first sentence of the report."""
    told = f"{result['zero_variance_rate']:.0%} of your groups bought no gradient"
    words = {TOKENS: "generated tokens", TURNS: "turns", CHARACTERS: "generated text"}
    unit = next((unit for unit in (TOKENS, CHARACTERS, TURNS) if unit in result["cost"]), None)
    share = None if unit is None else result["cost"][unit]["zero_variance_share"]
    return f"{told}." if unit is None or share is None else f"{told}; they cost {share:.0%} of the {words[unit]}."
