"""Why groups had no gradient: all right, all wrong, or failures of the machine that counted as the lowest reward."""

from __future__ import annotations

from collections import Counter
from typing import Any

from turntree.audit.played import Played
from turntree.audit.waste import rate
from turntree.core.outcome import GroupOutcome, group_outcome
from turntree.logs.groups import LoggedRollout

LEAST_RATIO = 2.0  # a sign counts where it is this much more frequent among the lowest rewards than among the others


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
        "without": rate(
            sum(now.zero_variance for now in outcomes), sum(now is not GroupOutcome.CENSORED for now in outcomes)
        ),
    }
