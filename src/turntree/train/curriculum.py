"""Which pivots a step draws, and the live pass rate of each.

A profile describes turns for the policy that was profiled. The policy changes, so every visit updates the turn's *live
pass rate*. The rate does not begin with the profile's mean: turns were selected by that mean, so it is biased
(regression to the mean).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from turntree.core import seeds
from turntree.core.outcome import GroupOutcome, group_outcome

_FAR = 1.25  # ratio of weights to ratio of draws, from which on it is said
_DISCOUNT = 0.5  # factor on earlier visits at each new one: the policy has trained for an epoch between two visits


@dataclass
class PivotRecord:
    """One pivot's visits. `successes` and `rollouts` are discounted, so that older policies lose weight in their
    ratio."""

    visits: int = 0
    last_visit: int = 0  # the step
    successes: float = 0.0  # rewards, which lie in [0, 1]
    rollouts: float = 0.0

    @property
    def pass_rate(self) -> float | None:
        return self.successes / self.rollouts if self.rollouts else None


class Curriculum:
    """Which of the pivots a step draws.

    Pivots of equal weight are drawn in seeded epochs: none is drawn twice before all were drawn. Otherwise a step draws
    one pivot after the other, each time in proportion to the weights of those that are left (Efraimidis and Spirakis
    2006). Its pivots are distinct, so weights saturate where a step draws most of them (`expected`). Weight 0 is never
    drawn."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self._seed = seed
        self._weights: list[float] = []
        self.records: list[PivotRecord] = []
        self._queue: list[int] = []
        self._epoch = 0
        self.add(weights)

    def add(self, weights: Sequence[float]) -> None:
        """More pivots, which the next draws include."""
        new = range(len(self._weights), len(self._weights) + len(weights))
        self._weights += weights
        self.records += [PivotRecord() for _ in weights]
        if self._queue:  # the epoch goes on with them
            self._queue += new
            seeds.generator(self._seed, "added", len(self.records)).shuffle(self._queue)

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

    def expected(self, count: int) -> dict[int, float]:
        """How often each pivot is among the `count` that a step draws, in expectation up to some percent, by index."""
        live = self._live()
        rounds, rest = divmod(count, len(live))  # all are drawn before any is drawn again
        chances = _inclusion([self._weights[index] for index in live], rest)
        return {index: rounds + chance for index, chance in zip(live, chances, strict=True)}

    def saturation(self, count: int) -> dict[str, float]:
        """How many times as often as the lightest pivot the heaviest one should be drawn, and is; empty where that is
        about the same."""
        expected = self.expected(count)
        weights = [self._weights[index] for index in expected]
        asked, drawn = max(weights) / min(weights), max(expected.values()) / min(expected.values())
        return {"asked": asked, "drawn": drawn, "distinct": len(weights)} if asked > _FAR * drawn else {}

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

    def record(self, index: int, step: int, rewards: Sequence[float | None]) -> None:
        """Record the rewards of a visit (None: censored); a visit with fewer than two scored rollouts is ignored."""
        if group_outcome(rewards) is GroupOutcome.CENSORED:
            return
        scored = [reward for reward in rewards if reward is not None]
        record = self.records[index]
        record.visits += 1
        record.last_visit = step
        record.successes = _DISCOUNT * record.successes + sum(scored)
        record.rollouts = _DISCOUNT * record.rollouts + len(scored)

    def metrics(self) -> dict[str, Any]:
        """The number of pivots in the draw, and the mean live pass rate of those that were visited."""
        live = self._live()
        rates = [rate for index in live if (rate := self.records[index].pass_rate) is not None]
        return {"live_pivots": len(live), "live_pass_rate": sum(rates) / len(rates) if rates else None}

    def state(self) -> dict[str, Any]:
        """Everything above as plain JSON, for a checkpoint."""
        visited = {str(i): dataclasses.asdict(record) for i, record in enumerate(self.records) if record.visits}
        return {"epoch": self._epoch, "queue": self._queue, "records": visited}

    def restore(self, state: dict[str, Any]) -> None:
        self._epoch, self._queue = state["epoch"], list(state["queue"])
        for index, values in state["records"].items():
            self.records[int(index)] = PivotRecord(**values)


def _inclusion(weights: Sequence[float], count: int) -> list[float]:
    """The chance of each weight to be among `count` distinct ones. The draw takes the first `count` of exponential
    clocks with these rates; they are asked at the time by which `count` of them have rung in expectation."""
    low, high = 0.0, (1 + math.log(len(weights))) / min(weights)  # then more than all but one have rung
    for _ in range(60):
        middle = (low + high) / 2
        rung = sum(-math.expm1(-weight * middle) for weight in weights)
        low, high = (middle, high) if rung < count else (low, middle)
    return [-math.expm1(-weight * high) for weight in weights]
