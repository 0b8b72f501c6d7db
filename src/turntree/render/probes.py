"""Made-up conversations that show how a chat template behaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from turntree.core.messages import Message, ToolCall

ASK = Message("user", "Which way?")
SAY = Message("assistant", "Go left.")
CALL = Message("assistant", "", (ToolCall("look", {"at": "map"}, id="call00001"),))
RESULT = Message("tool", "A map.", tool_call_id="call00001", name="look")
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a thing.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}
BRIEF = Message("system", "Be brief.")
TWO_CALLS = replace(CALL, tool_calls=(*CALL.tool_calls, ToolCall("look", {"at": "the sky", "flag": True}, "call00002")))
SECOND_RESULT = replace(RESULT, content="A sky.", tool_call_id="call00002")
_THOUGHT = "<think>\nLeft, then.\n</think>\n\n"


@dataclass(frozen=True)
class Kind:
    """What a conversation holds that chat templates like to treat specially."""

    system: bool
    late_system: bool
    tools: bool
    calls: bool
    thinking: bool

    @classmethod
    def of(cls, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Kind:
        return cls(
            system=bool(messages) and messages[0].role == "system",
            late_system=any(message.role == "system" for message in messages[1:]),
            tools=bool(tools),
            calls=any(message.tool_calls or message.role == "tool" for message in messages),
            thinking=any("</think>" in message.content for message in messages if message.role == "assistant"),
        )

    def conversation(self) -> tuple[list[Message], list[dict[str, Any]]]:
        """Messages and tools of this kind, with every sort of message early and late."""
        thought = _THOUGHT if self.thinking else ""
        messages = [ASK, *_talk(thought, "And now?")]
        if self.late_system:
            messages += [*_talk(thought, "Then?"), replace(BRIEF, content="Be kind.")]
        if self.calls:
            call = replace(CALL, content=thought)
            messages += [call, RESULT, *_talk(thought, "Look twice."), call, RESULT, CALL, RESULT, RESULT]
        messages += _talk(thought, "And then?")
        return [BRIEF, *messages] if self.system else messages, [TOOL] if self.tools else []


def _talk(thought: str, answer: str) -> list[Message]:
    return [replace(SAY, content=f"{thought}Left of {answer}"), replace(ASK, content=answer)]
