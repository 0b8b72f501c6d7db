"""opencode: what `opencode export` prints, `info` and `messages` of `{info, parts}`. Every non-error tool call is a
candidate (PivotRL, appendix A.2)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from turntree.core.messages import as_object
from turntree.traces.formats.row import (
    ANOTHER_PROMPT,
    FAILED,
    SKIP,
    UNSEEN,
    BrokenMessage,
    ChatRow,
    call_of,
    count_unknown,
    list_of,
    misfit,
    object_of,
    part_of,
    role_of,
    said_before,
    told_by,
    words,
)

_PART_KEYS = words(
    "id sessionID messageID type text synthetic ignored time metadata callID tool state mime filename url source "
    "reason snapshot cost tokens hash files name attempt error prompt description agent auto overflow tail_start_id"
)
_ASKED = {"compaction": "What did we do so far?", "subtask": "The following tool was executed by the user"}  # it sends
_STATE_KEYS = words("status input output title metadata time error attachments raw")


@told_by(lambda row: misfit(row, info=object, messages=("info", "parts")))
def read_opencode(row: dict[str, Any]) -> Iterator[ChatRow]:
    """An exported OpenCode session, one trace for each context: where it was compacted, a question, the summary that
    answered it and the last turns stand in place of all before. It holds no system prompt and no tool schemas."""
    info = object_of(row, "info")
    chat = ChatRow.of(info, info.keys(), id="id", group="parentID id", meta="title version")
    chat.domain, chat.rule = "software engineering", "tool_calls"
    count_unknown(row, ("info", "messages"), "", chat.ignored)
    rows, undone = list_of(row, "messages", "a list of {info, parts}"), object_of(info, "revert").get("messageID")
    end = next((i for i, raw in enumerate(rows) if undone and part_of(raw, "info").get("id") == undone), len(rows))
    chat.left_out["abandoned_branch"] += sum(part_of(raw, "info").get("role") == "assistant" for raw in rows[end:])
    places, cleared = dict[str, int](), set[int]()  # where messages begin, and when results were cleared
    asked: tuple[int, str] | None = None  # where it is asked for a summary, and the first message that stays behind it
    for raw in rows[:end]:
        if not isinstance(raw, dict) or not isinstance(raw.get("info"), dict) or not isinstance(raw.get("parts"), list):
            chat.messages.append(BrokenMessage("holds an item that is not {info, parts}", field="messages"))
            continue
        info, summary = raw["info"], raw["info"].get("summary") is True
        told, failed = _opencode_message(info, raw["parts"], chat), part_of(info, "error").get("name")
        if failed not in (None, "MessageAbortedError"):  # no later call is sent it
            chat.left_out["failed_call"] += sum(role_of(one) == "assistant" for one in told)
            continue
        places[str(info.get("id"))] = len(chat.messages)
        made = part_of(info, "time").get("created")
        stale = isinstance(made, int) and any(at < made for at in cleared)  # it was sent less of a result
        for part in map(as_object, raw["parts"]):
            if part.get("type") == "compaction":
                asked = len(chat.messages), str(part.get("tail_start_id") or "")
            at = part_of(part_of(part, "state"), "time").get("compacted")
            cleared |= {at} if isinstance(at, int) else set()
        skip = "a_summary" if summary else ANOTHER_PROMPT if stale else ""
        chat.messages += [one | {SKIP: skip} if skip and role_of(one) == "assistant" else one for one in told]
        if summary and asked is not None:
            before, after = chat.messages[: asked[0]], chat.messages[asked[0] :]
            if asked[1] and asked[1] not in places:
                after = [one | {UNSEEN: ANOTHER_PROMPT} if role_of(one) else one for one in after]
            after += [said_before(one) for one in before[places.get(asked[1], len(before)) :]]
            if before:
                yield replace(chat, messages=before)
                chat = chat.compacted()
            chat.messages, places, cleared, asked = after, {}, set(), None
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
        said = _ASKED.get(str(kind), part.get("text") if kind == "text" else None)
        if isinstance(said, str) and not part.get("ignored"):  # else no model saw it
            turn["content"] = "\n".join(text for text in (turn["content"], said) if text)
        elif kind == "tool":
            state = part_of(part, "state")
            unread |= count_unknown(state, _STATE_KEYS, "parts[].state.", chat.ignored)
            turn["tool_calls"].append(call_of(part.get("tool"), state.get("input"), part.get("callID"), unread))
            status, ended = state.get("status"), part_of(state, "metadata")
            partly = ended.get("output") if ended.get("interrupted") is True else None
            told = {"completed": state.get("output"), "error": state.get("error") if partly is None else partly}
            output = told.get(str(status), "[Tool execution was interrupted]")  # what it sends for one that did not end
            output = output if isinstance(output, str | None) else json.dumps(output)
            result = {"role": "tool", "content": output, "tool_call_id": part.get("callID")}
            results.append(result | {FAILED: status != "completed", UNSEEN: bool(state.get("attachments"))})
            turn |= {"weight": 0} if status == "pending" else {}  # its arguments had not all come
        elif kind == "step-start":
            if role == "assistant":
                close()
        else:
            chat.ignored[f"parts[] of type {kind}"] += 1
            if kind == "file" and part.get("mime") not in ("text/plain", "application/x-directory"):  # told as texts
                turn[UNSEEN] = True
            if kind == "step-finish" and part.get("reason") == "length":  # the token limit cut it
                turn["weight"] = 0
    if info.get("finish") == "length" or info.get("error"):  # cut, or aborted
        turn["weight"] = 0
    close()
    return found
