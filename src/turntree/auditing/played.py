"""A log as an audit holds it: every group with its outcome, and what it spent in the units that the log knows."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from turntree.core.outcome import SUCCESS_REWARD, GroupOutcome, group_outcome
from turntree.logs.groups import LoggedGroup, LoggedRollout

TOKENS, TURNS, CHARACTERS = "tokens", "turns", "characters"
UNITS = (TOKENS, TURNS, CHARACTERS)


@dataclass(frozen=True, kw_only=True)
class Played:
    """N groups in log order. `spent` and `trained` map a unit to what each group generated in all its rollouts and in
    its scored ones; a unit that some rollout does not know is in `absent` instead, with the reason."""

    groups: tuple[LoggedGroup, ...]
    outcomes: tuple[GroupOutcome, ...]
    spent: dict[str, NDArray[np.int64]]
    trained: dict[str, NDArray[np.int64]]
    absent: dict[str, str]

    @property
    def zero_variance_N(self) -> NDArray[np.bool_]:
        return np.array([outcome.zero_variance for outcome in self.outcomes], dtype=bool)

    @property
    def scored_N(self) -> NDArray[np.bool_]:
        return np.array([outcome is not GroupOutcome.CENSORED for outcome in self.outcomes], dtype=bool)

    @property
    def mixed_N(self) -> NDArray[np.bool_]:
        return np.array([outcome is GroupOutcome.MIXED for outcome in self.outcomes], dtype=bool)

    @property
    def has_iterations(self) -> bool:
        return all(group.iteration is not None for group in self.groups)

    @property
    def has_turns(self) -> bool:
        return TURNS in self.spent


def play(groups: Iterable[LoggedGroup], *, success: float = SUCCESS_REWARD) -> Played:
    """Take in a stream of groups. Texts are replaced by hashes: an audit asks only whether actions are equal."""
    kept: list[LoggedGroup] = []
    unknown: dict[str, int] = dict.fromkeys(UNITS, 0)
    sums: list[dict[str, tuple[int, int]]] = []
    for group in groups:
        known = [_known(rollout) for rollout in group.rollouts]
        scored = [rollout.reward is not None for rollout in group.rollouts]
        row: dict[str, tuple[int, int]] = {}
        for unit in UNITS:
            values = [amounts[unit] for amounts in known]
            unknown[unit] += sum(value is None for value in values)
            whole = [value or 0 for value in values]
            row[unit] = sum(whole), sum(value for value, counts in zip(whole, scored, strict=True) if counts)
        sums.append(row)
        kept.append(replace(group, rollouts=tuple(map(_hashed, group.rollouts))))
    told = [unit for unit in UNITS if not unknown[unit]]
    return Played(
        groups=tuple(kept),
        outcomes=tuple(group_outcome(group.rewards, success=success) for group in kept),
        spent={unit: np.array([row[unit][0] for row in sums], dtype=np.int64) for unit in told},
        trained={unit: np.array([row[unit][1] for row in sums], dtype=np.int64) for unit in told},
        absent={
            unit: f"{unknown[unit]} rollouts of the log do not say their {unit}" for unit in UNITS if unknown[unit]
        },
    )


def _known(rollout: LoggedRollout) -> dict[str, int | None]:
    return {
        TOKENS: rollout.generated_tokens,
        TURNS: rollout.turns,
        CHARACTERS: sum(map(len, rollout.actions))
        if rollout.characters is None and rollout.actions
        else rollout.characters,
    }


def _hashed(rollout: LoggedRollout) -> LoggedRollout:
    seen = None if rollout.observations is None else tuple(map(_digest, rollout.observations))
    return replace(rollout, actions=tuple(map(_digest, rollout.actions)), observations=seen)


def _digest(text: str) -> str:
    return sys.intern(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest())
