"""Path-weighted means of what the scheduler grew are unbiased where forks are decided on what branches share.

Many groups of a world whose expected reward is enumerated (tests/token_world.py), grown by the real scheduler.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from fixed_brancher import FixedBrancher
from token_world import EPISODES, VOCABULARY, TokenRenderer, TokenWorld, WatchedEngine, expected_reward
from turntree.core.protocols import BranchDecision, Brancher, ForkMoment
from turntree.credit.scored import ScoredTree, path_weighted, positions_below
from turntree.decide.branching.published import ReleasedArpoBrancher
from turntree.decide.branching.rules import EntropyBrancher, RandomBrancher
from turntree.rollout.groups import GrownGroup
from turntree.rollout.scheduler import Scheduler, SchedulerConfig

GROUPS = 300
TAU = {1: 0.8, 2: 0.85, 3: 0.9}  # by tokens of the probe: about half of all turns lie above
ENOUGH = 4.0  # standard errors


def entropy(probe_tokens: int, kind: type[EntropyBrancher] = EntropyBrancher) -> EntropyBrancher:
    return kind(vocabulary=VOCABULARY, probe_tokens=probe_tokens, tau=TAU[probe_tokens], beta=1.0)


class SharesNothing(EntropyBrancher):
    """Decides on the probe, and lets branches draw it anew."""

    def decide(self, moment: ForkMoment) -> BranchDecision | None:
        decision = super().decide(moment)
        return decision and replace(decision, shared=0)


class LooksAhead(EntropyBrancher):
    """Decides on one token more than it should."""

    def decide(self, moment: ForkMoment) -> BranchDecision | None:
        decision = super().decide(moment)
        return decision and replace(decision, shared=max(0, decision.shared - 1))


HONEST: dict[str, Callable[[], Brancher]] = {
    "entropy of the first token": lambda: entropy(1),
    "entropy of two tokens": lambda: entropy(2),
    "entropy of three tokens": lambda: entropy(3),
    "random": lambda: RandomBrancher(rate=0.5, probe_tokens=1),
    "random, after a shared token": lambda: RandomBrancher(rate=0.5, probe_tokens=2),
    "fixed": lambda: FixedBrancher(turns=(2, 3), branches=3),
    "as released": lambda: ReleasedArpoBrancher(vocabulary=VOCABULARY, alpha=0.4, beta=0.5),
}
DISHONEST: dict[str, Callable[[], Brancher]] = {
    "decides on tokens that are not shared": lambda: entropy(2, SharesNothing),
    "decides on one token more than is shared": lambda: entropy(3, LooksAhead),
}


@functools.cache
def grown(name: str) -> tuple[GrownGroup, ...]:
    scheduler = Scheduler(
        WatchedEngine(),
        TokenRenderer(),
        SchedulerConfig(episodes=EPISODES, group_size=7, initial_rollouts=3),
        brancher={**HONEST, **DISHONEST}[name](),
    )
    return tuple(scheduler.run((TokenWorld(f"task {n}") for n in range(GROUPS)), seed=0))


@dataclass(frozen=True)
class Measured:
    mean: float
    standard_error: float

    @property
    def off(self) -> float:
        """By how many standard errors the mean misses the truth."""
        return abs(self.mean - expected_reward()) / self.standard_error


def measured(name: str) -> Measured:
    """The mean over groups of the mean over initial starts of the path-weighted mean of their leaves."""
    values = [_value_of_initial_starts(group) for group in grown(name)]
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return Measured(mean, math.sqrt(variance / len(values)))


def _value_of_initial_starts(group: GrownGroup) -> float:
    leaves = tuple(group.rewards.scored())
    scored = ScoredTree(
        tree=group.tree,
        leaves=leaves,
        rewards=tuple(group.rewards.scored().values()),
        weights=path_weighted(group.tree, leaves).weights,
        below=positions_below(group.tree, leaves),
    )
    values = [scored.value(start) for start in scored.initial_starts]
    assert len(values) == 3
    return math.fsum(values) / len(values)


@pytest.mark.parametrize("name", HONEST)
def test_path_weighted_means_hit_the_expected_reward(name: str) -> None:
    forks = sum(len(group.tree.branch_points()) for group in grown(name))
    assert forks > GROUPS / 2, "else this says nothing"
    found = measured(name)
    assert found.off < ENOUGH, found
    assert found.standard_error < 0.06 * expected_reward()


@pytest.mark.parametrize("name", DISHONEST)
def test_a_rule_that_looks_at_what_its_branches_do_not_share_is_caught_by_the_same_measure(name: str) -> None:
    assert measured(name).off > ENOUGH


@pytest.mark.parametrize("name", ["entropy of two tokens", "entropy of three tokens"])
def test_the_mean_over_all_leaves_is_biased_though_no_fork_is(name: str) -> None:
    """What GRPO on a branched group compares with: turns that were torn are counted more often."""
    means = [math.fsum(scored) / len(scored) for scored in _rewards(name)]
    mean = math.fsum(means) / len(means)
    error = math.sqrt(math.fsum((each - mean) ** 2 for each in means)) / len(means)
    assert abs(mean - expected_reward()) > ENOUGH * error


def _rewards(name: str) -> list[list[float]]:
    return [list(group.rewards.scored().values()) for group in grown(name)]
