"""Branchers that decide while rollouts are under way: at random, at given turns, or where token entropy has risen."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from turntree.core import seeds
from turntree.core.config import Between, Bounded, Positive, Share
from turntree.core.errors import ConfigError
from turntree.core.protocols import BranchDecision, Brancher, ForkMoment

ALPHA, BETA = 0.5, 0.2  # of ARPO's released scripts
WINDOW = 4  # iterations that are remembered
_Told = tuple[int, float, bool]  # turn, value, whether of an independent rollout
_ENOUGH = 16  # with fewer values at a turn, the values of all turns are used


@dataclass(kw_only=True, eq=False)
class Paced(Bounded, Brancher):
    """A brancher with a pace: how often to fork, and the quantiles of its values that give this rate, both from earlier
    iterations.

    A rollout that may still add b leaves, z - 1 per fork, forks with probability min(1, b / ((z - 1) n)). n is the mean
    number of moments that it still has ahead, this one included. n is counted per turn over the independent rollouts
    of the last iterations, since branches would count the same future twice. No rollout waits for others. Where
    rollouts are equally long, this spends the whole budget, evenly over their turns; a rollout that ends sooner than
    most leaves a part unspent. Moments of an iteration count from the next iteration on, so that no decision depends
    on the order of the calls.
    """

    branches: Annotated[int, Between(2)] = 2
    """Z, rollouts that go on from a fork, the rollout itself among them."""
    probe_tokens: Positive = 20
    """k; only turns of at least k tokens fork, and the branches share the first k - 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.splits_turns = self.probe_tokens > 1
        self._iteration = 0
        self._told: list[_Told] = []  # of this iteration
        self._window: list[list[_Told]] = []  # of the iterations before, oldest first
        self._refresh()

    def tell(self, moment: ForkMoment, value: float = 0.0) -> None:
        """Count a moment, with the value that a rule measured there."""
        if moment.iteration != self._iteration:
            self._window, self._told = self._remembered(), []
            self._iteration = moment.iteration
            self._refresh()
        self._told.append((moment.turn, value, len(moment.key) == 1))

    def _remembered(self) -> list[list[_Told]]:
        """The moments that the next iteration may use."""
        return [*self._window, sorted(self._told)][-WINDOW:] if self._told else self._window

    def _refresh(self) -> None:
        told = [each for iteration in self._window for each in iteration]
        self._alive = Counter(turn for turn, _, independent in told if independent)
        self._all = sorted(value for _, value, _ in told)
        self._by_turn: dict[int, list[float]] = {}
        for turn, value, _ in sorted(told):
            self._by_turn.setdefault(turn, []).append(value)

    def paced(self, moment: ForkMoment, branches: int) -> float | None:
        """The probability of a fork here; None until a first iteration is over."""
        if not self._alive:
            return None
        here = self._alive[moment.turn]
        ahead = sum(count for turn, count in self._alive.items() if turn >= moment.turn) / here if here else 1.0
        return min(1.0, moment.budget / (branches - 1) / ahead)

    def threshold(self, turn: int, rate: float) -> float:
        """The value that a share `rate` of the moments at this turn exceeded.

        A rule with this threshold forks as often at every turn as a random choice with this rate; only the choice
        among the moments of a turn differs.
        """
        values = self._by_turn.get(turn, [])
        values = values if len(values) >= _ENOUGH else self._all
        above = round(rate * len(values))
        return float("-inf") if above >= len(values) else values[len(values) - above - 1]

    def state(self) -> dict[str, Any]:
        return {"window": [[list(told) for told in iteration] for iteration in self._remembered()]}

    def restore(self, state: dict[str, Any]) -> None:
        self._window = [[(turn, value, independent) for turn, value, independent in it] for it in state["window"]]
        self._told = []
        self._refresh()


@dataclass(kw_only=True, eq=False)
class RandomBrancher(Paced):
    """The control of `EntropyBrancher`: forks with probability `rate`, independent of what was sampled.

    With `rate` None it keeps the pace of an `EntropyBrancher` without tau: the same probability at the same turn and
    budget, at random instead of by entropy.
    """

    rate: Share | None = None
    """The chance of a fork (default: the pace of entropy)."""
    alpha: float = 0.5
    """The chance in the first iteration, where there is no pace yet."""

    def decide(self, moment: ForkMoment) -> BranchDecision | None:
        if len(moment.entropies[-1]) < self.probe_tokens:
            return None
        self.tell(moment)
        rate = self.rate
        if rate is None:
            paced = self.paced(moment, self.branches)
            rate = self.alpha if paced is None else paced
        if drawn(moment) < rate:
            return bounded(moment, self.branches, "drawn to fork", {"rate": rate}, shared=self.probe_tokens - 1)
        return BranchDecision(branches=1, reason="drawn to go on", numbers={"rate": rate})


@dataclass(kw_only=True, eq=False)
class EntropyBrancher(Paced):
    """ARPO's rule, decided only on what is known at the fork.

    H is the mean entropy of the first `probe_tokens` tokens of the turn after a tool result, H_0 that of the first
    tokens of the rollout's own first turn, both over the full vocabulary in nats per token;

        dH = (H - H_0) / ln(vocabulary),    P = alpha + beta dH,    fork where P > tau

    (paper, Branch(Z); it does not define `Normalize`, here a change from certain to uniform is 1). The branches share
    the first k - 1 tokens, and each samples the k-th token itself from the distribution of the k-th entropy. So the
    decision uses nothing below the fork. A turn that ends within the probe does not fork.

    Without tau the threshold is the quantile of P, among earlier moments at the same turn, that spends the budget
    (`Paced`); in the first iteration, which has no earlier moments, it is alpha: a fork wherever entropy rises.
    """

    vocabulary: int
    tau: float | None = None
    """A fixed threshold (default: one that spends the budget)."""
    alpha: float = ALPHA
    """With tau: the base probability."""
    beta: float = BETA
    """With tau: the weight of the change of entropy."""
    reads_entropies = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta <= 0:
            raise ConfigError("must be above 0: forks are for where entropy rises", field="beta")
        if self.tau is None and (self.alpha, self.beta) != (ALPHA, BETA):
            raise ConfigError("are for a fixed threshold", field="alpha, beta", hint="set tau, or leave them out")
        self._most = math.log(self.vocabulary)

    def decide(self, moment: ForkMoment) -> BranchDecision | None:
        if len(moment.entropies[-1]) < self.probe_tokens:
            return None
        entropy, initial = self._mean(moment.entropies[-1]), self._mean(moment.entropies[0])
        change = (entropy - initial) / self._most
        value, threshold = self.alpha + self.beta * change, self.alpha if self.tau is None else self.tau
        numbers = {"entropy": entropy, "initial_entropy": initial, "change": change, "value": value}
        self.tell(moment, value)
        rate = self.paced(moment, self.branches) if self.tau is None else None
        if rate is not None:
            numbers["rate"], threshold = rate, self.threshold(moment.turn, rate)
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
