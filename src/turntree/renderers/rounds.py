"""Conversations as rounds: an assistant turn and what comes before the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from turntree.core.messages import Message


@dataclass(frozen=True)
class Round:
    """An assistant turn (message number `index`) and the run of messages up to the next one."""

    index: int
    turn: Message
    run: tuple[Message, ...]

    @property
    def tied(self) -> bool:
        """Whether the template may look at the turn to render the run: results refer to the calls before them."""
        return bool(self.turn.tool_calls) or any(message.role == "tool" for message in self.run)


def split(messages: Sequence[Message]) -> tuple[tuple[Message, ...], list[Round]]:
    """R0 and the rounds (A1, R1), (A2, R2), ... of a conversation."""
    turns = [index for index, message in enumerate(messages) if message.role == "assistant"]
    ends = [*turns, len(messages)]
    rounds = [
        Round(turn, messages[turn], tuple(messages[turn + 1 : end])) for turn, end in zip(turns, ends[1:], strict=True)
    ]
    return tuple(messages[: ends[0]]), rounds
