"""Credit: three numbers per node that reproduce the objective of all rollouts through it.

With r = pi / pi_old of a token (the same for every leaf below its node), leaf advantages A_i and leaf weights w_i,

    sum_i w_i min(r A_i, clip(r, 1-lo, 1+hi) A_i) = P min(r, 1+hi) + N max(r, 1-lo)

with P = sum_i w_i max(A_i, 0) and N = sum_i w_i min(A_i, 0) (docs/design/credit.md, three numbers a
node). So a token that k rollouts share is computed once, and the gradient is that of k flat rows.

An estimator is a `CreditRule`, which composes four functions: how much a leaf weighs (`scored`), which rewards are
compared and how the rewards of one comparison become advantages (`comparisons`), and how the leaves below a node
become its three numbers (an attribution, here). To write another estimator, replace one of them. A prefix that rollouts
share weighs what the leaves below it weigh together: `scored` gives their weights, the attribution sums them at the
node, `train.losses` reads P and N of each token. Called by `rollout.service` and `train.pivot` (`credit.checked`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from turntree.core.errors import ConfigError
from turntree.core.labels import Credit, NodeCredit, Rewards
from turntree.core.outcome import is_zero_variance
from turntree.core.tree import RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.credit.comparisons import (
    Advantages,
    BatchStandardised,
    Comparison,
    across_leaves,
    grpo_advantages,
    turn_advantages,
)
from turntree.credit.scored import LeafWeights, ScoredTree, path_weighted, positions_below, unit_weights

# For the leaves i at or below one node: the weights w_i, the shares w_i / Z_i (equal to w_i unless each rollout is
# divided by its length) and the advantages A_{i,n}.
Attribution = Callable[[Sequence[float], Sequence[float], Sequence[float]], NodeCredit]


def soft(weights: Sequence[float], shares: Sequence[float], advantages: Sequence[float]) -> NodeCredit:
    """Each leaf keeps its own advantage at every node above it (ARPO's default, plain GRPO)."""
    pairs = list(zip(shares, advantages, strict=True))
    return NodeCredit(
        positive=math.fsum(s * max(a, 0.0) for s, a in pairs),
        negative=math.fsum(s * min(a, 0.0) for s, a in pairs),
        multiplicity=math.fsum(shares),
    )


def hard(weights: Sequence[float], shares: Sequence[float], advantages: Sequence[float]) -> NodeCredit:
    """Every leaf takes the weighted mean advantage of the leaves below the node (ARPO's hard assignment).

    Without clipping this has the gradient of `soft`. They differ once the ratio leaves the clip range, because P and N
    are clipped on different sides.
    """
    return soft(weights, shares, [_mean(weights, advantages)] * len(advantages))


def hard_dedup(weights: Sequence[float], shares: Sequence[float], advantages: Sequence[float]) -> NodeCredit:
    """`hard` with the node counted once, however many leaves share it: a shared prefix weighs as much as a tail."""
    return soft([1.0], [1.0], [_mean(weights, advantages)])


def _mean(weights: Sequence[float], advantages: Sequence[float]) -> float:
    return math.fsum(w * a for w, a in zip(weights, advantages, strict=True)) / math.fsum(weights)


@dataclass(frozen=True, kw_only=True)
class CreditRule:
    """An estimator (`core.protocols.Estimator`); the default is plain GRPO.

    `per_rollout` divides the weight of each leaf by its number of trained tokens, so that long rollouts do not
    outweigh short ones (GRPO's mean over rollouts of token means; train with `normalizer="rollouts"`). The factor
    differs between the leaves below one node, so it is folded in here; it cannot be divided out later.
    """

    advantages: Advantages = grpo_advantages
    comparison: Comparison = across_leaves
    leaf_weights: LeafWeights = unit_weights
    attribution: Attribution = soft
    per_rollout: bool = False
    turn_rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    turn_discount: float = 1.0

    def __post_init__(self) -> None:
        if self.per_rollout and self.attribution is hard_dedup:
            raise ConfigError(
                "counts a node once, and its rollouts differ in length",
                field="attribution",
                hint="use normalizer 'tokens' or 'constant' with hard_dedup",
            )

    def over(self, batch: Sequence[Rewards]) -> CreditRule:
        """This estimator for the groups of a batch, which matters where advantages are standardised over it."""
        if not isinstance(self.advantages, BatchStandardised):
            return self
        scored = [reward for rewards in batch for reward in rewards.scored().values()]
        return replace(self, advantages=self.advantages.over(scored))

    def __call__(self, tree: RolloutTree, rewards: Rewards) -> Credit:
        """Label the completions of the scored rollouts that have a weight; all others stay untrained.

        Raises ValueError when the rewards do not label exactly the ends of rollouts, or reward a censored one.
        """
        rewards.check(tree)
        self._check_parts(tree)
        scored = rewards.scored()
        if scored and any(tree.stop_reason(leaf) is StopReason.GATED for leaf in tree.leaves()):
            # which ones had completed depended on the outcome
            raise ValueError(f"{tree.task_id!r} was gated: its completed leaves must not carry rewards either")
        weighting = self.leaf_weights(tree, tuple(scored))
        facts = _counted(tree, scored, weighting.weights)
        lengths = facts.trained_tokens
        trained = set(facts.trained)
        own = {node: reward for node, reward in rewards.completions.items() if node in trained}
        nodes = self._label(facts, lengths, own)
        return Credit(
            nodes=nodes,
            rollout_tokens=self._tokens(facts, lengths, nodes),
            rollouts=math.fsum(w for w, n in zip(facts.weights, lengths, strict=True) if n),  # one without has no mean
            zero_variance=is_zero_variance([*facts.rewards, *own.values()])
            and not any(one.positive or one.negative for one in nodes.values()),
            censored=len(rewards.verdicts) - len(scored),
            uncounted=len(scored) - len(facts.leaves),
            redistributed=weighting.redistributed,
        )

    def _check_parts(self, tree: RolloutTree) -> None:
        """Refuse what reads a fork or a start as a draw of the sampler, where an agent made them, or a template that
        drops thoughts."""
        if not tree.parts():
            return
        problem = f"the rollouts of {tree.task_id!r} have branches that were not drawn (rewritten contexts)"
        if self.comparison is not across_leaves:
            raise ConfigError(problem, field="comparison", hint="use 'leaves', which compares whole rollouts")
        if self.leaf_weights is path_weighted:
            raise ConfigError(problem, field="leaf_weights", hint="use 'unit', which counts every rollout once")

    def _label(self, scored: ScoredTree, lengths: Sequence[int], own: Mapping[int, float]) -> dict[int, NodeCredit]:
        shares = scored.weights
        if self.per_rollout:
            shares = [w / max(n, 1) for w, n in zip(scored.weights, lengths, strict=True)]
        found = {**self.comparison(scored, self.advantages), **self._of_completions(scored, own)}
        if self.turn_rewards:
            for node, more in turn_advantages(scored, self.turn_rewards, self.turn_discount).items():
                found[node] = [a + b for a, b in zip(found[node], more, strict=True)]
        return {
            node: self.attribution(
                [scored.weights[i] for i in scored.below[node]], [shares[i] for i in scored.below[node]], advantages
            )
            for node, advantages in found.items()
        }

    def _of_completions(self, scored: ScoredTree, own: Mapping[int, float]) -> dict[int, list[float]]:
        """The advantages of completions with a reward of their own: it stands in for that of their rollout among the
        others, so that no baseline changes and the rollout still counts once."""
        found: dict[int, list[float]] = {}
        for node, reward in own.items():
            groups = [(i, [*scored.rewards[:i], reward, *scored.rewards[i + 1 :]]) for i in scored.below[node]]
            found[node] = [self.advantages(group)[i] for i, group in groups]
        return found

    def _tokens(self, scored: ScoredTree, lengths: Sequence[int], nodes: dict[int, NodeCredit]) -> float:
        if self.per_rollout:  # the multiplicities have been divided by the lengths already
            return math.fsum(w * n for w, n in zip(scored.weights, lengths, strict=True))
        return math.fsum(c.multiplicity * len(scored.tree[n].token_ids) for n, c in nodes.items())


@dataclass(frozen=True, kw_only=True)
class GreedyBaseline(CreditRule):
    """ReMax (Li et al. 2024): r_i minus the reward of a greedy rollout of the task, which is the first of the group
    (`SchedulerConfig.greedy_first`) and is not trained on. Where it has no reward, or a rollout has no turn, so that
    the first is not known, nothing of the group is trained on."""

    def __call__(self, tree: RolloutTree, rewards: Rewards) -> Credit:
        starts, ends = tree.starts(), rewards.verdicts
        first = [leaf for leaf in ends if len(starts) == len(ends) and starts[0] in tree.nodes_of(leaf)]
        baseline = ends[first[0]].reward if first else None
        hidden = first if baseline is not None else [*ends]
        untrained = dict.fromkeys(hidden, Verdict(None, "the greedy baseline, or a group without one"))
        rule = replace(self, advantages=partial(above, baseline or 0.0))
        credit = CreditRule.__call__(rule, tree, replace(rewards, verdicts={**ends, **untrained}))
        return replace(credit, censored=len(ends) - len(rewards.scored()))


def above(baseline: float, rewards: Sequence[float]) -> list[float]:
    return [reward - baseline for reward in rewards]


def _counted(tree: RolloutTree, scored: dict[int, float], weights: Sequence[float]) -> ScoredTree:
    """Only the scored leaves that have a weight: the others enter no comparison and are not trained on."""
    kept = {leaf: w for leaf, w in zip(scored, weights, strict=True) if w > 0}
    rewards = tuple(scored[leaf] for leaf in kept)
    return ScoredTree(tree, tuple(kept), rewards, tuple(kept.values()), positions_below(tree, tuple(kept)))
