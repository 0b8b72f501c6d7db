"""Credit of local rollouts inside a tree: turns that were sampled again at nodes of its rollouts, and judged as turns.

Those at one node are a group: they are samples of one state, so a verdict is compared with the others there and with
nothing else (PivotRL, Eq. 1). Whole rollouts are compared as if there were no local ones (`RolloutTree.ends`), so the
sum of both credits is the sum of both objectives on one packed tree, and their shared prefix is computed once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from turntree.advantages.comparisons import Advantages, grpo_advantages
from turntree.advantages.credit import soft
from turntree.core.labels import Credit, NodeCredit
from turntree.core.outcome import is_zero_variance
from turntree.core.tree import RolloutTree


def local_credit(
    tree: RolloutTree,
    *,
    advantages: Advantages = grpo_advantages,
    per_rollout: bool = False,
    weight: float = 1.0,
    places: Collection[int] | None = None,
) -> Credit:
    """Credit of the local rollouts of `tree`, each counted `weight` times; with `places` of those at these nodes only.
    `per_rollout` divides each by its number of tokens, as `CreditRule.per_rollout` does."""
    rewards = tree.local_rollouts()
    groups: dict[int | None, list[tuple[int, float]]] = defaultdict(list)
    for leaf, reward in rewards.items():
        wanted = places is None or tree[leaf].parent in places
        if wanted and reward is not None and tree[leaf].token_ids:
            groups[tree[leaf].parent].append((leaf, reward))
    nodes: dict[int, NodeCredit] = {}
    tokens = 0.0
    for group in groups.values():
        for (leaf, _), advantage in zip(group, advantages([reward for _, reward in group]), strict=True):
            length = len(tree[leaf].token_ids)
            share = weight / length if per_rollout else weight
            nodes[leaf] = soft([weight], [share], [advantage])
            tokens += weight * length
    return Credit(
        nodes=dict(sorted(nodes.items())),
        rollout_tokens=tokens,
        rollouts=weight * len(nodes),
        zero_variance=all(is_zero_variance([reward for _, reward in group]) for group in groups.values()),
        censored=sum(reward is None for reward in rewards.values()),
    )
