"""What a node, a rollout or a stage cost. Costs add up; nothing is counted twice."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Self


class Additive:
    """Adds `+` to a dataclass of numbers. Where every field defaults to zero, `sum(records, Record())` works."""

    def __add__(self, other: Self) -> Self:
        fields: Any = dataclasses.fields(self)  # pyright: ignore[reportArgumentType]
        return type(self)(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields})


@dataclass(frozen=True, kw_only=True)
class Cost(Additive):
    """Additive counters. Counts are exact; `seconds` are wall-clock and never enter a comparison of artifacts.

    A token position that the engine had to compute is *prefilled* (given to it) or *decoded* (sampled by it);
    one whose keys and values it already held is *reused*.
    """

    turns: int = 0  # model calls
    decoded_tokens: int = 0
    prefilled_tokens: int = 0
    reused_tokens: int = 0
    tool_calls: int = 0  # environment steps or tool executions
    trained_tokens: int = 0  # unique token positions in backward passes
    scored_tokens: int = 0  # of forward passes without one: old and reference log-probabilities
    engine_seconds: float = 0.0
    environment_seconds: float = 0.0
    training_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return self.engine_seconds + self.environment_seconds + self.training_seconds

    def counts(self) -> dict[str, int]:
        """The exact part, without the clock."""
        return {k: v for k, v in dataclasses.asdict(self).items() if not k.endswith("_seconds")}

    def timing(self) -> dict[str, float]:
        return {k: v for k, v in dataclasses.asdict(self).items() if k.endswith("_seconds")}


NO_COST = Cost()
