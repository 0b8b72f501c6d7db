"""What the policy did in a turn, as one text: a call with its arguments in a fixed order, or what it said."""

from __future__ import annotations

import json
from typing import Any

from turntree.core.messages import Message


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
