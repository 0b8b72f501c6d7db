"""A finished group of rollouts as read from a log, for calibration and audits."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from turntree.core.messages import Message

LARGEST = 1 << 40  # of any count in a log: above it, sums over a log would leave the integers of 64 bits


@dataclass(frozen=True, kw_only=True)
class LoggedRollout:
    """One rollout of a group. `reward` is None where it was censored or never written.

    `actions` has one text per turn; it is empty where the log does not separate the turns. `turn_tokens[t]` are the
    generated tokens of turn t + 1, `observations[t]` is what was seen before action t + 1; both are None where the log
    lacks them. `tokens` and `characters` are totals of everything generated, for logs without numbers per turn.
    `completed` is False where a turn or token limit ended the rollout, None where unknown; `stop` names the ending in
    the log's own words. `forked`: it shares its first turns with an earlier rollout of the group, which paid for them
    (their `turn_tokens` are 0 here). `refill`: it began after others had ended, in place of leaves that were not made.
    `suspect`: what makes it look like a failure of the machine (`logs.suspects`), where an audit cannot tell: its turns
    are not apart.
    Gates compare rollouts that began independently only, neither forked nor refilled.
    """

    actions: tuple[str, ...]
    reward: float | None
    completed: bool | None = None
    turn_tokens: tuple[int, ...] | None = None
    observations: tuple[str, ...] | None = None
    tokens: int | None = None
    characters: int | None = None
    stop: str | None = None
    forked: bool = False
    refill: bool = False
    suspect: str | None = None

    def __post_init__(self) -> None:
        for name in ("turn_tokens", "observations"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.actions):
                raise ValueError(f"{len(values)} {name} for {len(self.actions)} actions")
        counts = (self.tokens or 0, self.characters or 0, *(self.turn_tokens or ()))
        if min(counts) < 0 or max(counts) > LARGEST:
            raise ValueError("a count is negative or too large")
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError("the reward is not finite; null is a rollout without one")

    @property
    def shared_turns(self) -> int:
        """How many turns of its beginning an earlier rollout paid for."""
        if not self.forked or self.turn_tokens is None:
            return 0
        return next((turn for turn, tokens in enumerate(self.turn_tokens) if tokens), len(self.turn_tokens))

    @property
    def turns(self) -> int | None:
        """The turns that were sampled for it; None of a log without turns."""
        return None if not self.actions and self.turn_tokens is None else len(self.actions) - self.shared_turns

    @property
    def generated_tokens(self) -> int | None:
        return self.tokens if self.turn_tokens is None else sum(self.turn_tokens)


@dataclass(frozen=True, kw_only=True)
class LoggedGroup:
    """The rollouts of one prompt in one training iteration. `task` is the same in every iteration that plays it."""

    id: str
    task: str
    rollouts: tuple[LoggedRollout, ...]
    iteration: int | None = None
    task_type: str | None = None

    def __post_init__(self) -> None:
        if abs(self.iteration or 0) > LARGEST:
            raise ValueError("the iteration is too large")

    @property
    def rewards(self) -> tuple[float | None, ...]:
        return tuple(rollout.reward for rollout in self.rollouts)

    @property
    def scored(self) -> tuple[float, ...]:
        return tuple(rollout.reward for rollout in self.rollouts if rollout.reward is not None)


# what the policy did in a turn, as one text: a call with its arguments in a fixed order, or what it said


def call_text(name: str, arguments: Any) -> str:
    """`name({"a": 1, "b": 2})`, the same for arguments in any order; JSON text that does not parse stays as it is."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return f"{name}({arguments})"
    return f"{name}({json.dumps(arguments, sort_keys=True, ensure_ascii=False)})"


def action_text(message: Message) -> str:
    """The calls of an assistant message, one a line; its words where it calls nothing."""
    calls = [call_text(call.name, call.arguments) for call in message.tool_calls]
    return "\n".join(calls) if calls else message.content
