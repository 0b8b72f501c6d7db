"""From rewards to the advantage A_{i,n} of leaf i at node n: group-relative advantages, and which rewards are compared.

The first functions map the rewards of one group to advantages of the same length: how much better than its siblings a
rollout was. They are all zeros on a group whose rewards are equal or that has one member only. A comparison takes a
scored tree and one of these functions, and returns, for every trained node, the advantages of the leaves at or below it
(aligned with `ScoredTree.below`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from turntree.core.config import Amount, Between, Bounded
from turntree.core.outcome import is_zero_variance
from turntree.core.tree import Node, RolloutTree
from turntree.credit.scored import ScoredTree

Advantages = Callable[[Sequence[float]], list[float]]
Comparison = Callable[[ScoredTree, Advantages], Mapping[int, Sequence[float]]]


def grpo_advantages(rewards: Sequence[float], *, eps: float = 1e-6) -> list[float]:
    """(r_i - mean) / (std + eps) over one group, with the population standard deviation (PivotRL, Eq. 1).

    `rewards` are those of the scored rollouts only: a censored one takes part in neither mean nor deviation. With the
    population deviation the rarest success has the largest advantage. With leave-one-out mean and deviation a lone
    success of 16 would get 1.00 (the 15 others agree, so nothing scales it) and one of two successes 3.62.

    >>> [round(a, 3) for a in grpo_advantages([1.0, 0.0, 0.0, 0.0])]
    [1.732, -0.577, -0.577, -0.577]
    """
    centred = mean_centred(rewards)
    if not any(centred):
        return centred
    std = math.sqrt(math.fsum(a * a for a in centred) / len(rewards))
    return [a / (std + eps) for a in centred]


def mean_centred(rewards: Sequence[float]) -> list[float]:
    """r_i - mean: no division by a deviation, which would weigh tasks by their difficulty (Dr. GRPO).

    On independent rollouts its policy gradient is (G - 1)/G times the true one, in expectation.
    """
    if not rewards or is_zero_variance(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def rloo(rewards: Sequence[float]) -> list[float]:
    """r_i minus the mean of the *others*, which is G/(G - 1) times `mean_centred`: unbiased on independent rollouts.

    >>> rloo([1.0, 0.0, 0.0])
    [1.0, -0.5, -0.5]
    """
    others = max(len(rewards) - 1, 1)
    return [a * len(rewards) / others for a in mean_centred(rewards)]


@dataclass(frozen=True)
class BatchStandardised:
    """REINFORCE++ (Hu et al. 2025): (r_i - mean) / (std + eps) with the mean and the population standard deviation of
    all scored rollouts of a batch, whatever their task (`over`). So a group of equal rewards moves the policy too. Of
    one group alone it is `grpo_advantages`, by which filters decide, before the batch is whole. The authors' code
    standardises over tokens, where long rollouts weigh more.
    """

    mean: float | None = None
    std: float = 0.0
    eps: float = 1e-6

    def over(self, rewards: Sequence[float]) -> BatchStandardised:
        if not rewards:
            return self
        std = 0.0 if is_zero_variance(rewards) else statistics.pstdev(rewards)
        return BatchStandardised(statistics.fmean(rewards), std, self.eps)

    def __call__(self, rewards: Sequence[float]) -> list[float]:
        if self.mean is None:
            return grpo_advantages(rewards, eps=self.eps)
        return [(reward - self.mean) / (self.std + self.eps) if self.std else 0.0 for reward in rewards]


# comparisons


def across_leaves(scored: ScoredTree, advantages: Advantages) -> dict[int, list[float]]:
    """Compare every leaf with every other one, forked siblings and refills included (GRPO; ARPO on branched groups)."""
    return scored.at_trained(advantages(scored.rewards))


def across_starts(scored: ScoredTree, advantages: Advantages) -> dict[int, list[float]]:
    """Compare every leaf with the values of the *other initial* starts; it takes the place of its own start.

    The baseline is then independent of the reward that it is compared with: siblings are not baselines of each other
    (they share tokens), and refills are not baselines at all (their number depends on outcomes). Without forks and
    refills this is `across_leaves`.
    """
    initial = {start: scored.value(start) for start in scored.initial_starts}
    found = [0.0] * len(scored.leaves)
    for start in (*scored.initial_starts, *scored.refilled_starts):
        for i in scored.below[start]:
            group = initial | {start: scored.rewards[i]}
            found[i] = advantages(list(group.values()))[list(group).index(start)]
    return scored.at_trained(found)


def across_siblings(scored: ScoredTree, advantages: Advantages) -> dict[int, list[float]]:
    """Compare every branch with the other branches of its fork, by value; the initial starts count as siblings.

    A node takes the advantage of the branch it lies in: what that choice gained over its alternatives. Later forks do
    not change it. Use `mean_centred` or `rloo`: the standard deviation of two branches makes every difference +-1.
    """
    branch: dict[int, float] = dict.fromkeys(scored.refilled_starts, 0.0)
    initial = [scored.value(start) for start in scored.initial_starts]
    for start in scored.refilled_starts:
        branch[start] = advantages([*initial, scored.value(start)])[-1]
    live = [[n for n in scored.tree.children(fork) if n in scored.below] for fork in scored.tree.branch_points()]
    for siblings in (scored.initial_starts, *(children for children in live if len(children) > 1)):
        branch |= zip(siblings, advantages([scored.value(n) for n in siblings]), strict=True)
    at: dict[int | None, float] = {}
    for node in scored.below:  # parents first
        at[node] = branch.get(node, at.get(scored.tree[node].parent, 0.0))
    return {node: [at[node]] * len(scored.below[node]) for node in scored.trained}


def last_observation(tree: RolloutTree, node: Node) -> Hashable:
    """What the policy saw last before it sampled `node`: the tokens of the given node above it. Where a fork split the
    turn, the part after the fork shares its state with its siblings only."""
    if node.parent is None:
        return ()
    above = tree[node.parent]
    return above.id if above.sampled else above.token_ids


@dataclass(frozen=True, kw_only=True)
class AcrossAnchors(Bounded):
    """GiGPO: the advantage of the rollout plus `step_weight` times the advantage of the step.

    A step is compared, by discounted return-to-go, with all steps of the group that were taken at the same state. A
    step whose state occurs only once gets no step advantage. `state` names the state of a step: children of a fork
    have the same state, and so have any steps where the same state was reached twice.
    """

    step_weight: Amount = 1.0
    discount: Annotated[float, Between(above=0, most=1)] = 0.95
    state: Callable[[RolloutTree, Node], Hashable] = last_observation

    def __call__(self, scored: ScoredTree, advantages: Advantages) -> dict[int, list[float]]:
        episode = across_leaves(scored, advantages)
        groups: dict[Hashable, list[int]] = {}
        for node in scored.trained:
            groups.setdefault(self.state(scored.tree, scored.tree[node]), []).append(node)
        step: dict[int, float] = {}
        for steps in groups.values():
            if len(steps) > 1:
                step |= zip(steps, advantages([self._return(scored, n) for n in steps]), strict=True)
        return {n: [a + self.step_weight * step.get(n, 0.0) for a in at_node] for n, at_node in episode.items()}

    def _return(self, scored: ScoredTree, node: int) -> float:
        """One number per sampling event, however many leaves it led to."""
        turn = scored.tree[node].turn
        ahead = {i: scored.tree[scored.leaves[i]].turn - turn for i in scored.below[node]}
        return scored.mean_of([*ahead], {i: scored.rewards[i] * self.discount**t for i, t in ahead.items()})


# rewards of turns


def turn_advantages(scored: ScoredTree, weights: Mapping[str, float], discount: float) -> dict[int, list[float]]:
    """What the environment says after each turn, credited to the turns that led there: for every trained node, the
    advantages of the leaves below it, in the unit of the weights.

    `weights` name what is said: "progress" is what `Observation.progress` gained (0 before the first), any other name
    one of its metrics. With u_k the reward of turn k of a rollout, the return of turn t is

        U_t = sum_{k >= t} discount^(k - t) u_k

    and its advantage is U_t minus the mean U_t of the *other* initial starts that have a turn t (minus nothing where
    none has). What is subtracted depends on no token that it is subtracted from, so with discount 1 and path weights
    the gradient is that of E[sum_k u_k] exactly, under forks and unequal lengths, too. The usual baseline, a mean over
    all turns of a group, is biased there: long rollouts are in it more often than short ones.
    """
    returns = [_returns(scored, leaf, weights, discount) for leaf in scored.leaves]
    values: dict[int, dict[int, float]] = {}  # by turn, then start
    starts = scored.initial_starts
    for turn in {turn for by_turn in returns for turn in by_turn}:
        of_turn = [by_turn.get(turn, 0.0) for by_turn in returns]
        reached = {start: [i for i in scored.below[start] if turn in returns[i]] for start in starts}
        values[turn] = {start: scored.mean_of(below, of_turn) for start, below in reached.items() if below}
    start_of = {i: start for start in starts for i in scored.below[start]}
    baselines = {turn: _mean_of_others(by_start) for turn, by_start in values.items()}
    return {
        node: [returns[i][turn] - baselines[turn].get(start_of.get(i), 0.0) for i in scored.below[node]]
        for node, turn in ((node, scored.tree[node].turn) for node in scored.trained)
    }


def _mean_of_others(values: Mapping[int, float]) -> dict[int | None, float]:
    """For each of them the mean of the others, and for what is none of them the mean of all."""
    found: dict[int | None, float] = {None: statistics.fmean(values.values())} if values else {}
    whole = [*values.values()]
    if len(whole) > 1:
        found |= {start: statistics.fmean(whole[:n] + whole[n + 1 :]) for n, start in enumerate(values)}
    return found


def _returns(scored: ScoredTree, leaf: int, weights: Mapping[str, float], discount: float) -> dict[int, float]:
    """U_t of the rollout that ended at `leaf`, by turn."""
    rewards: dict[int, float] = {}
    progress = 0.0
    for node in map(scored.tree.__getitem__, scored.tree.nodes_of(leaf)):
        if node.turn:
            metrics = dict(node.metrics)
            if "progress" in metrics:
                metrics["progress"], progress = metrics["progress"] - progress, metrics["progress"]
            reward = math.fsum(weight * metrics.get(name, 0.0) for name, weight in weights.items())
            rewards[node.turn] = rewards.get(node.turn, 0.0) + reward
    ahead = 0.0
    for turn in sorted(rewards, reverse=True):
        rewards[turn] = ahead = rewards[turn] + discount * ahead
    return rewards
