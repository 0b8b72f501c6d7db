"""Which pivots a step draws, and the live pass rate of each.

A profile describes turns for the policy that was profiled. The policy changes, so every visit updates the turn's *live
pass rate*, and a turn without a gradient can be retired. The rate does not begin with the profile's mean: turns were
selected by that mean, so it is biased (regression to the mean).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from turntree.core import seeds
from turntree.core.outcome import GroupOutcome, group_outcome
from turntree.training.config import CurriculumConfig

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
    """Seeded epochs over the pivots that are not retired: none is drawn twice before all were drawn."""

    def __init__(self, roles: Sequence[str], config: CurriculumConfig, seed: int) -> None:
        self.config, self._seed = config, seed
        self._anchors = [role == "anchor" for role in roles]
        self.records = [PivotRecord() for _ in roles]
        self._queue: list[int] = []
        self._epoch = 0

    def exhausted(self, step: int) -> bool:
        """Whether every pivot is retired, and none comes back by `step`."""
        return all(record.retired_at is not None and not self._due(record, step) for record in self.records)

    def draw(self, count: int, step: int) -> list[int]:
        """Indices of the next `count` pivots, with repeats where there are fewer. Do not call it when `exhausted`."""
        drawn: list[int] = []
        while len(drawn) < count:
            if not self._queue:
                self._refill(step)
            index = self._queue.pop(0)
            if self.records[index].retired_at is None:
                drawn.append(index)
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
        """Counts, and the mean live pass rate of the pivots in the draw that were visited."""
        live = [record for record in self.records if record.retired_at is None]
        rates = [record.pass_rate for record in live if record.pass_rate is not None]
        return {
            "live_pivots": len(live),
            "retired_pivots": len(self.records) - len(live),
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

    def _due(self, record: PivotRecord, step: int) -> bool:
        after = self.config.revisit_after
        return after > 0 and record.retired_at is not None and step - record.retired_at >= after

    def _refill(self, step: int) -> None:
        """Shuffle in the next epoch, with the retired pivots whose time has come."""
        for record in self.records:
            if self._due(record, step):
                record.retired_at = None
                record.streak = self.config.retire_after - 1
        self._queue = [index for index, record in enumerate(self.records) if record.retired_at is None]
        seeds.generator(self._seed, "epoch", self._epoch).shuffle(self._queue)
        self._epoch += 1
