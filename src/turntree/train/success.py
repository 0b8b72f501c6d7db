"""Whether success on whole tasks holds in training.

A reward stands in for success, and may run away from it: a policy that does nothing but search is paid for it at every
state of a search, and wins no game (docs/results/hard.md). So whole tasks are played before, during and after training.
The step of the highest success is known, and a run ends where success has fallen below that of the start although the
reward has not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from turntree.run.distributions import at_least
from turntree.run.means import mean
from turntree.run.statistics import paired_bootstrap

FALSE_ALARMS = 0.04  # chance that a run ends although success is what it was, over all its looks
FEWEST_SCORED = 0.9  # of the tasks that the start has an outcome of; a look with fewer says nothing about success
TOLERANCE = 0.05  # a reward of 1 that fell by less has not fallen: it is a mean over what was drawn
_KINDS = 3  # kinds of action that the reason names
_STEPS = 3  # whose mean is a kind's acceptance


@dataclass(frozen=True)
class Look:
    """The tasks as they were played after `step`. `outcomes` is the share of successes by task, without tasks that
    were censored; `actions` is the share of each kind of action among all turns; `reward` is the mean reward of the
    rollouts that were trained on since the look before (of the start: in the first step; None: there was none)."""

    step: int
    outcomes: Mapping[str, float]
    actions: Mapping[str, float]
    reward: float | None = None

    @property
    def success(self) -> float | None:
        return mean(self.outcomes.values())


def counts(start: Look, look: Look) -> bool:
    """Whether so many tasks have an outcome that the look can be compared with the start."""
    return len(look.outcomes) >= max(1, FEWEST_SCORED * len(start.outcomes))


def best(looks: Sequence[Look]) -> Look | None:
    """The first look of the highest success among those that count, each compared with the best one before it on the
    tasks that both have an outcome of; None where none counts."""
    highest: Look | None = None
    for look in looks:
        if counts(looks[0], look) and (highest is None or _gained(highest, look) > 0):
            highest = look
    return highest


def _gained(start: Look, now: Look) -> float:
    both = start.outcomes.keys() & now.outcomes.keys()
    return math.fsum(now.outcomes[task] - start.outcomes[task] for task in both)


def change(start: Look, now: Look) -> tuple[float, float, float] | None:
    """The change in success over the tasks that both looks have an outcome of (None where there are none) with its 95%
    interval, as the report has it."""
    both = sorted(start.outcomes.keys() & now.outcomes.keys())
    return paired_bootstrap(*([look.outcomes[task] for task in both] for look in (now, start))) if both else None


def fewest_lost(level: float) -> int:
    """How many tasks must be lost, and none won, for a fall at this level: with fewer successes at the start no fall
    can be seen.

    >>> fewest_lost(0.01)
    7
    """
    return math.floor(math.log(1 / level, 2)) + 1


def has_fallen(start: Look, now: Look, level: float) -> bool:
    """Whether more tasks were lost than chance explains: the exact one-sided sign test on the same tasks, which holds
    for few tasks and for few successes."""
    both = start.outcomes.keys() & now.outcomes.keys()
    lost = sum(now.outcomes[task] < start.outcomes[task] for task in both)
    won = sum(now.outcomes[task] > start.outcomes[task] for task in both)
    return lost > won and at_least(lost, lost + won, 0.5) < level


@dataclass(frozen=True)
class Fall:
    """A fall of success at a look, in words; `runs_away`: the reward did not fall with it."""

    text: str
    runs_away: bool


def fall(looks: Sequence[Look], planned: int) -> Fall | None:
    """The fall of success since the first look, if there is one at the last. The chance of a false alarm is shared by
    all `planned` looks."""
    start, now = looks[0], looks[-1]
    if len(looks) < 2 or not has_fallen(start, now, FALSE_ALARMS / max(1, planned)):
        return None
    both, changed = start.outcomes.keys() & now.outcomes.keys(), change(start, now)
    assert changed is not None  # tasks were lost
    shares = [mean(look.outcomes[task] for task in both) for look in (start, now)]
    reward, fell = "", False
    if start.reward is not None and now.reward is not None:
        reward = f" while the reward went from {start.reward:.2f} to {now.reward:.2f}"
        fell = now.reward < start.reward - TOLERANCE * max(abs(start.reward), abs(now.reward))
    return Fall(
        f"step {now.step}: success fell from {shares[0]:.1%} to {shares[1]:.1%} of {len(both)} tasks"
        f" ({signed(changed)}){reward}; of its actions, {_moved(start.actions, now.actions)}",
        runs_away=not fell,
    )


def moved_kinds(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Mean acceptance of each kind of action in the first and in the last three steps that drew it, the largest fall
    first. Kinds that were drawn in fewer than six steps are left out: a kind of few turns moves by chance."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for kind, accepted in row.get("reward_by_kind", {}).items():
            found.setdefault(kind, []).extend([] if accepted is None else [accepted])
    pairs = {k: (fmean(seen[:_STEPS]), fmean(seen[-_STEPS:])) for k, seen in found.items() if len(seen) >= 2 * _STEPS}
    return dict(sorted(pairs.items(), key=lambda pair: (pair[1][1] - pair[1][0], pair[0])))


def signed(changed: Sequence[float]) -> str:
    """A change with its interval, in points."""
    mean, low, high = (100 * value for value in changed)
    return f"{mean:+.1f} points [{low:+.1f}, {high:+.1f}]"


def _moved(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """The kinds of action whose shares changed most."""
    changes = {kind: after.get(kind, 0.0) - before.get(kind, 0.0) for kind in before.keys() | after.keys()}
    most = sorted(changes, key=lambda kind: (-abs(changes[kind]), kind))[:_KINDS]
    told = [f"{kind!r} went from {before.get(kind, 0.0):.0%} to {after.get(kind, 0.0):.0%}" for kind in most]
    return ", ".join(told) or "nothing is known"
