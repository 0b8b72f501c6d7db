"""A log in the memory of an audit: every group with its outcome, and what it spent in the units that the log has.

A log may be larger than memory, so its texts are not kept. An audit only needs to know whether two actions of one
group are equal, so each group numbers its texts in order of first appearance and keeps the numbers.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from turntree.core.outcome import SUCCESS_REWARD, GroupOutcome, group_outcome
from turntree.logs.groups import LoggedGroup, LoggedRollout

TOKENS, TURNS, CHARACTERS = "tokens", "turns", "characters"
UNITS = (TOKENS, TURNS, CHARACTERS)
T = TypeVar("T")
_FORKED, _REFILL, _HAS_TOKENS, _HAS_OBSERVATIONS = 1, 2, 4, 8
_SIZES = (("B", 1 << 8), ("H", 1 << 16), ("I", 1 << 32), ("Q", 1 << 64))


@dataclass(frozen=True, slots=True)
class PlayedGroup:
    """What an audit needs of one group. `actions`, `observations` and `tokens` hold the turns of all rollouts one after
    the other, texts as numbers; `lengths` are the turns of each rollout. `flags` has one byte per rollout."""

    task: str
    iteration: int | None
    task_type: str | None
    rewards: tuple[float | None, ...]
    flags: bytes
    lengths: array[int]
    actions: array[int]
    observations: array[int]
    tokens: array[int]

    @property
    def scored(self) -> tuple[float, ...]:
        return tuple(reward for reward in self.rewards if reward is not None)

    def logged(self) -> LoggedGroup:
        """The group again, with numbers in place of texts: what gates and calibration read."""
        rollouts, start = list[LoggedRollout](), 0
        for reward, flags, length in zip(self.rewards, self.flags, self.lengths, strict=True):
            turns, start = slice(start, start + length), start + length
            rollouts.append(
                LoggedRollout(
                    actions=tuple(map(str, self.actions[turns])),
                    reward=reward,
                    turn_tokens=tuple(self.tokens[turns]) if flags & _HAS_TOKENS else None,
                    observations=tuple(map(str, self.observations[turns])) if flags & _HAS_OBSERVATIONS else None,
                    forked=bool(flags & _FORKED),
                    refill=bool(flags & _REFILL),
                )
            )
        return LoggedGroup(
            id="", task=self.task, rollouts=tuple(rollouts), iteration=self.iteration, task_type=self.task_type
        )


@dataclass(frozen=True, kw_only=True)
class Played:
    """N groups in order of iteration, then of the log. `spent` and `trained` map a unit to what each group generated in
    all its rollouts and in its scored ones. A unit that some rollout does not have is in `absent` instead, with the
    reason. `horizon`: the turns of the longest rollout. `censored`: rollouts without a reward, by their ending.
    `knows_turn_tokens`: every rollout has the number of tokens of each turn."""

    groups: tuple[PlayedGroup, ...]
    outcomes: tuple[GroupOutcome, ...]
    spent: dict[str, NDArray[np.int64]]
    trained: dict[str, NDArray[np.int64]]
    absent: dict[str, str]
    horizon: int
    censored: dict[str, int]
    knows_turn_tokens: bool

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
    def has_iterations(self) -> bool:
        return all(group.iteration is not None for group in self.groups)

    @property
    def has_turns(self) -> bool:
        return TURNS in self.spent


def play(groups: Iterable[LoggedGroup], *, success: float = SUCCESS_REWARD) -> Played:
    """Read a stream of groups, one at a time: the texts of a group are dropped before the next one is read."""
    kept: list[PlayedGroup] = []
    outcomes: list[GroupOutcome] = []
    unknown: dict[str, int] = dict.fromkeys(UNITS, 0)
    spent = {unit: array("q") for unit in _AMOUNTS}
    trained = {unit: array("q") for unit in _AMOUNTS}
    censored, horizon, known = Counter[str](), 0, True
    for group in groups:
        for unit, amount in _AMOUNTS.items():
            amounts = [(amount(rollout), rollout.reward) for rollout in group.rollouts]
            unknown[unit] += sum(value is None for value, _ in amounts)
            spent[unit].append(sum(value or 0 for value, _ in amounts))
            trained[unit].append(sum(value or 0 for value, reward in amounts if reward is not None))
        censored.update(rollout.stop or "no reward" for rollout in group.rollouts if rollout.reward is None)
        horizon = max(horizon, *(len(rollout.actions) for rollout in group.rollouts), 0)
        known = known and all(rollout.turn_tokens is not None for rollout in group.rollouts)
        kept.append(_compact(group))
        outcomes.append(group_outcome(kept[-1].rewards, success=success))
    told = [unit for unit in UNITS if not unknown[unit]]
    order = sorted(range(len(kept)), key=lambda i: kept[i].iteration or 0)  # each file of a log may begin anew
    return Played(
        groups=tuple(kept[i] for i in order),
        outcomes=tuple(outcomes[i] for i in order),
        spent={unit: np.asarray(spent[unit])[order] for unit in told},
        trained={unit: np.asarray(trained[unit])[order] for unit in told},
        absent={
            unit: f"{unknown[unit]} rollouts of the log do not say their {unit}" for unit in UNITS if unknown[unit]
        },
        horizon=horizon,
        censored=dict(sorted(censored.items())),
        knows_turn_tokens=known,
    )


def _characters(rollout: LoggedRollout) -> int | None:
    if rollout.characters is None and rollout.actions:
        return sum(map(len, rollout.actions))
    return rollout.characters


_AMOUNTS: dict[str, Callable[[LoggedRollout], int | None]] = {
    TOKENS: lambda rollout: rollout.generated_tokens,
    TURNS: lambda rollout: rollout.turns,
    CHARACTERS: _characters,
}


def _compact(group: LoggedGroup) -> PlayedGroup:
    numbers: dict[str, int] = {}
    rollouts = group.rollouts
    blank = [("",) * len(rollout.actions) for rollout in rollouts]
    seen = [rollout.observations or none for rollout, none in zip(rollouts, blank, strict=True)]
    return PlayedGroup(
        task=sys.intern(group.task),
        iteration=group.iteration,
        task_type=_shared(group.task_type),
        rewards=_shared(group.rewards),
        flags=_shared(bytes(map(_flags, rollouts))),
        lengths=_packed([len(rollout.actions) for rollout in rollouts]),
        actions=_packed([numbers.setdefault(text, len(numbers)) for r in rollouts for text in r.actions]),
        observations=_packed([numbers.setdefault(text, len(numbers)) for texts in seen for text in texts]),
        tokens=_packed([
            count for r in rollouts for count in (r.turn_tokens if r.turn_tokens is not None else [0] * len(r.actions))
        ]),
    )  # fmt: skip


def _flags(rollout: LoggedRollout) -> int:
    return (
        _FORKED * rollout.forked
        | _REFILL * rollout.refill
        | _HAS_TOKENS * (rollout.turn_tokens is not None)
        | _HAS_OBSERVATIONS * (rollout.observations is not None)
    )


def _packed(values: Sequence[int]) -> array[int]:
    """The values in the smallest integer type that holds the largest of them."""
    largest = max(values, default=0)
    return array(next(code for code, limit in _SIZES if largest < limit), values)


@lru_cache(maxsize=1 << 12)
def _shared(value: T) -> T:
    """Share one object between equal values, because few patterns of rewards are common."""
    return value
