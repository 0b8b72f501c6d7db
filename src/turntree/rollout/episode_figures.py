"""The figures of an iteration's groups of whole episodes, for the metrics of a run."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from turntree.core.outcome import GroupOutcome, group_outcome
from turntree.core.tree import RolloutTree, StopReason
from turntree.core.verdict import censored, tells_success
from turntree.rollout.accounting import TreeAccount
from turntree.rollout.groups import GrownGroup
from turntree.rollout.rewards import figures
from turntree.run.means import mean


def outcome_of(group: GrownGroup) -> GroupOutcome:
    """CENSORED where there is nothing to compare: fewer than two rewards."""
    return group_outcome(group.rewards.values)


def group_figures(groups: Sequence[GrownGroup], *, amplifies: bool) -> dict[str, Any]:
    """Means are over scored rollouts; a cut group has none, and no outcome.

    `predicted_amplification` is the factor by which the gradient of the other groups grows if the cut groups, assumed
    to have no variance, are removed from a normaliser that counts trained tokens or rollouts. Not so (`amplifies`) with
    a constant normaliser, and with DAPO, which removes such groups anyway.
    """
    played = [group for group in groups if group.cut is None]
    outcomes = Counter(map(outcome_of, played))
    verdicts = [verdict for group in groups for verdict in group.rewards.verdicts.values()]
    solved = [v.success for v in verdicts if v.reward is not None and v.success is not None]
    solved = solved if tells_success(verdicts) else []
    cut = len(groups) - len(played)
    zero = outcomes[GroupOutcome.ALL_FAIL] + outcomes[GroupOutcome.ALL_SUCCEED]
    whole = zero + outcomes[GroupOutcome.MIXED]
    stops = Counter(group.tree.stop_reason(leaf) for group in groups for leaf in group.tree.ends())
    reasons = censored(verdict for group in played for verdict in group.rewards.verdicts.values())
    return {
        "reward_mean": mean(verdict.reward for verdict in verdicts),
        "success_share": mean(solved),
        **figures(verdicts),
        "groups": len(groups),
        **{f"groups_{outcome.value}": outcomes[outcome] for outcome in GroupOutcome},
        "groups_cut": cut,
        "censored": sum(reasons.values()),
        "censored_reasons": reasons,
        "zero_variance_share": zero / whole if whole else None,
        "predicted_amplification": (whole + cut) / whole if amplifies and whole else 1.0,
        "stops": {reason.value: stops[reason] for reason in StopReason if stops[reason]},
    }


def branch_figures(groups: Sequence[GrownGroup], made: TreeAccount) -> dict[str, Any]:
    """What branching made and shared in an iteration, whose trees add up to `made`."""
    decisions = [d for group in groups for d in group.tree.decisions if d.actor == "brancher"]
    turns = Counter(int(decision.numbers["turn"]) for decision in decisions if decision.action == "fork")
    return {
        **dataclasses.asdict(made),
        "unfilled_leaves": sum(group.unfilled for group in groups),
        "structural_saving": made.structural_saving,
        "decisions": len(decisions),
        "forks_by_turn": {str(turn): count for turn, count in sorted(turns.items())},
    }


def staleness(tree: RolloutTree, version: int) -> int | None:
    """How many updates before `version` the tree's oldest tokens were sampled; None where nothing was sampled."""
    sampled = [node.policy_version for node in tree if node.policy_version is not None]
    return version - min(sampled) if sampled else None
