"""`turntree experiment premise`: has branching by entropy anything to exploit?

Two questions to a frozen policy. Does token entropy rise after tool results? And do forks at high entropy show more
variance of reward between their children than forks anywhere? For every probe length k rollouts are forked at random
after tool results, as a brancher that looks at k entropies forks them: the children share k - 1 tokens, and the k
entropies up to the first token that they draw themselves are all that was known. Among as many children as a fork has
here the variance can be seen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from turntree.branching.rules import RandomBrancher
from turntree.core.config import to_mapping
from turntree.core.errors import ConfigError
from turntree.core.labels import Rewards
from turntree.core.tree import Node, RolloutTree
from turntree.observe.files import write_json
from turntree.observe.run import progress
from turntree.observe.statistics import percentile_interval, resampled, spearman
from turntree.rollouts.live import EpisodeConfig
from turntree.rollouts.scheduler import Scheduler, SchedulerConfig
from turntree.stages.policy import Device, load_policy
from turntree.stages.questions import QuestionsConfig, open_questions

SCHEMA = "turntree.premise/1"
POSITIONS = 12  # tokens of a turn whose mean entropy is shown one by one


@dataclass(frozen=True, kw_only=True)
class PremiseConfig:
    """`questions.count` questions, `initial` rollouts of each, each forked once, with probability `rate` a tool result,
    into `children`; all of it once for each k in `probes`."""

    model: str = "qa"
    questions: QuestionsConfig = field(default_factory=lambda: QuestionsConfig(count=150, held_out_count=1))
    episodes: EpisodeConfig = field(default_factory=EpisodeConfig)
    initial: int = 4
    children: int = 8
    rate: float = 0.4
    probes: tuple[int, ...] = (1, 2, 3, 4)
    seed: int = 0
    device: Device = field(default_factory=Device)

    def __post_init__(self) -> None:
        if self.initial < 1 or self.children < 2 or not self.probes or min(self.probes) < 1:
            raise ConfigError("needs a rollout, 2 children and probes of at least 1 token", field="children")


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
    policy = load_policy(config.model, config.device)
    leaves = config.initial * config.children
    rollouts = SchedulerConfig(
        episodes=config.episodes, group_size=leaves, initial_rollouts=config.initial, max_live_rollouts=128
    )
    profile = EntropyProfile()
    found: dict[str, Any] = {}
    with open_questions(config.questions) as questions:
        for k in config.probes:
            brancher = RandomBrancher(rate=config.rate, branches=config.children, shared=k - 1)
            scheduler = Scheduler(policy.engine, policy.renderer, rollouts, pool=questions.pool, brancher=brancher)
            run = scheduler.run(questions.tasks, seed=config.seed)
            forks: list[ForkSeen] = []
            for group in progress(run, f"premise, k = {k}", total=len(questions.tasks)):
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
    """Mean entropy (nats a token) by position in the turn: of first turns, and of turns after a result of each tool."""

    def __init__(self) -> None:
        self._seen: dict[str, list[tuple[float, ...]]] = defaultdict(list)

    def see(self, tree: RolloutTree) -> None:
        """Every sampled turn once."""
        for node in tree:
            if node.sampled and node.entropies and node.parent is not None:
                self._seen[_asked_after(tree[node.parent])].append(node.entropies)

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
    if above.message is None:
        return "task"
    return above.message.name or above.message.role


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


def against_variance(forks: Sequence[ForkSeen]) -> dict[str, Any]:
    """Between-child reward variance of the forks in the upper half by entropy (that of the turn, and its change since
    the first turn) over that of all, with 95% bootstrap intervals over questions. Halves are taken turn by turn, so
    that a difference is none between early and late turns."""
    found: dict[str, Any] = {"forks": len(forks)}
    if len(forks) < 10:
        return found
    variance, turns = np.array([fork.variance for fork in forks]), np.array([fork.turn for fork in forks])
    entropy = np.array([fork.entropy for fork in forks])
    change = entropy - np.array([fork.initial for fork in forks])
    found["mean_variance"] = float(variance.mean())
    for name, score in (("entropy", entropy), ("change", change)):
        upper = _upper_half(score, turns)
        samples = resampled([fork.task for fork in forks], resamples=2000, seed=0)
        ratios = [_ratio(variance[rows], upper[rows]) for rows in samples]
        found[name] = {
            "upper_half_over_all": _ratio(variance, upper),
            "interval": percentile_interval([ratio for ratio in ratios if ratio is not None]),
            "spearman": spearman(score, variance),
        }
    return found


def _upper_half(score: np.ndarray, turns: np.ndarray) -> np.ndarray:
    upper = np.zeros(len(score), dtype=bool)
    for turn in np.unique(turns):
        rows = np.flatnonzero(turns == turn)
        upper[rows] = score[rows] > np.median(score[rows])
    return upper


def _ratio(variance: np.ndarray, upper: np.ndarray) -> float | None:
    return float(variance[upper].mean() / variance.mean()) if upper.any() and variance.mean() > 0 else None


def lines(result: dict[str, Any]) -> Iterable[str]:
    for after, row in result["profile"].items():
        start = ", ".join(f"{value:.2f}" for value in row["by_position"][:8])
        yield f"after {after}: {row['mean']:.3f} nats a token over {row['turns']} turns; by position {start}"
    for k, row in result["variance"].items():
        if "entropy" in row:
            low, high = row["entropy"]["interval"]
            yield (
                f"k = {k}: mean variance {row['mean_variance']:.3f}, of the upper half by entropy over that of all "
                f"{row['forks']} forks "
                f"{row['entropy']['upper_half_over_all']:.2f} [{low:.2f}, {high:.2f}], Spearman "
                f"{row['entropy']['spearman']:.2f}"
            )
