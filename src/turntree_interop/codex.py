"""Codex: `rollout-*.jsonl`, lines `{timestamp, type, payload}` with Responses items in `response_item`, of one session.

A session holds several traces, all of one group, where its context was compacted and where it ran sub-agents. The
schemas of its tools are not recorded. Every non-error tool call is a candidate (PivotRL, appendix A.2).
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

from turntree.core.messages import as_object, joined_text
from turntree.run.jsonl import placed
from turntree.traces.formats.responses import read_item
from turntree.traces.formats.row import (
    ANOTHER_PROMPT,
    FAILED,
    LINE,
    UNSEEN,
    BrokenMessage,
    ChatRow,
    at_line,
    count_unknown,
    failed_exit,
    list_of,
    role_of,
    said_before,
    text_of,
    told_by,
)

_LINES = ("session_meta", "response_item", "event_msg", "turn_context", "compacted")
_EXIT = re.compile(r"(?:(?!Output:).*\n){0,4}?(?:Exit code:|Process exited with code) (\d{1,9})[ \t]*(?:\n|\Z)")
_FAILED = re.compile(  # calls that were refused, stopped, or not made
    r"(Wall time: .*\n)?aborted( by user)?\s*\Z|(exec command|patch) rejected|apply_patch verification failed"
    r"|failed to parse function arguments|unsupported call: |(exec_command|write_stdin) failed\b"
)
# messages of the user that Codex writes itself begin so, and begin no turn
_CONTEXT = re.compile(
    r"\s*(?:# AGENTS\.md instructions|<(?:environment_context|user_instructions|user_shell_command|skill|turn_aborted"
    r"|subagent_notification)>)"
)
_HIDDEN = ("compaction", "compaction_summary", "context_compaction", "web_search_call")  # encrypted, or not recorded
_CODEX_KEYS = ("timestamp", "type", "payload", "ordinal")


def _is_codex(first: dict[str, Any]) -> str:
    known = first.get("type") in _LINES and isinstance(first.get("payload"), dict)
    return "" if known else f"no line of type {', '.join(_LINES)} with a 'payload'"


@told_by(session=_is_codex)
def read_codex(row: dict[str, Any]) -> Iterator[ChatRow]:
    """A Codex session, one trace for each context. Events that only tell the user what happens are counted, and so are
    turns that the user rolled back (`abandoned_branch`)."""
    chat = ChatRow(domain="software engineering", rule="tool_calls")
    for line in list_of(row, "events", "the lines of a session"):
        if not isinstance(line, dict) or not isinstance(line.get("payload"), dict):
            broken = [BrokenMessage("has no payload", field="payload")] if isinstance(line, dict) else [line]
            chat.messages += at_line(as_object(line), broken)
            continue
        kind, payload = line.get("type"), cast("dict[str, Any]", line["payload"])
        count_unknown(line, _CODEX_KEYS, "lines[].", chat.ignored)
        if kind == "session_meta":
            with placed(line=line.get(LINE)):
                _codex_meta(payload, chat)
        elif kind == "response_item":
            chat.messages += at_line(line, _codex_item(payload, chat))
        elif kind == "compacted":
            yield chat
            chat = chat.compacted([m for m in chat.messages if role_of(m) == "system"][:1])
            again = payload.get("replacement_history")
            told = [one for item in (again if isinstance(again, list) else [again]) for one in _codex_item(item, chat)]
            rest = [{"role": "user", "content": payload.get("message"), UNSEEN: ANOTHER_PROMPT}]  # it tells no more
            chat.messages += at_line(line, [said_before(one) for one in (told if again else rest)])
        elif payload.get("type") == "thread_rolled_back":
            chat.messages += at_line(line, _roll_back(chat, payload.get("num_turns")))
        else:
            chat.ignored[f"lines of type {kind}"] += 1
    yield chat


def _codex_meta(payload: dict[str, Any], chat: ChatRow) -> None:
    """The first line names the session; later ones name the sessions that it continues, all of which are one group."""
    for name in filter(None, (text_of(payload, (key,)) for key in ("id", "session_id", "forked_from_id"))):
        chat.id, chat.group = chat.id or name, name
    told: Any = payload.get("base_instructions") or payload.get("instructions")
    prompt = told.get("text") if isinstance(told, dict) else told
    if prompt and not any(role_of(message) == "system" for message in chat.messages):
        chat.messages.insert(0, {"role": "system", "content": prompt})


def _roll_back(chat: ChatRow, turns: Any) -> list[Any]:
    """Cut off the last `turns` messages of the user, and what follows the first of them."""
    if type(turns) is not int or turns < 1:
        return [BrokenMessage(f"is {turns!r}, not a number of turns", field="num_turns")]
    asked = [
        place
        for place, message in enumerate(chat.messages)
        if role_of(message) == "user" and not _CONTEXT.match(str(joined_text(message.get("content"), Counter())))
    ]
    if asked:
        kept = asked[-turns:][0]
        runs = itertools.groupby(map(role_of, chat.messages[kept:]))
        chat.left_out["abandoned_branch"] += sum(role == "assistant" for role, _ in runs)
        del chat.messages[kept:]
    return []


def _codex_item(item: Any, chat: ChatRow) -> list[Any]:
    """The message of an item. Older versions wrap what a tool returned: `{output, metadata: {exit_code}}`, also as JSON
    text, or `{content, success}`; newer ones tell the exit code in the first lines of the text."""
    kind, output = str(as_object(item).get("type")), as_object(item).get("output")
    if kind in _HIDDEN:
        chat.ignored[f"{kind} items"] += 1
        return [{"role": "assistant" if kind.endswith("_call") else "user", "content": "", UNSEEN: True}]
    message = read_item(item, chat.ignored)
    if role_of(message) != "tool":
        return [] if message is None else [message]
    if isinstance(output, dict):
        content = next((output[key] for key in ("output", "content") if output.get(key) is not None), None)
        return [message | {"content": content, FAILED: output.get("success") is False or failed_exit(output) is True}]
    text = str(joined_text(output, Counter()))
    told = _EXIT.match(text)
    return [message | ({FAILED: int(told[1]) > 0} if told else {FAILED: True} if _FAILED.match(text) else {})]
