"""How often to fork so that a budget of leaves lasts to the end of a rollout and no longer."""

from __future__ import annotations

from collections import Counter
from typing import Any

from turntree.core.protocols import ForkMoment

WINDOW = 4  # iterations that are remembered
_Told = tuple[int, float, bool]  # turn, value, whether of an independent rollout
_ENOUGH = 16  # with fewer values at a turn, the values of all turns are used


class Pace:
    """How often to fork, and the quantiles of a rule's values that give this rate, both from earlier iterations.

    A rollout that may still add b leaves, z - 1 per fork, forks with probability min(1, b / ((z - 1) n)). n is the mean
    number of moments that it still has ahead, this one included. n is counted per turn over the independent rollouts
    of the last iterations, since branches would count the same future twice. No rollout waits for others. Where
    rollouts are equally long, this spends the whole budget, evenly over their turns; a rollout that ends sooner than
    most leaves a part unspent. Moments of an iteration count from the next iteration on, so that no decision depends
    on the order of the calls.
    """

    def __init__(self) -> None:
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

    def rate(self, moment: ForkMoment, branches: int) -> float | None:
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
