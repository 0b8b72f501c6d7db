"""Branchers that decide while rollouts are under way: at random, at given turns, or where token entropy has risen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from turntree.branching.pace import Pace
from turntree.core import seeds
from turntree.core.config import at_least
from turntree.core.errors import ConfigError
from turntree.core.protocols import BranchDecision, Expansion, FinishedRollouts, ForkMoment


class Undeterred:
    """Base of branchers: does not expand finished trees and learns nothing from earlier iterations."""

    splits_turns = False  # whether branches may share the first tokens of the turn in which they fork
    biased = False  # whether forks are chosen by what was sampled below them

    def expand(self, group: FinishedRollouts) -> Sequence[Expansion]:
        return ()

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


class Paced(Undeterred):
    """A brancher whose only state from earlier iterations is its pace."""

    def __init__(self) -> None:
        self._pace = Pace()

    def state(self) -> dict[str, Any]:
        return self._pace.state()

    def restore(self, state: dict[str, Any]) -> None:
        self._pace.restore(state)


class FixedBrancher(Undeterred):
    """Forks into `branches` before each turn in `turns` that follows a tool result, while the budget lasts.

    Args:
        branches: Z, rollouts that go on from a fork, the rollout itself among them.
        turns: The turns that fork.
    """

    def __init__(self, *, branches: int = 2, turns: tuple[int, ...] = (2,)) -> None:
        if any(turn < 2 for turn in turns):
            raise ConfigError("a fork follows a tool result: turns count from 2 here", field="turns")
        self.turns, self.branches = frozenset(turns), branches
        at_least(self, branches=2)

    def decide(self, moment: ForkMoment) -> BranchDecision | None:
        if moment.turn not in self.turns:
            return None
        return bounded(moment, self.branches, "a given turn", {})


class RandomBrancher(Paced):
    """The control of `EntropyBrancher`: forks with probability `rate`, independent of what was sampled.

    With `rate` None it keeps the pace of a paced `EntropyBrancher`: the same probability at the same turn and budget,
    at random instead of by entropy.

    Args:
        branches: Z, rollouts that go on from a fork, the rollout itself among them.
        probe_tokens: k; only turns of at least k tokens fork, and the branches share the first k - 1.
        rate: The chance of a fork (default: the pace of entropy).
        alpha: The chance in the first iteration, where there is no pace yet.
    """

    def __init__(
        self, *, branches: int = 2, probe_tokens: int = 20, rate: float | None = None, alpha: float = 0.5
    ) -> None:
        super().__init__()
        if rate is not None and not 0 <= rate <= 1:
            raise ConfigError("must be in [0, 1]", field="rate")
        self.branches, self.probe_tokens, self.rate, self.alpha = branches, probe_tokens, rate, alpha
        at_least(self, branches=2, probe_tokens=1)
        self.splits_turns = probe_tokens > 1

    def decide(self, moment: ForkMoment) -> BranchDecision | None:
        if len(moment.entropies[-1]) < self.probe_tokens:
            return None
        self._pace.tell(moment)
        rate = self.rate
        if rate is None:
            paced = self._pace.rate(moment, self.branches)
            rate = self.alpha if paced is None else paced
        if drawn(moment) < rate:
            return bounded(moment, self.branches, "drawn to fork", {"rate": rate}, shared=self.probe_tokens - 1)
        return BranchDecision(branches=1, reason="drawn to go on", numbers={"rate": rate})


class EntropyBrancher(Paced):
    """ARPO's rule, decided only on what is known at the fork.

    H is the mean entropy of the first `probe_tokens` tokens of the turn after a tool result, H_0 that of the first
    tokens of the rollout's own first turn, both over the full vocabulary in nats per token;

        dH = (H - H_0) / ln(vocabulary),    P = alpha + beta dH,    fork where P > tau

    (paper, Branch(Z); it does not define `Normalize`, here a change from certain to uniform is 1). The branches share
    the first k - 1 tokens, and each samples the k-th token itself from the distribution of the k-th entropy. So the
    decision uses nothing below the fork. A turn that ends within the probe does not fork.

    `paced` replaces tau by the quantile of P, among earlier moments at the same turn, that spends the budget (`Pace`).
    alpha, beta and tau then matter in the first iteration only.

    Args:
        branches: Z, rollouts that go on from a fork, the rollout itself among them.
        probe_tokens: k, the number of first entropies to look at; only longer turns can fork.
        alpha: The base probability.
        beta: Weight of the change of entropy.
        tau: Unpaced: the threshold.
        paced: Adapt the threshold to the budget, from the second iteration on.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        branches: int = 2,
        probe_tokens: int = 20,
        alpha: float = 0.5,
        beta: float = 0.2,
        tau: float = 0.5,
        paced: bool = True,
    ) -> None:
        super().__init__()
        if beta <= 0:
            raise ConfigError("must be above 0: forks are for where entropy rises", field="beta")
        self.probe_tokens, self.branches, self.paced = probe_tokens, branches, paced
        at_least(self, branches=2, probe_tokens=1)
        self.splits_turns = probe_tokens > 1
        self.alpha, self.beta, self.tau = alpha, beta, tau
        self._most = math.log(vocabulary)

    def decide(self, moment: ForkMoment) -> BranchDecision | None:
        if len(moment.entropies[-1]) < self.probe_tokens:
            return None
        entropy, initial = self._mean(moment.entropies[-1]), self._mean(moment.entropies[0])
        change = (entropy - initial) / self._most
        value, threshold = self.alpha + self.beta * change, self.tau
        numbers = {"entropy": entropy, "initial_entropy": initial, "change": change, "value": value}
        self._pace.tell(moment, value)
        rate = self._pace.rate(moment, self.branches) if self.paced else None
        if rate is not None:
            numbers["rate"], threshold = rate, self._pace.threshold(moment.turn, rate)
        if math.isfinite(threshold):
            numbers["threshold"] = threshold
        if value > threshold:
            return bounded(moment, self.branches, "entropy rose", numbers, shared=self.probe_tokens - 1)
        return BranchDecision(branches=1, reason="entropy did not rise enough", numbers=numbers)

    def _mean(self, entropies: Sequence[float]) -> float:
        probe = entropies[: self.probe_tokens]
        return math.fsum(probe) / len(probe)


def bounded(
    moment: ForkMoment, branches: int, reason: str, numbers: dict[str, float], *, shared: int = 0
) -> BranchDecision:
    """A fork into `branches`, or into fewer where the budget is smaller."""
    allowed = min(branches, moment.budget + 1)
    if allowed < 2:
        return BranchDecision(branches=1, reason=f"{reason}, but no leaf is left to add", numbers=numbers)
    return BranchDecision(branches=allowed, reason=reason, numbers=numbers, shared=shared)


def drawn(moment: ForkMoment) -> float:
    """A uniform draw in [0, 1), keyed by this moment."""
    return seeds.generator(moment.seed, "branch", moment.task_id, *moment.key, moment.turn).random()
