"""Tasks whose groups never have a gradient, and how the share of such groups depends on the group size."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from turntree.auditing.played import Played
from turntree.core.outcome import GroupOutcome
from turntree.observe.statistics import wilson

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
    members: dict[str, list[int]] = defaultdict(list)
    for i, group in enumerate(played.groups):
        members[group.task].append(i)
    return [
        _Task(
            name,
            tuple(played.outcomes[i] for i in rows if played.outcomes[i] is not GroupOutcome.CENSORED),
            {unit: int(values[rows].sum()) for unit, values in played.spent.items()},
        )
        for name, rows in members.items()
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
