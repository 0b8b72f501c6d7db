"""Which pivots a step draws, and the live pass rate of each.

A profile describes turns for the policy that was profiled. The policy changes, so every visit updates the turn's *live
pass rate*, and a turn without a gradient can be retired. The rate does not begin with the profile's mean: turns were
selected by that mean, so it is biased (regression to the mean).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from turntree.core import seeds
from turntree.core.outcome import GroupOutcome, group_outcome
from turntree.training.config import CurriculumConfig

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
    streak: int = 0  # visits in a row at which everything succeeded
    retired_at: int | None = None  # the step

    @property
    def pass_rate(self) -> float | None:
        return self.successes / self.rollouts if self.rollouts else None


class Curriculum:
    """Which of the pivots that are not retired a step draws.

    Pivots of equal weight are drawn in seeded epochs: none is drawn twice before all were drawn. Otherwise a step draws
    one pivot after the other, each time in proportion to the weights of those that are left (Efraimidis and Spirakis
    2006). Its pivots are distinct, so weights saturate where a step draws most of them (`expected`). Weight 0 is never
    drawn."""

    def __init__(
        self, roles: Sequence[str], config: CurriculumConfig, seed: int, weights: Sequence[float] | None = None
    ) -> None:
        self.config, self._seed = config, seed
        self._anchors: list[bool] = []
        self._weights: list[float] = []
        self.records: list[PivotRecord] = []
        self._queue: list[int] = []
        self._epoch = 0
        self._drawn: tuple[int, set[int]] = (0, set())  # at the latest step
        self.add(roles, [1.0] * len(roles) if weights is None else weights)

    def add(self, roles: Sequence[str], weights: Sequence[float]) -> None:
        """More pivots, which the next draws include."""
        self._anchors += [role == "anchor" for role in roles]
        self._weights += weights
        new = range(len(self.records), len(self.records) + len(roles))
        self.records += [PivotRecord() for _ in roles]
        if self._queue:  # the epoch goes on with them
            self._queue += new
            seeds.generator(self._seed, "added", len(self.records)).shuffle(self._queue)

    def remove(self, indices: Iterable[int]) -> None:
        """Take pivots out of the draw for good. That is no retirement: they need not be mastered."""
        for index in indices:
            self._weights[index] = 0.0
        self._queue = [index for index in self._queue if self._weights[index]]

    def scale(self, indices: Iterable[int], total: float) -> None:
        """Give these pivots the weight `total` together, in the proportions that they have."""
        chosen = list(indices)
        if now := sum(self._weights[index] for index in chosen):
            for index in chosen:
                self._weights[index] *= total / now

    def exhausted(self, step: int) -> bool:
        """Whether every pivot is retired, and none comes back by `step`."""
        return not any(self._may_be_drawn(index, step) for index in range(len(self.records)))

    def expected(self, count: int, step: int) -> dict[int, float]:
        """How often each pivot is among the `count` that `step` draws, in expectation up to some percent, by index."""
        live = [index for index in range(len(self.records)) if self._may_be_drawn(index, step)]
        if not live:
            return {}
        rounds, rest = divmod(count, len(live))  # all are drawn before any is drawn again
        chances = _inclusion([self._weights[index] for index in live], rest)
        return {index: rounds + chance for index, chance in zip(live, chances, strict=True)}

    def saturation(self, count: int, step: int) -> dict[str, float]:
        """How many times as often as the lightest pivot the heaviest one should be drawn, and is at `step`; empty where
        that is about the same."""
        expected = self.expected(count, step)
        weights = [self._weights[index] for index in expected]
        asked, drawn = max(weights) / min(weights), max(expected.values()) / min(expected.values())
        return {"asked": asked, "drawn": drawn, "distinct": len(weights)} if asked > _FAR * drawn else {}

    def draw(self, count: int, step: int) -> list[int]:
        """Indices of the next `count` pivots, with repeats where there are fewer. Do not call it when `exhausted`."""
        if len({weight for weight in self._weights if weight}) > 1:
            return self._draw_by_weight(count, step)
        drawn: list[int] = []
        seen = self._seen(step)
        again = bool(seen)  # replacements are others, as long as there are any
        while len(drawn) < count:
            while not any(self._may_be_drawn(index, step) and index not in seen for index in range(len(self.records))):
                seen = set() if seen <= set(drawn) else set(drawn)
            if (index := self._next(seen)) is None:
                self._refill(step)
                continue
            drawn.append(index)
            if again:
                seen.add(index)
        self._drawn = (step, self._seen(step) | set(drawn))
        return drawn

    def record(self, index: int, step: int, rewards: Sequence[float | None]) -> None:
        """Record the rewards of a visit (None: censored); a visit with fewer than two scored rollouts is ignored."""
        outcome = group_outcome(rewards)
        if outcome is GroupOutcome.CENSORED:
            return
        scored = [reward for reward in rewards if reward is not None]
        record = self.records[index]
        record.visits += 1
        record.last_visit = step
        record.successes = _DISCOUNT * record.successes + sum(scored)
        record.rollouts = _DISCOUNT * record.rollouts + len(scored)
        record.streak = record.streak + 1 if outcome is GroupOutcome.ALL_SUCCEED else 0
        if 0 < self.config.retire_after <= record.streak and not self._anchors[index]:
            record.retired_at = step

    @property
    def retired(self) -> set[int]:
        return {index for index, record in enumerate(self.records) if record.retired_at is not None}

    def metrics(self) -> dict[str, Any]:
        """Counts, without the removed ones, and the mean live pass rate of the pivots in the draw that were visited."""
        there = [record for record, weight in zip(self.records, self._weights, strict=True) if weight]
        live = [record for record in there if record.retired_at is None]
        rates = [record.pass_rate for record in live if record.pass_rate is not None]
        return {
            "live_pivots": len(live),
            "retired_pivots": len(there) - len(live),
            "live_pass_rate": sum(rates) / len(rates) if rates else None,
        }

    def state(self) -> dict[str, Any]:
        """Everything above as plain JSON, for a checkpoint."""
        visited = {str(i): dataclasses.asdict(record) for i, record in enumerate(self.records) if record.visits}
        return {"epoch": self._epoch, "queue": self._queue, "records": visited}

    def restore(self, state: dict[str, Any]) -> None:
        self._epoch, self._queue = state["epoch"], list(state["queue"])
        for index, values in state["records"].items():
            self.records[int(index)] = PivotRecord(**values)

    def _draw_by_weight(self, count: int, step: int) -> list[int]:
        rng = seeds.generator(self._seed, "weighted", step, self._epoch)
        self._epoch += 1  # a step may draw again, for replacements
        self._bring_back(step)
        live = [index for index in range(len(self.records)) if self._may_be_drawn(index, step)]
        seen = self._seen(step)
        others = [index for index in live if index not in seen]  # replacements are others
        drawn: list[int] = []
        while len(drawn) < count:
            left = others or [index for index in live if index not in drawn] or live
            # the logarithm of U ** (1 / weight), which would be 0 for every small weight
            keys = {index: math.log(rng.random() or 5e-324) / self._weights[index] for index in left}
            drawn += sorted(left, key=lambda index: (-keys[index], index))[: count - len(drawn)]
            others = []
        self._drawn = (step, seen | set(drawn))
        return drawn

    def _seen(self, step: int) -> set[int]:
        """What this step has drawn so far."""
        return set(self._drawn[1]) if self._drawn[0] == step else set()

    def _next(self, seen: set[int]) -> int | None:
        """Take the first of the epoch that is not in `seen`; those before it stay for the next step. None: there is
        none."""
        waiting: list[int] = []
        for place, index in enumerate(self._queue):
            if self.records[index].retired_at is not None:
                continue
            if index not in seen:
                self._queue = waiting + self._queue[place + 1 :]
                return index
            waiting.append(index)
        self._queue = waiting
        return None

    def _may_be_drawn(self, index: int, step: int) -> bool:
        record = self.records[index]
        return self._weights[index] > 0 and (record.retired_at is None or self._due(record, step))

    def _due(self, record: PivotRecord, step: int) -> bool:
        after = self.config.revisit_after
        return after > 0 and record.retired_at is not None and step - record.retired_at >= after

    def _refill(self, step: int) -> None:
        """Shuffle in the next epoch, with the retired pivots whose time has come."""
        self._bring_back(step)
        following = [index for index in range(len(self.records)) if self._may_be_drawn(index, step)]
        seeds.generator(self._seed, "epoch", self._epoch).shuffle(following)
        self._queue += following
        self._epoch += 1

    def _bring_back(self, step: int) -> None:
        for record, weight in zip(self.records, self._weights, strict=True):
            if weight and self._due(record, step):
                record.retired_at = None
                record.streak = self.config.retire_after - 1


def _inclusion(weights: Sequence[float], count: int) -> list[float]:
    """The chance of each weight to be among `count` distinct ones. The draw takes the first `count` of exponential
    clocks with these rates; they are asked at the time by which `count` of them have rung in expectation."""
    low, high = 0.0, (1 + math.log(len(weights))) / min(weights)  # then more than all but one have rung
    for _ in range(60):
        middle = (low + high) / 2
        rung = sum(-math.expm1(-weight * middle) for weight in weights)
        low, high = (middle, high) if rung < count else (low, middle)
    return [-math.expm1(-weight * high) for weight in weights]
