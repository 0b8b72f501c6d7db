"""Codex: `rollout-*.jsonl`, lines `{timestamp, type, payload}` with Responses items in `response_item`, of one session.

A session holds several traces where its context was compacted (the policy then sees the summary) and where it ran
sub-agents. All of them share one group. The schemas of its tools are not recorded. Every non-error tool call is a
candidate (PivotRL, appendix A.2).
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

from turntree.core.errors import InputError
from turntree.core.messages import joined_text
from turntree.run.jsonl import parse_object
from turntree.traces.formats.responses import read_item
from turntree.traces.formats.row import (
    FAILED,
    BrokenMessage,
    ChatRow,
    count_unknown,
    failed_exit,
    list_of,
    role_of,
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
_CODEX_KEYS = ("timestamp", "type", "payload", "ordinal")


def _is_codex(first: dict[str, Any]) -> str:
    known = first.get("type") in _LINES and isinstance(first.get("payload"), dict)
    return "" if known else f"no line of type {', '.join(_LINES)} with a 'payload'"


@told_by(session=_is_codex)
def read_codex(row: dict[str, Any]) -> Iterator[ChatRow]:
    """A Codex session, one trace for each context. Events that only tell the user what happens are counted.

    Turns that the user rolled back are left out, counted as `abandoned_branch`.
    """
    chat = ChatRow(domain="software engineering", rule="tool_calls")
    sessions: list[str] = []
    for line in list_of(row, "events", "the lines of a session"):
        if not isinstance(line, dict) or not isinstance(line.get("payload"), dict):
            broken = BrokenMessage("has no payload", field="payload")
            chat.messages.append(broken if isinstance(line, dict) else line)
            continue
        kind, payload = line.get("type"), cast("dict[str, Any]", line["payload"])
        count_unknown(line, _CODEX_KEYS, "lines[].", chat.ignored)
        if kind == "session_meta":
            _codex_meta(payload, chat, sessions)
        elif kind == "response_item":
            message = read_item(payload, chat.ignored)
            chat.messages += [] if message is None else [_codex_result(payload, message)]
        elif kind == "compacted":
            yield _closed(chat, sessions)
            chat = chat.compacted([m for m in chat.messages if role_of(m) == "system"][:1])
            again = payload.get("replacement_history")
            items = again if isinstance(again, list) else [{"role": "user", "content": payload.get("message")}]
            kept = [read_item(item, chat.ignored) for item in items]
            chat.messages += [m | {"weight": 0} if role_of(m) == "assistant" else m for m in kept if m is not None]
        elif payload.get("type") == "thread_rolled_back":
            _roll_back(chat, payload.get("num_turns"))
        else:
            chat.ignored[f"lines of type {kind}"] += 1
    yield _closed(chat, sessions)


def _codex_meta(payload: dict[str, Any], chat: ChatRow, sessions: list[str]) -> None:
    """The first line names the session; later ones name the sessions that it continues."""
    sessions += [one for key in ("id", "session_id", "forked_from_id") if (one := text_of(payload, (key,)))]
    told: Any = payload.get("base_instructions") or payload.get("instructions")
    prompt = told.get("text") if isinstance(told, dict) else told
    if prompt and not any(role_of(message) == "system" for message in chat.messages):
        chat.messages.insert(0, {"role": "system", "content": prompt})


def _roll_back(chat: ChatRow, turns: Any) -> None:
    """Cut off the last `turns` messages of the user, and what follows the first of them."""
    if type(turns) is not int or turns < 1:
        raise InputError(f"is {turns!r}, not a number of turns", field="num_turns")
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


def _codex_result(payload: dict[str, Any], message: Any) -> Any:
    """Older versions wrap what a tool returned: `{output, metadata: {exit_code}}`, also as JSON text, or `{content,
    success}`; newer ones tell the exit code in the first lines of the text."""
    output = payload.get("output")
    if not isinstance(message, dict) or message.get("role") != "tool":
        return message
    if isinstance(output, dict):
        content = next((output[key] for key in ("output", "content") if output.get(key) is not None), None)
        return message | {"content": content, FAILED: output.get("success") is False or failed_exit(output) is True}
    failed = _failed_in(joined_text(output, Counter()))
    return message if failed is None else message | {FAILED: failed}


def _failed_in(text: Any) -> bool | None:
    """`failed_exit` of what a tool returned as text."""
    if not isinstance(text, str):
        return None
    if (told := _EXIT.match(text)) is not None:
        return int(told[1]) > 0
    if _FAILED.match(text):
        return True
    try:
        return failed_exit(parse_object(text)) if text.startswith("{") else None
    except InputError:
        return None


def _closed(chat: ChatRow, sessions: list[str]) -> ChatRow:
    """All traces that stem from one session are one group."""
    if sessions:
        chat.id, chat.group = sessions[0], sessions[-1]
    return chat
