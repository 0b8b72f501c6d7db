"""The outcome of one group from its rewards: different rewards to compare, or the same reward everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

REWARD_TOLERANCE = 1e-8
SUCCESS_REWARD = 0.5


class GroupOutcome(StrEnum):
    """The outcomes partition the groups."""

    MIXED = "mixed"
    ALL_FAIL = "all_fail"
    ALL_SUCCEED = "all_succeed"
    CENSORED = "censored"  # fewer than two scored rollouts: there is nothing to compare

    @property
    def zero_variance(self) -> bool:
        return self in (GroupOutcome.ALL_FAIL, GroupOutcome.ALL_SUCCEED)


def is_zero_variance(rewards: Sequence[float]) -> bool:
    """Whether the scored rewards are all equal (max - min <= 1e-8), so that the group has no gradient.

    False for a group without a scored reward.
    """
    return bool(rewards) and max(rewards) - min(rewards) <= REWARD_TOLERANCE


def group_outcome(rewards: Sequence[float | None], *, success: float = SUCCESS_REWARD) -> GroupOutcome:
    """The outcome of a finished group; None is a censored rollout. A reward of at least `success` is a success.

    >>> group_outcome([0.0, None, 0.0]).value, group_outcome([1.0, 0.0]).value, group_outcome([1.0, None]).value
    ('all_fail', 'mixed', 'censored')
    """
    scored = [reward for reward in rewards if reward is not None]
    if len(scored) < 2:
        return GroupOutcome.CENSORED
    if not is_zero_variance(scored):
        return GroupOutcome.MIXED
    return GroupOutcome.ALL_SUCCEED if scored[0] >= success else GroupOutcome.ALL_FAIL
