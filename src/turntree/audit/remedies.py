"""What DAPO's filter, GRESO, the gate and pivot selection would have saved and cost on the groups of a log.

The log is replayed iteration by iteration. A remedy sees only what it would have seen then: earlier outcomes (GRESO,
pivots), the first turns (gate), or the rewards of the finished group (DAPO). Outcomes stay as logged, because a log
cannot tell how the policy would have changed. Where several remedies would remove a group, the first to act has all the
savings, so that no token is saved twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turntree.audit.played import Played
from turntree.audit.waste import share
from turntree.decide.filters.greso import Greso, GresoConfig
from turntree.run.statistics import ratio_interval

SEEDS = 20


@dataclass(frozen=True, kw_only=True)
class GateCuts:
    """Which groups a gate stops, and what they spent after its turn, by unit."""

    cut_N: NDArray[np.bool_]
    after: dict[str, NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True)
class Remedies:
    """Which remedies act, in this order: pivots and GRESO before a group, the gate during it, DAPO after it.

    `pivots` is the threshold of a selection before training, with whole tasks as states: the first scored group of a
    task is its profile (played in full, and paid for); later groups are played only if it was mixed with a mean below
    the threshold (PivotRL, Eq. 5). A profile is never renewed. `dapo` drops finished groups of zero variance."""

    pivots: float | None = None
    greso: GresoConfig | None = None
    gate: GateCuts | None = None
    dapo: bool = False


@dataclass(frozen=True, kw_only=True)
class Removed:
    """What became of each group: masks that exclude each other."""

    skipped_N: NDArray[np.bool_]  # never started
    cut_N: NDArray[np.bool_]  # stopped at the gate's turn
    dropped_N: NDArray[np.bool_]  # finished, kept out of the loss


def replay(played: Played, remedies: Remedies, seed: int = 0) -> Removed:
    """Every group once, in log order. A group that was not played is not in any history; a cut one is there as
    censored."""
    size = len(played.groups)
    skipped, cut, dropped = (np.zeros(size, dtype=bool) for _ in range(3))
    greso = None if remedies.greso is None else Greso(replace(remedies.greso, seed=seed))
    profiles: dict[str, bool] = {}  # task -> whether its profile made it a pivot
    for iteration, members in groupby(range(size), key=lambda i: played.groups[i].iteration or 0):
        rows = list(members)
        for i in rows:  # all decisions of an iteration come before its outcomes
            task = played.groups[i].task
            skipped[i] = not profiles.get(task, True) or (greso is not None and greso.skip(task, iteration) is not None)
        for i in rows:
            if skipped[i]:
                continue
            cut[i] = remedies.gate is not None and bool(remedies.gate.cut_N[i])
            dropped[i] = remedies.dapo and not cut[i] and played.zero_variance_N[i]
            group = played.groups[i]
            if greso is not None:
                greso.record(group.task, () if cut[i] else group.rewards)
            if remedies.pivots is not None and not cut[i] and played.scored_N[i]:
                hard = sum(group.scored) / len(group.scored) < remedies.pivots
                profiles.setdefault(group.task, bool(played.mixed_N[i]) and hard)
        if greso is not None:
            greso.end_iteration()
    return Removed(skipped_N=skipped, cut_N=cut, dropped_N=dropped)


def estimate(played: Played, remedies: Remedies) -> dict[str, Any]:
    """What was removed, saved and lost, on average over seeds where GRESO draws. By unit: the generation that was not
    done (None where the log does not say what cut groups spent after the gate's turn) and the training on generated
    tokens, with shares of what the log spent and their intervals over tasks. `mixed_lost`: groups with a gradient that
    were skipped or cut; `precision`: of the scored groups that were, the share with zero variance."""
    each = [replay(played, remedies, seed) for seed in range(SEEDS if remedies.greso is not None else 1)]
    skipped_N = np.mean([one.skipped_N for one in each], axis=0)
    cut_N = np.mean([one.cut_N for one in each], axis=0)
    dropped_N = np.mean([one.dropped_N for one in each], axis=0)
    early_N = skipped_N + cut_N
    after = dict.fromkeys(played.spent, 0) if remedies.gate is None else remedies.gate.after
    generation = {
        unit: spent * skipped_N + after[unit] * cut_N if unit in after else None for unit, spent in played.spent.items()
    }
    gone_N = (early_N + dropped_N) * played.scored_N
    avoided, lost = float(early_N[played.zero_variance_N].sum()), float(early_N[played.mixed_N].sum())
    return {
        "skipped": float(skipped_N.sum()),
        "cut": float(cut_N.sum()),
        "dropped": float(dropped_N.sum()),
        "zero_variance_avoided": avoided,
        "mixed_lost": lost,
        **_saved("rollout", generation, played.spent, played.tasks_N),
        **_saved("training", {u: one * gone_N for u, one in played.trained.items()}, played.trained, played.tasks_N),
        "mixed_lost_share": share(lost, int(played.mixed_N.sum())),
        "precision": share(avoided, avoided + lost),
        "seeds": len(each),
    }


def _saved(
    what: str,
    saved: Mapping[str, NDArray[Any] | None],
    spent: Mapping[str, NDArray[np.int64]],
    tasks_N: NDArray[np.int64],
) -> dict[str, Any]:
    """By unit: the sum, its share of what was spent, and that share's interval over tasks."""
    sums = {unit: None if one is None else float(one.sum()) for unit, one in saved.items()}
    return {
        f"{what}_saved": sums,
        f"{what}_saved_share": {unit: share(value, int(spent[unit].sum())) for unit, value in sums.items()},
        f"{what}_saved_interval": {
            unit: None if one is None else ratio_interval(one, spent[unit], tasks_N) for unit, one in saved.items()
        },
    }


def refill(played: Played) -> dict[str, Any] | None:
    """The extra cost of DAPO's dynamic sampling to keep every batch full. Each dropped group is replaced by draws from
    the same log until one is mixed: 1 / (1 - zero-variance rate) groups on average, at the mean cost. None where no
    group is mixed."""
    scored, flat = int(played.scored_N.sum()), int(played.zero_variance_N.sum())
    if flat == scored:
        return None
    groups = flat / (1 - flat / scored)
    return {"groups": groups, "spent": {unit: groups * float(spent.mean()) for unit, spent in played.spent.items()}}
