"""Credit of judged turns inside a tree of whole rollouts.

**Local rollouts** are turns that were sampled again at nodes of its rollouts, and judged as turns.

Those at one node are a group: they are samples of one state, so a verdict is compared with the others there and with
nothing else (PivotRL, Eq. 1). Whole rollouts are compared as if there were no local ones (`RolloutTree.ends`), so the
sum of both credits is the sum of both objectives on one packed tree, and their shared prefix is computed once.

**The turns that the rollouts took** can be judged, too: then a turn has an advantage of its own beside those of the
rollouts through it (`with_turns`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace

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


def with_turns(credit: Credit, advantages: Mapping[int, float]) -> Credit:
    """`credit` with one more advantage at some nodes, which every rollout through the node has. It is a second term of
    the objective on the same tokens, clipped by itself: the gradient is that of the sum of both advantages wherever the
    ratio lies inside the clip range. Nodes without credit get none; the normalisers stay."""
    nodes = dict(credit.nodes)
    for node, advantage in advantages.items():
        if (one := nodes.get(node)) is not None:
            more = soft([one.multiplicity], [one.multiplicity], [advantage])
            positive, negative = one.positive + more.positive, one.negative + more.negative
            nodes[node] = replace(one, positive=positive, negative=negative)
    moved = any(advantages.get(node, 0.0) for node in nodes)
    return replace(credit, nodes=nodes, zero_variance=credit.zero_variance and not moved)
