"""opencode: what `opencode export` prints, `info` and `messages` of `{info, parts}`. Every non-error tool call is a
candidate (PivotRL, appendix A.2).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from turntree.traces.formats.row import (
    FAILED,
    SKIP,
    UNSEEN,
    BrokenMessage,
    ChatRow,
    call_of,
    count_unknown,
    list_of,
    needs,
    object_of,
    part_of,
    told_by,
    words,
)

_PART_KEYS = words(
    "id sessionID messageID type text synthetic ignored time metadata callID tool state mime filename url source "
    "reason snapshot cost tokens hash files name attempt error prompt description agent auto overflow"
)
_COMPACTED = "What did we do so far?"  # what it sends for a part of type compaction
_STATE_KEYS = words("status input output title metadata time error attachments raw")


@told_by(lambda row: needs(row, info=object, messages=("info", "parts")))
def read_opencode(row: dict[str, Any]) -> Iterator[ChatRow]:
    """An exported OpenCode session, one trace for each context: where it was compacted, a question and the summary that
    answered it stand in place of all before. It holds no system prompt and no tool schemas."""
    info = object_of(row, "info")
    chat = ChatRow.of(info, info.keys(), id="id", group="parentID id", meta="title version")
    chat.domain, chat.rule = "software engineering", "tool_calls"
    count_unknown(row, ("info", "messages"), "", chat.ignored)
    rows, undone = list_of(row, "messages", "a list of {info, parts}"), object_of(info, "revert").get("messageID")
    end = next((i for i, raw in enumerate(rows) if undone and part_of(raw, "info").get("id") == undone), len(rows))
    chat.left_out["abandoned_branch"] += sum(part_of(raw, "info").get("role") == "assistant" for raw in rows[end:])
    for raw in rows[:end]:
        if not isinstance(raw, dict) or not isinstance(raw.get("info"), dict) or not isinstance(raw.get("parts"), list):
            chat.messages.append(BrokenMessage("holds an item that is not {info, parts}", field="messages"))
            continue
        if any(part_of({"": part}, "").get("type") == "compaction" for part in raw["parts"]):
            if chat.messages:
                yield chat
            chat = chat.compacted([{"role": "user", "content": _COMPACTED}])
            continue
        told = _opencode_message(raw["info"], raw["parts"], chat)
        summary = raw["info"].get("summary") is True  # of another agent's, with a prompt of its own
        chat.messages += [one | {SKIP: "a_summary"} if summary and isinstance(one, dict) else one for one in told]
    yield chat


def _opencode_message(info: dict[str, Any], parts: list[Any], chat: ChatRow) -> list[Any]:
    """A message; of the agent, one turn for each model call, which "step-start" begins, with the results behind it."""
    role, found = info.get("role"), list[Any]()
    turn: dict[str, Any] = {"role": role, "content": "", "tool_calls": []}
    results: list[dict[str, Any]] = []

    def close() -> None:
        if turn["content"] or turn["tool_calls"] or role != "assistant":
            found.extend([{k: v for k, v in turn.items() if v or k != "tool_calls"}, *results])
        turn.update(content="", tool_calls=[])
        turn.pop("weight", None)
        results.clear()

    for part in parts:
        if not isinstance(part, dict):
            return [*found, BrokenMessage("has a part that is not an object", turn=role == "assistant", field="parts")]
        kind = part.get("type")
        unread = count_unknown(part, _PART_KEYS, "parts[].", chat.ignored)
        if kind == "text" and isinstance(part.get("text"), str) and not part.get("ignored"):  # else no model saw it
            turn["content"] = "\n".join(text for text in (turn["content"], part["text"]) if text)
        elif kind == "tool":
            state = part_of(part, "state")
            unread |= count_unknown(state, _STATE_KEYS, "parts[].state.", chat.ignored)
            turn["tool_calls"].append(call_of(part.get("tool"), state.get("input"), part.get("callID"), unread))
            if state.get("status") in ("completed", "error"):
                failed = state["status"] == "error"
                output = state.get("error" if failed else "output")
                output = output if isinstance(output, str | None) else json.dumps(output)
                result = {"role": "tool", "content": output, "tool_call_id": part.get("callID")}
                results.append(result | {FAILED: failed, UNSEEN: bool(state.get("attachments"))})
        elif kind == "step-start":
            if role == "assistant":
                close()
        else:
            chat.ignored[f"parts[] of type {kind}"] += 1
            turn |= {UNSEEN: True} if kind == "file" and not str(part.get("mime")).startswith("text/") else {}
            if kind == "step-finish" and part.get("reason") == "length":  # the token limit cut it
                turn["weight"] = 0
    if info.get("finish") == "length" or info.get("error"):  # cut, or aborted
        turn["weight"] = 0
    close()
    return found
