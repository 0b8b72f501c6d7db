"""How often to fork so that a budget of leaves lasts to the end of a rollout and no longer."""

from __future__ import annotations

from collections import Counter
from typing import Any

from turntree.core.protocols import ForkMoment


class Pace:
    """The share of moments at which to fork, from what the iteration before looked like.

    A rollout that may still add b leaves, z - 1 at a fork, and that has on average n moments ahead of it (this one
    included; counted per turn over the independent rollouts of the iteration before, since branches would count the
    same future twice) forks with probability min(1, b / ((z - 1) n)), without ever waiting for other rollouts to
    compare with. Where rollouts are equally long, this spends the budget whole and evenly over their turns; a rollout
    that ends sooner than most leaves a rest. What is told of an iteration counts from the next one on, so that no
    decision depends on the order of the calls.
    """

    def __init__(self) -> None:
        self._iteration = 0
        self._told: list[tuple[int, float, bool]] = []  # (turn, value, independent) of every moment of this iteration
        self._alive: Counter[int] = Counter()  # of the iteration before: moments of independent rollouts by turn
        self._values: list[float] = []  # of the iteration before: of all moments, sorted

    def tell(self, moment: ForkMoment, value: float = 0.0) -> None:
        """Count a moment, and what a rule measured there."""
        if moment.iteration != self._iteration:
            self._alive, self._values = self._learned()
            self._iteration, self._told = moment.iteration, []
        self._told.append((moment.turn, value, len(moment.key) == 1))

    def _learned(self) -> tuple[Counter[int], list[float]]:
        """What the next iteration will know."""
        if not self._told:
            return self._alive, self._values
        alive = Counter(turn for turn, _, independent in self._told if independent)
        return alive, sorted(value for _, value, _ in self._told)

    def rate(self, moment: ForkMoment, branches: int) -> float | None:
        """With what probability to fork here; None before a first iteration is over."""
        if not self._alive:
            return None
        here = self._alive[moment.turn]
        ahead = sum(count for turn, count in self._alive.items() if turn >= moment.turn) / here if here else 1.0
        return min(1.0, moment.budget / (branches - 1) / ahead)

    def threshold(self, rate: float) -> float:
        """The value that a share `rate` of the iteration before was above."""
        above = round(rate * len(self._values))
        return float("-inf") if above >= len(self._values) else self._values[len(self._values) - above - 1]

    def state(self) -> dict[str, Any]:
        """What the next iteration will know."""
        alive, values = self._learned()
        return {"alive": dict(alive), "values": values}

    def restore(self, state: dict[str, Any]) -> None:
        self._alive = Counter({int(turn): count for turn, count in state["alive"].items()})
        self._values = list(state["values"])
        self._told = []
