"""What DAPO's filter, GRESO, the gate and pivot selection would have saved and cost on the groups of a log.

The log is replayed iteration by iteration. A remedy sees only what it would have seen then: earlier outcomes (GRESO,
pivots), the first turns (gate), or the rewards of the finished group (DAPO). Outcomes stay as logged, because a log
cannot tell how the policy would have changed. Where several remedies would remove a group, the first to act has all the
savings, so that no token is saved twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """Which groups a gate stops at `turn`, and what they spent after it, by unit."""

    turn: int
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


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What each group would not have cost, by unit: its generation, and the training on its generated tokens. None
    where the log does not say what the cut groups spent after the gate's turn."""

    generation: dict[str, NDArray[Any] | None]
    training: dict[str, NDArray[Any]]


def saved(played: Played, removed: Removed, gate: GateCuts | None) -> Saved:
    gone = (removed.skipped_N | removed.cut_N | removed.dropped_N) & played.scored_N
    generation: dict[str, NDArray[Any] | None] = {}
    for unit, spent in played.spent.items():
        if gate is None:
            generation[unit] = spent * removed.skipped_N.astype(float)
        elif unit in gate.after:
            generation[unit] = spent * removed.skipped_N.astype(float) + gate.after[unit] * removed.cut_N
        else:
            generation[unit] = None
    return Saved(
        generation=generation,
        training={unit: trained * gone.astype(float) for unit, trained in played.trained.items()},
    )


def ledger(played: Played, removed: Removed, gate: GateCuts | None) -> dict[str, Any]:
    """Savings and losses of one replay. By unit: the generation that was avoided, and the training on generated tokens
    that was avoided. `mixed_lost`: groups with a gradient that were skipped or cut."""
    early, not_spent = removed.skipped_N | removed.cut_N, saved(played, removed, gate)
    return {
        "skipped": int(removed.skipped_N.sum()),
        "cut": int(removed.cut_N.sum()),
        "dropped": int(removed.dropped_N.sum()),
        "zero_variance_avoided": int((early & played.zero_variance_N).sum()),
        "mixed_lost": int((early & played.mixed_N).sum()),
        "rollout_saved": {unit: None if one is None else int(one.sum()) for unit, one in not_spent.generation.items()},
        "training_saved": {unit: int(one.sum()) for unit, one in not_spent.training.items()},
    }


def estimate(played: Played, remedies: Remedies) -> dict[str, Any]:
    """The mean ledger (over seeds where GRESO draws), with shares of what the log spent and their intervals over tasks.

    `precision`: of the scored groups that were skipped or cut, the share with zero variance.
    """
    replays = [replay(played, remedies, seed) for seed in range(SEEDS if remedies.greso is not None else 1)]
    rows = [ledger(played, removed, remedies.gate) for removed in replays]
    each = [saved(played, removed, remedies.gate) for removed in replays]
    mean: dict[str, Any] = {key: _mean([row[key] for row in rows]) for key in rows[0]}
    avoided, lost = mean["zero_variance_avoided"], mean["mixed_lost"]
    return {
        **mean,
        "rollout_saved_share": _shares(mean["rollout_saved"], played.spent),
        "rollout_saved_interval": _intervals([one.generation for one in each], played.spent, played.tasks_N),
        "training_saved_share": _shares(mean["training_saved"], played.trained),
        "training_saved_interval": _intervals([one.training for one in each], played.trained, played.tasks_N),
        "mixed_lost_share": share(lost, int(played.mixed_N.sum())),
        "precision": share(avoided, avoided + lost),
        "seeds": len(rows),
    }


def _intervals(
    each: Sequence[Mapping[str, NDArray[Any] | None]],
    of: dict[str, NDArray[np.int64]],
    tasks_N: NDArray[np.int64],
) -> dict[str, list[float] | None]:
    """By unit, of what was saved on average over the replays."""
    found: dict[str, list[float] | None] = {}
    for unit, whole in of.items():
        known = [part for one in each if (part := one[unit]) is not None]
        mean_N = np.mean(known, axis=0) if len(known) == len(each) else None
        found[unit] = None if mean_N is None else ratio_interval(mean_N, whole, tasks_N)
    return found


def refill(played: Played) -> dict[str, Any] | None:
    """The extra cost of DAPO's dynamic sampling to keep every batch full. Each dropped group is replaced by draws from
    the same log until one is mixed: 1 / (1 - zero-variance rate) groups on average, at the mean cost. None where no
    group is mixed."""
    scored, flat = int(played.scored_N.sum()), int(played.zero_variance_N.sum())
    if flat == scored:
        return None
    groups = flat / (1 - flat / scored)
    return {"groups": groups, "spent": {unit: groups * float(spent.mean()) for unit, spent in played.spent.items()}}


def _mean(values: Sequence[Any]) -> Any:
    """The mean of numbers, or of every entry of mappings; None where a value is unknown."""
    if isinstance(values[0], dict):
        return {key: _mean([value[key] for value in values]) for key in values[0]}
    return None if None in values else sum(values) / len(values)


def _shares(saved: dict[str, float | None], spent: dict[str, NDArray[np.int64]]) -> dict[str, float | None]:
    return {unit: share(value, int(spent[unit].sum())) for unit, value in saved.items()}
