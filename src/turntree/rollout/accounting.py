"""The scheduler's use of time, and what branching saved: the shared parts of a tree's rollouts, counted once and
counted per rollout.

*Fresh* calls are those that were made, counted per node; the *chain* count is what the same rollouts would have made
independently. The same holds for turns and sampled tokens. Other effects of branching (on the distribution of the
leaves, on the policy over time) are not savings and are not counted here: compare independent rollouts to measure them.
"""

from __future__ import annotations

from dataclasses import dataclass

from turntree.core.cost import Additive
from turntree.core.tree import RolloutTree


@dataclass(frozen=True, kw_only=True)
class TreeAccount(Additive):
    """Additive counts over trees. Calls are tool calls in the policy's messages that an environment took up."""

    leaves: int = 0
    starts: int = 0
    refills: int = 0
    forks: int = 0
    calls_fresh: int = 0
    calls_chain: int = 0
    turns_fresh: int = 0
    turns_chain: int = 0
    tokens_fresh: int = 0  # sampled
    tokens_chain: int = 0

    @property
    def structural_saving(self) -> float:
        """1 - fresh / chain calls; of turns where no call was made."""
        if self.calls_chain:
            return 1 - self.calls_fresh / self.calls_chain
        return 1 - self.turns_fresh / self.turns_chain if self.turns_chain else 0.0


def account(tree: RolloutTree) -> TreeAccount:
    """Count one tree. A turn that forked inside is a turn of every branch, and its shared
    tokens are counted once."""
    below = [0] * len(tree)
    leaves, starts = tree.ends(), set(tree.starts())
    begun: set[int] = set()  # of a rollout of several branches, the first start
    for leaf in leaves:
        nodes = tree.nodes_of(leaf)
        begun.update(sorted(starts.intersection(nodes))[:1])
        for node in nodes:
            below[node] += 1
    taken_up = [any(tree[child].tells for child in tree.children(node.id)) for node in tree]
    sampled = [node for node in tree if node.sampled]
    spoken = [node for node in sampled if node.message is not None]
    calls = [(len(node.message.tool_calls) if node.message and taken_up[node.id] else 0, node.id) for node in spoken]
    return TreeAccount(
        leaves=len(leaves),
        starts=len(begun),
        refills=len(tree.refills()),
        forks=len(tree.branch_points()),
        calls_fresh=sum(count for count, _ in calls),
        calls_chain=sum(count * below[node] for count, node in calls),
        turns_fresh=len(spoken),
        turns_chain=sum(below[node.id] for node in spoken),
        tokens_fresh=sum(len(node.token_ids) for node in sampled),
        tokens_chain=sum(len(node.token_ids) * below[node.id] for node in sampled),
    )


@dataclass(kw_only=True)
class Usage:
    """The scheduler's use of time, over all its runs. Seconds are wall-clock."""

    seconds: float = 0.0  # while a run was being advanced (not while its caller held a group)
    gate_seconds: float = 0.0  # of those, in the gate
    request_seconds: float = 0.0  # summed over rollouts: time with a generation in flight
    places: int = 0  # max_live_rollouts

    @property
    def busy_share(self) -> float:
        """Utilisation of the engine's batch: generations in flight over places, averaged over time."""
        return self.request_seconds / (self.places * self.seconds) if self.seconds else 0.0
