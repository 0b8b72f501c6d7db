"""ARPO's rules, for comparison: as printed, and as released."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any

from turntree.core.config import Between, Bounded, Positive
from turntree.core.errors import ConfigError
from turntree.core.protocols import BranchDecision, Brancher, ForkMoment
from turntree.decide.branching.rules import EntropyBrancher, bounded, drawn

_TOKENS = 20


@dataclass(kw_only=True, eq=False)
class ArpoBrancher(EntropyBrancher):
    """ARPO's rule as the paper prints it: Branch(Z) where P = alpha + beta dH > tau, until the branches of the prompt
    are M - N (`group_size` minus `initial_rollouts`).

    It differs from `EntropyBrancher` in three places. The threshold is tau itself, without a pace. All rollouts of a
    prompt draw on one budget, in the order in which their turns are finished; that order depends on how long the turns
    became, so path weights would be biased. And Z counts the new paths alone, where the released code
    (`arpo_released`) counts the rollout that they leave.
    """

    paths: Positive = 1
    """Z, new rollouts of a fork."""
    branches: int = field(init=False)
    tau: float = 0.5  # pyright: ignore[reportIncompatibleVariableOverride]
    """The threshold."""
    biased = True
    prompt_wide = True

    def __post_init__(self) -> None:
        self.branches = self.paths + 1
        super().__post_init__()


@dataclass(kw_only=True, eq=False)
class ReleasedArpoBrancher(Bounded, Brancher):
    """The rule of ARPO's released sampler, which differs from the paper.

    - The entropy is that of the turn which *ended* in the tool call, *summed* over its first 20 tokens and divided by
      ln(vocabulary).
    - The initial entropy is kept per slot and never cleared. After the first iteration it belongs to another question
      (here: to the same sample of the task that comes first by name).
    - It forks at random, where u = clip(U - beta * dH, 0, 1) <= alpha, without a threshold.
    - Its entropies are over the ten likeliest tokens; here they are over the full vocabulary.

    Branch and incumbent both sample anew after the tool result, so the fork is unbiased.
    """

    vocabulary: int
    branches: Annotated[int, Between(2)] = 2
    """Z, rollouts that go on from a fork, the rollout itself among them."""
    alpha: float = 0.5
    """The probability of a fork where the entropy has not changed."""
    beta: float = 0.2
    """Weight of the change of entropy."""
    reads_entropies = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta < 0:
            raise ConfigError("must be at least 0: forks are for where entropy rises", field="beta")
        self._most = math.log(self.vocabulary)
        self._initial: dict[str, tuple[str, float]] = {}  # by sample: a task of the first iteration, its entropy
        self._first: int | None = None

    def decide(self, moment: ForkMoment) -> BranchDecision | None:
        entropy = math.fsum(moment.entropies[-2][:_TOKENS]) / self._most
        first = math.fsum(moment.entropies[0][:_TOKENS]) / self._most
        change = entropy - self._stale(moment, first)
        u = min(1.0, max(0.0, drawn(moment) - self.beta * change))
        numbers = {"entropy": entropy, "change": change, "u": u}
        if u <= self.alpha:
            return bounded(moment, self.branches, "drawn to fork", numbers)
        return BranchDecision(branches=1, reason="drawn to go on", numbers=numbers)

    def _stale(self, moment: ForkMoment, first: float) -> float:
        slot = str(moment.key[0])
        self._first = moment.iteration if self._first is None else self._first
        if moment.iteration == self._first:
            self._initial[slot] = min(self._initial.get(slot, (moment.task_id, first)), (moment.task_id, first))
            return first
        return self._initial.get(slot, (moment.task_id, first))[1]

    def state(self) -> dict[str, Any]:
        return {"initial": {slot: list(held) for slot, held in self._initial.items()}, "first": self._first}

    def restore(self, state: dict[str, Any]) -> None:
        self._initial = {slot: (task, entropy) for slot, (task, entropy) in state["initial"].items()}
        self._first = state["first"]
