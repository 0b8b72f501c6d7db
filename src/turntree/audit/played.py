"""A log in the memory of an audit: every group with its outcome, and what it spent in the units that the log has.

A log may be larger than memory, so its texts are not kept. An audit only needs to know whether two actions of one
group are equal, so each group numbers its texts in order of first appearance and keeps the numbers.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from turntree.core.outcome import SUCCESS_REWARD, GroupOutcome, group_outcome
from turntree.logs.groups import LoggedGroup, LoggedRollout
from turntree.logs.suspects import suspect_of

TOKENS, TURNS, CHARACTERS = "tokens", "turns", "characters"
AMOUNTS: dict[str, Callable[[LoggedRollout], int | None]] = {
    TOKENS: lambda rollout: rollout.generated_tokens,
    TURNS: lambda rollout: rollout.turns,
    CHARACTERS: lambda rollout: rollout.characters,
}


@dataclass(frozen=True, kw_only=True)
class Played:
    """N groups in order of iteration, then of the log, with numbers in place of texts. `spent` and `trained` map a unit
    to what each group generated in all its rollouts and in its scored ones. A unit that some rollout does not have is
    in `absent` instead, with the reason."""

    groups: tuple[LoggedGroup, ...]
    outcomes: tuple[GroupOutcome, ...]
    spent: dict[str, NDArray[np.int64]]
    trained: dict[str, NDArray[np.int64]]
    absent: dict[str, str]

    @cached_property
    def zero_variance_N(self) -> NDArray[np.bool_]:
        return np.array([outcome.zero_variance for outcome in self.outcomes], dtype=bool)

    @cached_property
    def scored_N(self) -> NDArray[np.bool_]:
        return np.array([outcome is not GroupOutcome.CENSORED for outcome in self.outcomes], dtype=bool)

    @cached_property
    def mixed_N(self) -> NDArray[np.bool_]:
        return np.array([outcome is GroupOutcome.MIXED for outcome in self.outcomes], dtype=bool)

    @cached_property
    def tasks_N(self) -> NDArray[np.int64]:
        """The number of each group's task."""
        numbers: dict[str, int] = {}
        return np.array([numbers.setdefault(group.task, len(numbers)) for group in self.groups], dtype=np.int64)

    @cached_property
    def has_iterations(self) -> bool:
        return all(group.iteration is not None for group in self.groups)

    @cached_property
    def horizon(self) -> int:
        """The turns of the longest rollout."""
        return max((len(rollout.actions) for group in self.groups for rollout in group.rollouts), default=0)

    @property
    def censored(self) -> dict[str, int]:
        """Rollouts without a reward, by their ending."""
        endings = (r.stop or "no reward" for group in self.groups for r in group.rollouts if r.reward is None)
        return dict(sorted(Counter(endings).items()))


def play(groups: Iterable[LoggedGroup], *, success: float = SUCCESS_REWARD) -> Played:
    """Read a stream of groups, one at a time: the texts of a group are dropped before the next one is read."""
    kept = sorted(map(numbered, groups), key=lambda group: group.iteration or 0)  # each file of a log may begin anew
    spent: dict[str, NDArray[np.int64]] = {}
    trained: dict[str, NDArray[np.int64]] = {}
    absent: dict[str, str] = {}
    for unit, amount in AMOUNTS.items():
        unknown = sum(amount(rollout) is None for group in kept for rollout in group.rollouts)
        if unknown:
            absent[unit] = f"{unknown} rollouts of the log do not say their {unit}"
            continue
        spent[unit] = np.array([sum(amount(r) or 0 for r in group.rollouts) for group in kept], dtype=np.int64)
        trained[unit] = np.array(
            [sum(amount(r) or 0 for r in group.rollouts if r.reward is not None) for group in kept], dtype=np.int64
        )
    outcomes = tuple(group_outcome(group.rewards, success=success) for group in kept)
    return Played(groups=tuple(kept), outcomes=outcomes, spent=spent, trained=trained, absent=absent)


def numbered(group: LoggedGroup) -> LoggedGroup:
    """The group with numbers in place of its texts: equal ones have one number."""
    numbers: dict[str, str] = {}

    def number(texts: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(numbers.setdefault(text, sys.intern(str(len(numbers)))) for text in texts)

    rollouts = [
        replace(
            rollout,
            actions=number(rollout.actions),
            observations=None if rollout.observations is None else number(rollout.observations),
            characters=sum(map(len, rollout.actions[rollout.shared_turns :]))
            if rollout.characters is None and rollout.turns is not None
            else rollout.characters,
            stop=None if rollout.stop is None else sys.intern(rollout.stop),
            suspect=rollout.suspect or _suspect(rollout),
        )
        for rollout in group.rollouts
    ]
    return replace(group, id="", task=sys.intern(group.task), rollouts=tuple(rollouts))


def _suspect(rollout: LoggedRollout) -> str | None:
    """By what the rollout says, and what it saw before; a log without turns has looked at its own text."""
    if rollout.actions:
        seen = rollout.observations[-1] if rollout.observations else ""
        told = f"{seen}\n{rollout.actions[-1]}" if rollout.actions[-1].strip() else ""
        return suspect_of(told, stop=rollout.stop, completed=rollout.completed)
    nothing = 0 in (rollout.generated_tokens, rollout.characters)
    return suspect_of("" if nothing else "unknown", stop=rollout.stop, completed=rollout.completed)
