"""`python studies/run.py premise`: is there something for branching by entropy to exploit?

Two questions to a frozen policy. Does token entropy rise after tool results? And do forks at high entropy show more
variance of reward between their children than forks anywhere? For every probe length k rollouts are forked at random
after tool results, as a brancher that looks at k entropies forks them: the children share k - 1 tokens, and the k
entropies up to the first token that they draw themselves are all that was known. Among as many children as a fork has
here the variance can be seen.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from configs import PremiseConfig
from ranks import spearman
from scipy.stats import rankdata

from turntree.core.config import to_mapping
from turntree.core.labels import Rewards
from turntree.core.progress import progress
from turntree.core.tree import Node, NodeKind, RolloutTree
from turntree.decide.branching.rules import RandomBrancher
from turntree.env.tasks import TRAIN, open_tasks
from turntree.rollout.scheduler import Scheduler, SchedulerConfig
from turntree.run.files import write_json
from turntree.stages.policy import load_policy, policy_name

SCHEMA = "turntree.premise/1"
POSITIONS = 12  # tokens of a turn whose mean entropy is shown one by one


@dataclass(frozen=True)
class ForkSeen:
    """A fork: its question, the turn that it forked, the mean of the k entropies known there and of those that the
    rollout's first turn began with, and the reward of each child (one leaf each: the budget is spent at the fork)."""

    task: str
    turn: int
    entropy: float
    initial: float
    rewards: tuple[float, ...]

    @property
    def variance(self) -> float:
        return float(np.var(self.rewards))


def run_premise(config: PremiseConfig, out: Path) -> dict[str, Any]:
    """Measure and write `out` (JSON)."""
    policy = load_policy(policy_name(config.model, config.environment), config.device)
    leaves = config.initial * config.children
    rollouts = SchedulerConfig(
        episodes=config.episodes, group_size=leaves, initial_rollouts=config.initial, max_live_rollouts=128
    )
    profile = EntropyProfile()
    found: dict[str, Any] = {}
    splits = {TRAIN: config.count}
    with open_tasks(config.environment, splits, seed=config.task_seed, model=policy.source) as opened:
        tasks = opened.of(TRAIN)
        for k in config.probes:
            brancher = RandomBrancher(rate=config.rate, branches=config.children, probe_tokens=k)
            scheduler = Scheduler(policy.engine, policy.renderer, rollouts, pool=opened.pool, brancher=brancher)
            run = scheduler.run(tasks, seed=config.seed)
            forks: list[ForkSeen] = []
            for group in progress(run, f"premise, k = {k}", total=len(tasks)):
                forks += forks_of(group.tree, group.rewards)
                if k == 1:  # whole turns
                    profile.see(group.tree)
            found[str(k)] = against_variance(forks)
    result = {
        "schema": SCHEMA,
        "policy_hash": policy.hash,
        "config": to_mapping(config),
        "profile": profile.summary(),
        "variance": found,
    }
    write_json(out, result)
    return result


class EntropyProfile:
    """Mean entropy (nats a token) by position in the turn: of first turns, and of turns after a result of each tool.

    Only the first branch of a fork is followed, so rollouts count as if they were not forked."""

    def __init__(self) -> None:
        self._seen: dict[str, list[tuple[float, ...]]] = defaultdict(list)

    def see(self, tree: RolloutTree) -> None:
        for start in tree.starts():
            below: tuple[int, ...] = (start,)
            while below:
                node = tree[below[0]]
                if node.entropies and node.parent is not None:
                    self._seen[_asked_after(tree[node.parent])].append(node.entropies)
                below = tree.children(node.id)

    def summary(self) -> dict[str, Any]:
        return {
            after: {
                "turns": len(turns),
                "mean": float(np.mean([entropy for turn in turns for entropy in turn])),
                "by_position": [
                    float(np.mean([turn[position] for turn in turns if len(turn) > position]))
                    for position in range(min(POSITIONS, max(map(len, turns))))
                ],
            }
            for after, turns in sorted(self._seen.items())
        }


def _asked_after(above: Node) -> str:
    """What came before a turn: the task, or the result of a tool."""
    said = above.message
    if said is None or above.kind is NodeKind.PROMPT:
        return "task"
    return said.name or said.role


def forks_of(tree: RolloutTree, rewards: Rewards) -> Iterator[ForkSeen]:
    """The forks of a tree whose children all have one scored leaf each."""
    for point in tree.branch_points():
        children = tree.children(point)
        below = [_leaves(tree, child) for child in children]
        scored = [rewards.of(leaves[0]) for leaves in below if len(leaves) == 1]
        if len(scored) < len(below) or any(reward is None for reward in scored):
            continue
        known = (*(tree[point].entropies or ()), *(tree[children[0]].entropies or ())[:1])
        first = next(node for node in tree.path(point) if node.sampled).entropies or ()
        yield ForkSeen(
            tree.task_id,
            tree[children[0]].turn,
            float(np.mean(known)),
            float(np.mean(first[: len(known)])),
            tuple(reward for reward in scored if reward is not None),
        )


