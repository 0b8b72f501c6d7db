"""One path of a tree as a flat row, as most trainers have it."""

from __future__ import annotations

from dataclasses import dataclass

from turntree.core.tree import Node, RolloutTree, StopReason


@dataclass(frozen=True)
class Rollout:
    """A view of one root-to-leaf path; the three sequences align.

    `loss_mask[t]` is True where the policy sampled token t; `logprobs[t]` is None elsewhere.
    """

    leaf: int
    nodes: tuple[Node, ...]
    stop: StopReason | None
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    logprobs: tuple[float | None, ...]

    @property
    def turns(self) -> int:
        return self.nodes[-1].turn


def rollout_of(tree: RolloutTree, leaf: int) -> Rollout:
    nodes = tree.path(leaf)
    logprobs: list[float | None] = []
    for node in nodes:
        logprobs.extend(node.logprobs if node.logprobs is not None else [None] * len(node.token_ids))
    return Rollout(
        leaf=leaf,
        nodes=nodes,
        stop=tree.stop_reason(leaf),
        token_ids=tuple(token for node in nodes for token in node.token_ids),
        loss_mask=tuple(node.sampled for node in nodes for _ in node.token_ids),
        logprobs=tuple(logprobs),
    )


def rollouts_of(tree: RolloutTree) -> tuple[Rollout, ...]:
    return tuple(rollout_of(tree, leaf) for leaf in tree.leaves())
