"""The strict local reward: the action is the demonstrated one (PivotRL, Eq. 2)."""

from __future__ import annotations

import json
from dataclasses import dataclass

from turntree.core.messages import Message, action_kind
from turntree.core.protocols import TurnState, TurnVerifier
from turntree.core.verdict import Verdict

canonical_json = json.JSONEncoder(sort_keys=True, ensure_ascii=True, separators=(",", ":")).encode
"""JSON text that is equal for equal JSON values: keys sorted, nothing else changed (1, 1.0 and true differ)."""


@dataclass(frozen=True)
class StrictMatch(TurnVerifier):
    """1 iff the stripped text is equal and the calls are equal in order, name and canonical JSON of arguments.

    Call ids are ignored: they are drawn at random.
    """

    name = "strict/1"

    def judge(self, state: TurnState, action: Message) -> Verdict:
        expected = state.demonstration
        kind = action_kind(action)
        if _calls(action) != _calls(expected):
            return Verdict(0.0, "other calls" if action.tool_calls else "a message instead of a call", kind)
        if action.content.strip() != expected.content.strip():
            return Verdict(0.0, "other text", kind)
        return Verdict(1.0, "equal", kind)


def _calls(message: Message) -> list[tuple[str, str]]:
    return [(call.name, canonical_json(call.arguments)) for call in message.tool_calls]
