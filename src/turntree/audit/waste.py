"""Where the budget went: groups without a gradient, overall, over time, in the loss, by task, and why: all right, all
wrong, or failures of the machine that counted as the lowest reward."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from turntree.audit.played import Played
from turntree.core.outcome import GroupOutcome, group_outcome
from turntree.logs.groups import LoggedRollout
from turntree.run.means import wilson
from turntree.run.statistics import clustered_wilson, ratio_interval

K = TypeVar("K", int, str)
LEAST_RATIO = 2.0  # a sign counts where it is this much more frequent among the lowest rewards than among the others


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


def rate(outcomes: Sequence[GroupOutcome], tasks_N: NDArray[np.int64]) -> dict[str, Any]:
    """The share of scored groups with zero variance, with Wilson's 95% interval over tasks; None without one."""
    flat_N = [float(outcome.zero_variance) for outcome in outcomes]
    scored_N = [float(outcome is not GroupOutcome.CENSORED) for outcome in outcomes]
    low, high = clustered_wilson(*(np.bincount(tasks_N, weights=groups_N).tolist() for groups_N in (flat_N, scored_N)))
    found = {"zero_variance_rate": share(sum(flat_N), sum(scored_N)), "low": low, "high": high}
    return found | {"zero_variance": int(sum(flat_N)), "scored": int(sum(scored_N))}


def overall(played: Played) -> dict[str, Any]:
    return rate(played.outcomes, played.tasks_N)


def cost(played: Played) -> dict[str, Any]:
    """For every unit that the log has: spent in total, by the outcome of the group, and on zero-variance groups."""
    masks = {one: np.array([outcome is one for outcome in played.outcomes], dtype=bool) for one in GroupOutcome}
    return {
        unit: {
            "total": int(spent.sum()),
            **{outcome.value: int(spent[mask].sum()) for outcome, mask in masks.items()},
            "zero_variance": int(spent[played.zero_variance_N].sum()),
            "zero_variance_share": share(spent[played.zero_variance_N].sum(), spent.sum()),
            "zero_variance_interval": ratio_interval(spent * played.zero_variance_N, spent, played.tasks_N),
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
    outcomes = [played.outcomes[i] for i in rows]
    spent = {unit: share(values[rows][flat_N].sum(), values[rows].sum()) for unit, values in played.spent.items()}
    return {
        **rate(outcomes, played.tasks_N[rows]),
        **{outcome.value: outcomes.count(outcome) for outcome in GroupOutcome},
        "spent_share": spent,
    }


def dilution(played: Played) -> dict[str, Any]:
    """The share of the rollouts in a loss whose terms are zero. The gradient of a mean over all of them is smaller by
    the factor 1 - share; `amplification` is what leaving them out would gain (nothing with a constant normaliser)."""
    sizes = np.array([len(group.scored) for group in played.groups], dtype=np.int64)
    diluted = share(sizes[played.zero_variance_N].sum(), sizes[played.scored_N].sum())
    return {"share": diluted, "amplification": None if diluted is None or diluted == 1 else 1 / (1 - diluted)}


def by_task_type(played: Played) -> dict[str, Any]:
    """The rate of every task type, where the log has them."""
    rows = _groups_by([group.task_type for group in played.groups])
    return {kind: _row(played, rows[kind]) for kind in sorted(rows)}


def share(part: Any, whole: Any) -> float | None:
    """None where nothing is known of the part, or the whole is nothing."""
    return None if part is None or not whole else float(part) / float(whole)


# tasks whose groups never have a gradient

SHOWN = 20


def never_teaching(played: Played, epochs: int) -> dict[str, Any]:
    """The tasks with at least `epochs` scored groups, all of zero variance; the costliest are listed.

    `expected_by_chance`: how many such tasks there would be if all tasks had the same share of mixed groups. Where far
    more are found, tasks differ, and history predicts.
    """
    by_task = _groups_by([group.task for group in played.groups])
    sizes = {task: int(played.scored_N[rows].sum()) for task, rows in by_task.items()}
    asked = [task for task, size in sizes.items() if size >= epochs]
    never = [task for task in asked if not played.mixed_N[by_task[task]].any()]
    groups = sum(sizes[task] for task in asked)
    flat = sum(int(played.zero_variance_N[by_task[task]].sum()) for task in asked)
    spent = {task: {unit: int(values[by_task[task]].sum()) for unit, values in played.spent.items()} for task in never}
    never.sort(key=lambda task: (-next(iter(spent[task].values()), 0), -sizes[task], task))
    return {
        "epochs": epochs,
        "tasks_with_enough_epochs": len(asked),
        "never_taught": len(never),
        "expected_by_chance": math.fsum((flat / groups) ** sizes[task] for task in asked) if groups else None,
        "spent": {unit: sum(row[unit] for row in spent.values()) for unit in played.spent},
        "rows": [_task_row(played, task, by_task[task]) | {"spent": spent[task]} for task in never[:SHOWN]],
        "rows_left_out": max(0, len(never) - SHOWN),
    }


def _task_row(played: Played, task: str, rows: list[int]) -> dict[str, Any]:
    """`mixed_share_at_most`: the upper end of the 95% Wilson interval of 0 mixed groups in n."""
    outcomes = [played.outcomes[i] for i in rows if played.scored_N[i]]
    ending = outcomes[0].value if len(set(outcomes)) == 1 else "either"
    most = wilson(0, len(outcomes))[1]
    return {"task": task, "groups": len(outcomes), "ending": ending, "mixed_share_at_most": most}


def failures(played: Played, success: float) -> dict[str, Any]:
    """`why`: the groups without a gradient by reason; those of `as_lowest` are all-fail groups with fewer than two
    rollouts that do not look like failures. `suspects`: rollouts with the log's lowest reward that look so, by sign,
    and how often other rollouts do. `without`: the rate if the suspects had been censored."""
    scored = [rollout for group in played.groups for rollout in group.rollouts if rollout.reward is not None]
    lowest = min((rollout.reward for rollout in scored if rollout.reward is not None), default=0.0)
    worst = [rollout for rollout in scored if rollout.reward == lowest and lowest < success]
    others = [rollout for rollout in scored if rollout.reward != lowest]
    here, there = (Counter(one.suspect for one in found if one.suspect) for found in (worst, others))
    signs = {
        sign: {"lowest": count, "others": there[sign]}
        for sign, count in here.most_common()
        if count * max(1, len(others)) >= LEAST_RATIO * there[sign] * len(worst)
    }

    def suspected(rollout: LoggedRollout) -> bool:
        return rollout.suspect in signs and rollout.reward == lowest

    judged = [[None if suspected(one) else one.reward for one in group.rollouts] for group in played.groups]
    outcomes = [group_outcome(rewards, success=success) for rewards in judged]
    pairs = list(zip(played.outcomes, outcomes, strict=True))
    as_lowest = sum(was is GroupOutcome.ALL_FAIL and now is GroupOutcome.CENSORED for was, now in pairs)
    return {
        "why": {
            "all_succeed": sum(was is GroupOutcome.ALL_SUCCEED for was, _ in pairs),
            "all_fail": sum(was is GroupOutcome.ALL_FAIL for was, _ in pairs) - as_lowest,
            "as_lowest": as_lowest,
        },
        "suspects": {
            "lowest_reward": lowest,
            "rollouts": sum(row["lowest"] for row in signs.values()),
            "of_lowest": len(worst),
            "of_others": len(others),
            "by_sign": signs,
        },
        "without": rate(outcomes, played.tasks_N),
    }
