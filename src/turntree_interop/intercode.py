"""InterCode: `query` and `turn_history` of `actions`, `observations`, `rewards`, `valid_action`. Every bash action is a
candidate (PivotRL, appendix A.2); in other environments every turn.
"""

from __future__ import annotations

import json
from typing import Any

from turntree.core.errors import InputError
from turntree.traces.formats.row import (
    ACT,
    FAILED,
    BrokenMessage,
    ChatRow,
    list_of,
    misfit,
    object_of,
    text_of,
    told_by,
    words,
)

_INTERCODE_KEYS = words("environment dataset task_id query turn_history summary info hardness")


@told_by(lambda row: misfit(row, query=str, turn_history=dict))
def read_intercode(row: dict[str, Any]) -> ChatRow:
    """An episode of InterCode: the query, then each action with what it printed. Its system prompt is not recorded."""
    turns = object_of(row, "turn_history")
    columns = ("actions", "observations", "valid_action", "rewards")
    actions, seen, valid, _ = (list_of(turns, key, "a list, one item a turn") for key in columns)
    best = object_of(row, "summary").get("max_reward")
    shell = "bash" in str(row.get("environment", "bash"))
    chat = ChatRow.of(row, _INTERCODE_KEYS, meta="task_id dataset environment", told={"reward": best})
    chat.group = f"{row.get('dataset', '')}#{text_of(row, ('task_id',)) or row.get('query')}"
    chat.domain, chat.rule = ("terminal", "bash") if shell else ("", "turns")
    chat.messages.append({"role": "user", "content": row.get("query")})
    if len(seen) > len(actions):
        problem = f"holds {len(seen)} observations of {len(actions)} actions"
        raise InputError(problem, field="turn_history", hint="write one observation an action")
    for i, action in enumerate(actions):
        if not isinstance(action, str):
            chat.messages.append(BrokenMessage(f"is {type(action).__name__}, not text", turn=True, field="actions"))
            continue
        failed = i < len(valid) and valid[i] is False
        chat.messages.append({"role": "assistant", "content": action, ACT: "bash" if shell else "tool"})
        if i < len(seen):
            shown = seen[i] if isinstance(seen[i], str | None) else json.dumps(seen[i])
            chat.messages.append({"role": "user", "content": shown, FAILED: failed})
    return chat
