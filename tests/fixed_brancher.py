"""Forks at given turns, for tests of what forks do."""

from __future__ import annotations

from turntree.core.config import Between
from turntree.core.errors import ConfigError
from turntree.core.protocols import BranchDecision, Brancher, ForkMoment
from turntree.decide.branching.rules import bounded


class FixedBrancher(Brancher):
    """Forks into `branches` before each turn in `turns` that follows a tool result, while the budget lasts.

    Args:
        branches: Z, rollouts that go on from a fork, the rollout itself among them.
        turns: The turns that fork.
    """

    def __init__(self, *, branches: int = 2, turns: tuple[int, ...] = (2,)) -> None:
        if any(turn < 2 for turn in turns):
            raise ConfigError("a fork follows a tool result: turns count from 2 here", field="turns")
        Between(2).check(branches, "branches")
        self.turns, self.branches = frozenset(turns), branches

    def decide(self, moment: ForkMoment) -> BranchDecision | None:
        if moment.turn not in self.turns:
            return None
        return bounded(moment, self.branches, "a given turn", {})