def _leaves(tree: RolloutTree, node: int) -> list[int]:
    children = tree.children(node)
    return [leaf for child in children for leaf in _leaves(tree, child)] if children else [node]


def against_variance(forks: Sequence[ForkSeen], *, resamples: int = 2000) -> dict[str, Any]:
    """Between-child reward variance of the forks in the upper half by entropy (that of the turn, and its change since
    the first turn) over that of the lower half, and the rank correlation of the two, with 95% bootstrap intervals over
    questions. Halves and ranks are taken turn by turn, so that early and late turns are not compared; a fork
    that is alone at its turn is left out."""
    at_turn = Counter(fork.turn for fork in forks)
    known = [fork for fork in forks if at_turn[fork.turn] > 1]
    found: dict[str, Any] = {"forks": len(known), "alone_at_their_turn": len(forks) - len(known)}
    if len(known) < 10:
        return found
    variance, turns = np.array([fork.variance for fork in known]), np.array([fork.turn for fork in known])
    entropy = np.array([fork.entropy for fork in known])
    change = entropy - np.array([fork.initial for fork in known])
    found["mean_variance"] = float(variance.mean())
    for name, score in (("entropy", entropy), ("change", change)):
        ranks, others = _within(score, turns), _within(variance, turns)
        samples = list(_resampled([fork.task for fork in known], resamples))
        ratios = [_ratio(variance[rows], ranks[rows] > 0) for rows in samples]
        correlations = [spearman(ranks[rows], others[rows]) for rows in samples]
        found[name] = {
            "upper_over_lower": _ratio(variance, ranks > 0),
            "interval": _interval([ratio for ratio in ratios if ratio is not None]),
            "spearman": spearman(ranks, others),
            "spearman_interval": _interval([value for value in correlations if value is not None]),
        }
    return found


def _within(values: np.ndarray, turns: np.ndarray) -> np.ndarray:
    """The rank of each value among those of its turn, from -1 to 1; above 0 is the upper half."""
    ranks = np.zeros(len(values))
    for turn in np.unique(turns):
        rows = np.flatnonzero(turns == turn)
        ranks[rows] = 2 * (rankdata(values[rows]) - 0.5) / len(rows) - 1
    return ranks


def _resampled(tasks: Sequence[str], resamples: int) -> Iterator[np.ndarray]:
    """Row indices of bootstrap samples that draw whole tasks: rows of one task are not independent."""
    members: dict[str, list[int]] = {}
    for row, task in enumerate(tasks):
        members.setdefault(task, []).append(row)
    rows = [np.array(each) for each in members.values()]
    generator = np.random.default_rng(0)
    for _ in range(resamples):
        yield np.concatenate([rows[drawn] for drawn in generator.integers(len(rows), size=len(rows))])


def _interval(values: list[float]) -> list[float] | None:
    return np.quantile(values, [0.025, 0.975]).tolist() if values else None


def _ratio(variance: np.ndarray, upper: np.ndarray) -> float | None:
    if not upper.any() or upper.all() or variance[~upper].mean() == 0:
        return None
    return float(variance[upper].mean() / variance[~upper].mean())


def lines(result: dict[str, Any]) -> Iterable[str]:
    for after, row in result["profile"].items():
        start = ", ".join(f"{value:.2f}" for value in row["by_position"][:8])
        yield f"after {after}: {row['mean']:.3f} nats a token over {row['turns']} turns; by position {start}"
    for k, row in result["variance"].items():
        found = row.get("entropy")
        if found is None or None in (found["interval"], found["spearman_interval"]):
            why = "too few to compare" if found is None else "without differences in variance to compare"
            yield f"k = {k}: {row['forks']} forks, {why}"
            continue
        low, high = found["interval"]
        less, more = found["spearman_interval"]
        yield (
            f"k = {k}: mean variance {row['mean_variance']:.3f} of {row['forks']} forks; upper over lower half by "
            f"entropy {found['upper_over_lower']:.2f} [{low:.2f}, {high:.2f}], rank correlation "
            f"{found['spearman']:.2f} [{less:.2f}, {more:.2f}]: {_verdict(low, high)}"
        )


def _verdict(low: float, high: float) -> str:
    """What an interval of the ratio means for branching by entropy."""
    if low > 1:
        return "forks at high entropy teach more"
    return "forks at high entropy teach less" if high < 1 else "no difference is shown"
