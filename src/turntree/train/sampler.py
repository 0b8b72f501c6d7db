"""Which pivots a step draws."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from turntree.core import seeds


class PivotSampler:
    """Which of the pivots a step draws.

    Pivots of equal weight are drawn in seeded epochs: none is drawn twice before all were drawn. Otherwise a step draws
    one pivot after the other, each time in proportion to the weights of those that are left (Efraimidis and Spirakis
    2006). Its pivots are distinct, so weights saturate where a step draws most of them. Weight 0 is never drawn."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self._seed = seed
        self._weights: list[float] = []
        self._queue: list[int] = []
        self._epoch = 0
        self.add(weights)

    def add(self, weights: Sequence[float]) -> None:
        """More pivots, which the next draws include."""
        new = range(len(self._weights), len(self._weights) + len(weights))
        self._weights += weights
        if self._queue:  # the epoch goes on with them
            self._queue += new
            seeds.generator(self._seed, "added", len(self._weights)).shuffle(self._queue)

    def remove(self, indices: Iterable[int]) -> None:
        """Take pivots out of the draw for good."""
        for index in indices:
            self._weights[index] = 0.0
        self._queue = [index for index in self._queue if self._weights[index]]

    def scale(self, indices: Iterable[int], total: float) -> None:
        """Give these pivots the weight `total` together, in the proportions that they have."""
        chosen = list(indices)
        if now := sum(self._weights[index] for index in chosen):
            for index in chosen:
                self._weights[index] *= total / now

    def draw(self, count: int, step: int) -> list[int]:
        """Indices of the next `count` pivots, with repeats where there are fewer."""
        live = self._live()
        if len({self._weights[index] for index in live}) > 1:
            return self._draw_by_weight(live, count, step)
        drawn: list[int] = []
        while len(drawn) < count:
            if not self._queue:
                following = list(live)
                seeds.generator(self._seed, "epoch", self._epoch).shuffle(following)
                self._queue = following
                self._epoch += 1
            drawn.append(self._queue.pop(0))
        return drawn

    def _draw_by_weight(self, live: Sequence[int], count: int, step: int) -> list[int]:
        rng = seeds.generator(self._seed, "weighted", step, self._epoch)
        self._epoch += 1
        drawn: list[int] = []
        while len(drawn) < count:
            left = [index for index in live if index not in drawn] or live
            # the logarithm of U ** (1 / weight), which would be 0 for every small weight
            keys = {index: math.log(rng.random() or 5e-324) / self._weights[index] for index in left}
            drawn += sorted(left, key=lambda index: (-keys[index], index))[: count - len(drawn)]
        return drawn

    def _live(self) -> list[int]:
        return [index for index, weight in enumerate(self._weights) if weight > 0]

    @property
    def live(self) -> int:
        """The number of pivots in the draw."""
        return len(self._live())

    def state(self) -> dict[str, Any]:
        """Everything above as plain JSON, for a checkpoint."""
        return {"epoch": self._epoch, "queue": self._queue}

    def restore(self, state: dict[str, Any]) -> None:
        self._epoch, self._queue = state["epoch"], list(state["queue"])
