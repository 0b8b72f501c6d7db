"""A finished group of rollouts as its log tells it: what calibration and audits read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LoggedRollout:
    """One rollout of a group. `reward` is None where it was censored or never written.

    `actions` has one text per turn. `turn_tokens[t]` are the generated tokens of turn t + 1, `observations[t]` is what
    was seen before action t + 1; both are None where the log does not say. `completed` is False where a turn or token
    limit ended the rollout, None where unknown.
    """

    actions: tuple[str, ...]
    reward: float | None
    completed: bool | None = None
    turn_tokens: tuple[int, ...] | None = None
    observations: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("turn_tokens", "observations"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.actions):
                raise ValueError(f"{len(values)} {name} for {len(self.actions)} actions")


@dataclass(frozen=True, kw_only=True)
class LoggedGroup:
    """The rollouts of one prompt in one training iteration. `task` is the same in every iteration that plays it."""

    id: str
    task: str
    rollouts: tuple[LoggedRollout, ...]
    iteration: int | None = None
    task_type: str | None = None

    @property
    def scored(self) -> tuple[float, ...]:
        return tuple(rollout.reward for rollout in self.rollouts if rollout.reward is not None)
