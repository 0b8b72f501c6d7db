"""Where the budget went: groups without a gradient, overall, over time, and in the loss."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from turntree.auditing.played import TOKENS, Played
from turntree.core.outcome import GroupOutcome
from turntree.observe.statistics import wilson

K = TypeVar("K", int, str)


def counts(played: Played) -> dict[str, Any]:
    """Groups by outcome and rollouts by whether they were scored; both add up."""
    sizes = Counter(len(group.rewards) for group in played.groups)
    outcomes = Counter(played.outcomes)
    return {
        "groups": len(played.groups),
        **{outcome.value: outcomes[outcome] for outcome in GroupOutcome},
        "rollouts": sum(size * times for size, times in sizes.items()),
        "censored_rollouts": sum(played.censored.values()),
        "censored_by_reason": played.censored,
        "tasks": len({group.task for group in played.groups}),
        "group_sizes": dict(sorted(sizes.items())),
    }


def rate(zero_variance: int, scored: int) -> dict[str, Any]:
    """The share of scored groups with zero variance, with its 95% Wilson interval; None without a scored group."""
    low, high = wilson(zero_variance, scored)
    share = zero_variance / scored if scored else None
    return {"zero_variance_rate": share, "low": low, "high": high, "zero_variance": zero_variance, "scored": scored}


def overall(played: Played) -> dict[str, Any]:
    return rate(int(played.zero_variance_N.sum()), int(played.scored_N.sum()))


def cost(played: Played) -> dict[str, Any]:
    """For every unit that the log has: spent in total, by the outcome of the group, and on zero-variance groups."""
    masks = {one: np.array([outcome is one for outcome in played.outcomes], dtype=bool) for one in GroupOutcome}
    return {
        unit: {
            "total": int(spent.sum()),
            **{outcome.value: int(spent[mask].sum()) for outcome, mask in masks.items()},
            "zero_variance": int(spent[played.zero_variance_N].sum()),
            "zero_variance_share": _share(spent[played.zero_variance_N].sum(), spent.sum()),
        }
        for unit, spent in played.spent.items()
    }


def over_time(played: Played) -> list[dict[str, Any]] | None:
    """One row per iteration; None where the log has no iterations."""
    if not played.has_iterations:
        return None
    rows = _groups_by([group.iteration for group in played.groups])
    return [_row(played, rows[one]) | {"iteration": one} for one in sorted(rows)]


def _groups_by(keys: Sequence[K | None]) -> dict[K, list[int]]:
    """The numbers of the groups with each key, in one pass. Groups without a key are left out."""
    rows: dict[K, list[int]] = defaultdict(list)
    for i, key in enumerate(keys):
        if key is not None:
            rows[key].append(i)
    return rows


def _row(played: Played, rows: list[int]) -> dict[str, Any]:
    flat_N = played.zero_variance_N[rows]
    outcomes = Counter(played.outcomes[i] for i in rows)
    spent = {unit: _share(values[rows][flat_N].sum(), values[rows].sum()) for unit, values in played.spent.items()}
    return {
        **rate(int(flat_N.sum()), int(played.scored_N[rows].sum())),
        **{outcome.value: outcomes[outcome] for outcome in GroupOutcome},
        "spent_share": spent,
    }


def dilution(played: Played) -> dict[str, Any]:
    """The share of the loss that is zero: by group, by rollout and by token of the scored rollouts.

    The gradient of a loss that is a mean over all of them is smaller by the factor 1 - dilution. `amplification`,
    1 / (1 - dilution), is the factor gained by leaving the zero-variance groups out of the mean. A loss with a constant
    normaliser does not change.
    """
    scored, flat = played.scored_N, played.zero_variance_N
    sizes = np.array([len(group.scored) for group in played.groups], dtype=np.int64)
    shares = {
        "by_group": _share(flat.sum(), scored.sum()),
        "by_rollout": _share(sizes[flat].sum(), sizes[scored].sum()),
        "by_token": _share(played.trained[TOKENS][flat].sum(), played.trained[TOKENS][scored].sum())
        if TOKENS in played.trained
        else None,
    }
    return {
        **shares,
        "amplification": {key: None if s is None or s == 1 else 1 / (1 - s) for key, s in shares.items()},
    }


def by_task_type(played: Played) -> dict[str, Any]:
    """The rate of every task type, where the log has them."""
    rows = _groups_by([group.task_type for group in played.groups])
    return {kind: _row(played, rows[kind]) for kind in sorted(rows)}


def _share(part: Any, whole: Any) -> float | None:
    return float(part) / float(whole) if whole else None
