"""Whether success on whole tasks holds while turns are trained.

The reward of a turn stands in for success, and may run away from it: a policy that does nothing but search is paid for
it at every state of a search, and wins no game (docs/results/hard.md). So whole tasks are played before, during and
after training. The step of the highest success is known, and a run ends where success has fallen below that of the
start although the reward of turns has risen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from turntree.run.statistics import Interval, t_interval

FALL = 0.01  # level of the one-sided test of a fall, at each look
_KINDS = 3  # kinds of action that the reason names


@dataclass(frozen=True)
class Look:
    """The tasks as they were played after `step`. `outcomes` is the share of successes by task, without tasks that
    were censored; `actions` is the share of each kind of action among all turns; `reward` is the mean reward of the
    turns that were trained on since the look before (None: there was none)."""

    step: int
    outcomes: Mapping[str, float]
    actions: Mapping[str, float]
    reward: float | None = None

    @property
    def success(self) -> float | None:
        return sum(self.outcomes.values()) / len(self.outcomes) if self.outcomes else None


def best(looks: Sequence[Look]) -> Look | None:
    """The first look of the highest success; None where no task has an outcome."""
    played = [look for look in looks if look.outcomes]
    return max(played, key=lambda look: (look.success, -look.step), default=None)


def change(start: Look, now: Look) -> Interval | None:
    """The change in success, over the tasks that both looks have an outcome of; None where there are none."""
    both = sorted(start.outcomes.keys() & now.outcomes.keys())
    return t_interval([now.outcomes[task] - start.outcomes[task] for task in both]) if both else None


def has_fallen(start: Look, now: Look, level: float = FALL) -> bool:
    """Whether more tasks were lost than chance explains: the exact one-sided sign test on the same tasks, which holds
    for few tasks and for few successes."""
    from scipy.stats import binomtest

    both = start.outcomes.keys() & now.outcomes.keys()
    lost = sum(now.outcomes[task] < start.outcomes[task] for task in both)
    won = sum(now.outcomes[task] > start.outcomes[task] for task in both)
    return lost > won and bool(binomtest(lost, lost + won, alternative="greater").pvalue < level)


def runs_away(looks: Sequence[Look]) -> str:
    """Why a run ends at its last look: success has fallen since the first, and the reward of turns has not. Empty where
    it goes on. The first look with a reward is what later rewards are compared with."""
    start, now = looks[0], looks[-1]
    paid = [look.reward for look in looks if look.reward is not None]
    falling_too = len(paid) > 1 and paid[-1] < paid[0]
    if len(looks) < 2 or falling_too or not has_fallen(start, now):
        return ""
    interval = change(start, now)
    assert interval is not None and start.success is not None and now.success is not None  # tasks were lost
    reward = f" while the reward of turns went from {paid[0]:.2f} to {paid[-1]:.2f}" if len(paid) > 1 else ""
    return (
        f"step {now.step}: success fell from {start.success:.1%} to {now.success:.1%} of {len(now.outcomes)} tasks"
        f" ({_signed(interval)}){reward}; of its actions, {_moved(start.actions, now.actions)}"
    )


def _signed(interval: Interval) -> str:
    if interval.low is None or interval.high is None:
        return f"{100 * interval.mean:+.1f} points"
    return f"{100 * interval.mean:+.1f} points [{100 * interval.low:+.1f}, {100 * interval.high:+.1f}]"


def _moved(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """The kinds of action whose shares changed most."""
    changes = {kind: after.get(kind, 0.0) - before.get(kind, 0.0) for kind in before.keys() | after.keys()}
    most = sorted(changes, key=lambda kind: (-abs(changes[kind]), kind))[:_KINDS]
    told = [f"{kind!r} went from {before.get(kind, 0.0):.0%} to {after.get(kind, 0.0):.0%}" for kind in most]
    return ", ".join(told) or "nothing is known"
