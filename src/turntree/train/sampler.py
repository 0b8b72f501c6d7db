"""Which pivots a step draws."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from turntree.core import seeds

Item = TypeVar("Item")


class PivotSampler:
    """Which of the pivots a step draws.

    Pivots of equal weight are drawn in seeded epochs: none is drawn twice before all were drawn. Otherwise a step draws
    one pivot after the other, each time in proportion to the weights of those that are left (Efraimidis and Spirakis
    2006). Its pivots are distinct, so weights saturate where a step draws most of them. Weight 0 is never drawn.

    With `per_trace` above 1 a step draws distinct traces, each in proportion to the weights of its pivots together, and
    so many pivots in each, with repeats: a trace has few, so distinct ones would be nearly all of them, whatever their
    weights. A pivot is drawn as often as alone, in the company of others of its trace: what they share is then
    prefilled and trained on once."""

    def __init__(
        self, weights: Sequence[float], seed: int, traces: Sequence[str] | None = None, per_trace: int = 1
    ) -> None:
        self._seed = seed
        self._per_trace = per_trace
        self._weights: list[float] = []
        self._traces: list[str] = []
        self._queue: list[int] = []
        self._epoch = 0
        self.add(weights, traces)

    def add(self, weights: Sequence[float], traces: Sequence[str] | None = None) -> None:
        """More pivots, which the next draws include; `traces` are those that they are of (None: each of its own)."""
        new = range(len(self._weights), len(self._weights) + len(weights))
        self._weights += weights
        self._traces += traces or map(str, new)
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
        if self._per_trace > 1 or len({self._weights[index] for index in live}) > 1:
            draws = self._by_trace if self._per_trace > 1 else self._by_weight
            self._epoch += 1
            rng = seeds.generator(self._seed, "weighted", step, self._epoch - 1)
            return list(itertools.islice(draws(live, rng), count))
        drawn: list[int] = []
        while len(drawn) < count:
            if not self._queue:
                self._queue = list(live)
                seeds.generator(self._seed, "epoch", self._epoch).shuffle(self._queue)
                self._epoch += 1
            drawn.append(self._queue.pop(0))
        return drawn

    def _by_weight(self, live: Sequence[int], rng: random.Random) -> Iterator[int]:
        """Every pivot before any comes again."""
        while True:
            yield from _order({index: self._weights[index] for index in live}, rng)

    def _by_trace(self, live: Sequence[int], rng: random.Random) -> Iterator[int]:
        """Pivots of every trace before any trace comes again."""
        of_trace: dict[str, list[int]] = {}
        for index in live:
            of_trace.setdefault(self._traces[index], []).append(index)
        weights = {trace: [self._weights[index] for index in of_trace[trace]] for trace in of_trace}
        while True:
            for trace in _order({trace: sum(each) for trace, each in weights.items()}, rng):
                yield from rng.choices(of_trace[trace], weights[trace], k=self._per_trace)

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


def _order(weights: Mapping[Item, float], rng: random.Random) -> list[Item]:
    """The items as they come when one after the other is drawn by weight."""
    if len(weights) == 1:
        return list(weights)
    # the logarithm of U ** (1 / weight), which would be 0 for every small weight
    keys = {item: math.log(rng.random() or 5e-324) / weight for item, weight in weights.items()}
    return sorted(keys, key=lambda item: -keys[item])
