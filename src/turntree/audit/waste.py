"""Where the budget went: groups without a gradient, overall, over time, in the loss, by task and by group size."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from turntree.audit.played import TOKENS, Played
from turntree.core.outcome import GroupOutcome
from turntree.run.statistics import wilson

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


# tasks whose groups never have a gradient, and the size of groups


SHOWN, SHOWN_HISTORIES = 20, 120
LETTERS = {
    GroupOutcome.MIXED: "m",
    GroupOutcome.ALL_FAIL: "f",
    GroupOutcome.ALL_SUCCEED: "s",
    GroupOutcome.CENSORED: "c",
}


@dataclass(frozen=True)
class _Task:
    name: str
    outcomes: tuple[GroupOutcome, ...]  # of its scored groups
    spent: dict[str, int]

    @property
    def never_taught(self) -> bool:
        return all(outcome.zero_variance for outcome in self.outcomes)

    def to_json(self) -> dict[str, Any]:
        """`mixed_share_at_most`: the upper end of the 95% Wilson interval of 0 mixed groups in n."""
        kinds = set(self.outcomes)
        return {
            "task": self.name,
            "groups": len(self.outcomes),
            "ending": next(iter(kinds)).value if len(kinds) == 1 else "either",
            "mixed_share_at_most": wilson(0, len(self.outcomes))[1],
            "spent": self.spent,
        }


def never_teaching(played: Played, epochs: int) -> dict[str, Any]:
    """The tasks with at least `epochs` scored groups, all of zero variance; the costliest are listed.

    `expected_by_chance`: how many such tasks there would be if all tasks had the same share of mixed groups. Where far
    more are found, tasks differ, and history predicts.
    """
    asked = [task for task in _tasks(played) if len(task.outcomes) >= epochs]
    found = [task for task in asked if task.never_taught]
    groups = sum(len(task.outcomes) for task in asked)
    flat = sum(outcome.zero_variance for task in asked for outcome in task.outcomes)
    unit = next(iter(played.spent), None)
    found.sort(key=lambda task: (-task.spent.get(unit or "", 0), -len(task.outcomes), task.name))
    return {
        "epochs": epochs,
        "tasks_with_enough_epochs": len(asked),
        "never_taught": len(found),
        "expected_by_chance": math.fsum((flat / groups) ** len(task.outcomes) for task in asked) if groups else None,
        "spent": {name: sum(task.spent[name] for task in found) for name in played.spent},
        "rows": [task.to_json() for task in found[:SHOWN]],
        "rows_left_out": max(0, len(found) - SHOWN),
    }


def _tasks(played: Played) -> list[_Task]:
    return [
        _Task(
            name,
            tuple(played.outcomes[i] for i in rows if played.outcomes[i] is not GroupOutcome.CENSORED),
            {unit: int(values[rows].sum()) for unit, values in played.spent.items()},
        )
        for name, rows in _groups_by([group.task for group in played.groups]).items()
    ]


def histories(played: Played) -> dict[str, Any]:
    """The outcomes of every task in log order, one letter a group: m(ixed), f(ail), s(ucceed), c(ensored). Tasks that
    were seen once are left out; of many tasks, those with the most groups are given."""
    told: dict[str, list[str]] = defaultdict(list)
    for group, outcome in zip(played.groups, played.outcomes, strict=True):
        told[group.task].append(LETTERS[outcome])
    again = sorted(((task, "".join(row)) for task, row in told.items() if len(row) > 1), key=lambda item: -len(item[1]))
    return {"rows": dict(again[:SHOWN_HISTORIES]), "rows_left_out": max(0, len(again) - SHOWN_HISTORIES)}


def group_sizes(played: Played) -> list[dict[str, Any]]:
    """The outcomes of smaller groups: for every size g up to the smallest scored group, the share of random subsets of
    g rollouts with equal rewards, exact (hypergeometric, unbiased), and the number of mixed groups per rollout.

    There is no extrapolation to larger groups than the log has.
    """
    patterns = Counter(_alike(played.groups[i].scored) for i in np.flatnonzero(played.scored_N))
    groups, smallest = patterns.total(), min(map(sum, patterns), default=0)
    rows: list[dict[str, Any]] = []
    for size in range(2, smallest + 1):
        flat = math.fsum(times * _equal_share(alike, size) for alike, times in patterns.items()) / groups
        rows.append(
            {"size": size, "zero_variance_rate": flat, "mixed_groups_per_1000_rollouts": 1000 * (1 - flat) / size}
        )
    return rows


def _alike(rewards: tuple[float, ...]) -> tuple[int, ...]:
    """How many of the rewards are equal (to 8 decimals), largest first: (3, 1) for 0, 0, 1, 0."""
    return tuple(sorted(Counter(round(reward, 8) for reward in rewards).values(), reverse=True))


def _equal_share(alike: tuple[int, ...], size: int) -> float:
    """The chance that `size` of the rewards, drawn without replacement, are equal."""
    return sum(math.comb(count, size) for count in alike) / math.comb(sum(alike), size)
