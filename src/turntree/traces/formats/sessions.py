"""Session files of coding agents on the command line: JSON lines of which all belong to one session.

| format | the file |
|---|---|
| `codex` | `rollout-*.jsonl` of Codex: lines `{timestamp, type, payload}`, Responses items in `response_item` |
| `claude_code` | `<session>.jsonl` of Claude Code: lines of `type` user and assistant with the API's `message` |

A session holds several traces where its context was compacted (the policy then sees the summary) and where it ran
sub-agents. All of them share one group. Neither format records the schemas of its tools. Every non-error tool call is a
candidate (PivotRL, appendix A.2).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

from turntree.core.errors import InputError
from turntree.core.messages import joined_text
from turntree.observe.jsonl import parse_object
from turntree.traces.formats.responses import read_item
from turntree.traces.formats.row import (
    FAILED,
    RESPONSE,
    BrokenMessage,
    ChatRow,
    call_of,
    count_unknown,
    failed_exit,
    list_of,
    one_turn_a_response,
    text_of,
    told_by,
    words,
)

_DOMAIN = "software engineering"

# Codex

_LINES = ("session_meta", "response_item", "event_msg", "turn_context", "compacted")
_EXIT = re.compile(r"(?:(?!Output:).*\n){0,4}?(?:Exit code:|Process exited with code) (\d{1,9})[ \t]*(?:\n|\Z)")
_CODEX_KEYS = ("timestamp", "type", "payload", "ordinal")


def _is_codex(first: dict[str, Any]) -> str:
    known = first.get("type") in _LINES and isinstance(first.get("payload"), dict)
    return "" if known else f"no line of type {', '.join(_LINES)} with a 'payload'"


@told_by(session=_is_codex)
def read_codex(row: dict[str, Any]) -> Iterator[ChatRow]:
    """A Codex session, one trace for each context. Events that only tell the user what happens are counted."""
    chat = _part(None, 1)
    parts, sessions = 1, list[str]()
    for line in list_of(row, "events", "the lines of a session"):
        if not isinstance(line, dict) or not isinstance(line.get("payload"), dict):
            chat.messages.append(
                line if not isinstance(line, dict) else BrokenMessage("has no payload", field="payload")
            )
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
            parts += 1
            chat = _part(next((m for m in chat.messages if _role(m) == "system"), None), parts)
            again = payload.get("replacement_history")
            items = again if isinstance(again, list) else [{"role": "user", "content": payload.get("message")}]
            kept = [read_item(item, chat.ignored) for item in items]
            chat.messages += [m | {"weight": 0} if _role(m) == "assistant" else m for m in kept if m is not None]
        else:
            chat.ignored[f"lines of type {kind}"] += 1
    yield _closed(chat, sessions)


def _codex_meta(payload: dict[str, Any], chat: ChatRow, sessions: list[str]) -> None:
    """The first line names the session; later ones name the sessions that it continues."""
    sessions += [one for key in ("id", "session_id", "forked_from_id") if (one := text_of(payload, (key,)))]
    told: Any = payload.get("base_instructions") or payload.get("instructions")
    prompt = told.get("text") if isinstance(told, dict) else told
    if prompt and not any(_role(message) == "system" for message in chat.messages):
        chat.messages.insert(0, {"role": "system", "content": prompt})


def _codex_result(payload: dict[str, Any], message: Any) -> Any:
    """Older versions wrap what a tool returned: `{output, metadata: {exit_code}}`, also as JSON text, or `{content,
    success}`; newer ones tell the exit code in the first lines of the text."""
    output = payload.get("output")
    if not isinstance(message, dict) or message.get("role") != "tool":
        return message
    if isinstance(output, dict):
        content = next((output[key] for key in ("output", "content") if output.get(key) is not None), None)
        return message | {
            "content": content,
            FAILED: output.get("success") is False or failed_exit(output) is True,
        }
    failed = _failed_in(joined_text(output, Counter()))
    return message if failed is None else message | {FAILED: failed}


def _failed_in(text: Any) -> bool | None:
    """`failed_exit` of what a tool returned as text."""
    if not isinstance(text, str):
        return None
    if (told := _EXIT.match(text)) is not None:
        return int(told[1]) > 0
    try:
        return failed_exit(parse_object(text)) if text.startswith("{") else None
    except InputError:
        return None


def _closed(chat: ChatRow, sessions: list[str]) -> ChatRow:
    """All traces that stem from one session are one group."""
    if sessions:
        chat.id = sessions[0] if chat.id == "1" else f"{sessions[0]}#{chat.id}"
        chat.group = sessions[-1]
    else:
        chat.id = None
    return chat


def _part(system: Any, number: int) -> ChatRow:
    return ChatRow(messages=[system] if system else [], id=str(number), domain=_DOMAIN, rule="tool_calls")


def _role(message: Any) -> Any:
    return cast("dict[str, Any]", message).get("role") if isinstance(message, dict) else None


# Claude Code

_SAID = ("user", "assistant")
_CLAUDE_KEYS = words(
    "type uuid parentUuid logicalParentUuid sessionId timestamp message isSidechain userType cwd version gitBranch "
    "requestId isMeta isCompactSummary isVisibleInTranscriptOnly toolUseResult toolUseID parentToolUseID slug agentId "
    "permissionMode entrypoint isApiErrorMessage error sourceToolAssistantUUID sourceToolUseID thinkingMetadata todos "
    "promptId origin level subtype content compactMetadata leafUuid summary snapshot messageId isSnapshotUpdate data "
    "operation attachment teamName imagePasteIds planContent apiError mcpMeta"
)
_BLOCK_KEYS = words(
    "type text thinking signature data citations cache_control id name input caller tool_use_id content is_error source"
)


def _is_claude(first: dict[str, Any]) -> str:
    said = first.get("type") in _SAID and isinstance(first.get("message"), dict) and "uuid" in first
    marks = ("sessionId", "leafUuid", "messageId")
    other = isinstance(first.get("type"), str) and "payload" not in first and any(key in first for key in marks)
    return "" if said or other else "no line with 'type', 'message' and 'uuid'"


@told_by(session=_is_claude)
def read_claude_code(row: dict[str, Any]) -> Iterator[ChatRow]:
    """A Claude Code session: its main thread and each sub-agent, one trace for each context.

    Branches that the user abandoned by rewinding are left out, counted as `abandoned_branch`. The system prompt is not
    recorded.
    """
    threads: dict[str, _Thread] = {}
    owner: dict[str, str] = {}  # line -> its thread
    session = first = None
    for line in list_of(row, "events", "the lines of a session"):
        raw = cast("dict[str, Any]", line) if isinstance(line, dict) else {}
        session = session or text_of(raw, ("sessionId",))
        uuid, parent = raw.get("uuid"), raw.get("parentUuid")
        if first is None and raw.get("type") in _SAID and not raw.get("isSidechain"):
            first = text_of(raw, ("uuid",))
        side = raw.get("agentId") or (owner.get(str(parent)) or uuid) if raw.get("isSidechain") else None
        name = str(side or "")
        owner[str(uuid)] = name
        yield from threads.setdefault(name, _Thread(name)).take(line, session, first)
    for thread in threads.values():
        yield from thread.close(session, first)


class _Thread:
    """One conversation of a session, as its lines come."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._part = 0
        self._open()

    def _open(self) -> None:
        self._part += 1
        self._chat = ChatRow(messages=[], domain=_DOMAIN, rule="tool_calls", ignored=Counter(), left_out=Counter())
        self._lines: list[tuple[Any, int]] = []  # uuid and the number of messages after it

    def take(self, line: Any, session: str | None, first: str | None) -> Iterator[ChatRow]:
        """The next line; yields the trace that a compaction ends."""
        chat = self._chat
        if not isinstance(line, dict):
            chat.messages.append(line)  # refused, with its place, when messages are parsed
            return
        count_unknown(line, _CLAUDE_KEYS, "lines[].", chat.ignored)
        kind = line.get("type")
        if kind not in _SAID:
            chat.ignored[f"lines of type {kind}"] += 1
            return
        if line.get("isApiErrorMessage"):
            chat.ignored["lines that report an error of the API"] += 1
            return
        if line.get("isCompactSummary") and chat.messages:
            yield from self.close(session, first)
            self._open()
            chat = self._chat
        self._rewind(line)
        message = line.get("message")
        chat.messages += _claude(str(kind), message, chat) if isinstance(message, dict) else [
            BrokenMessage("has no message", turn=kind == "assistant", field="message")
        ]  # fmt: skip
        self._lines.append((str(line.get("uuid")), len(chat.messages)))

    def close(self, session: str | None, first: str | None) -> Iterator[ChatRow]:
        """The trace. A fork of the session repeats its lines under another name, but with their uuids."""
        chat = self._chat
        chat.messages = one_turn_a_response(chat.messages)
        part = [f"#{self._part}"] if self._part > 1 else []
        chat.id = "".join([session, *([f"/{self._name}"] if self._name else []), *part]) if session else None
        chat.group, chat.thread = session, first
        if chat.messages:
            yield chat

    def _rewind(self, line: dict[str, Any]) -> None:
        """Where a user message follows an earlier line than the last one, the lines between are another branch."""
        said: Any = line.get("message")
        content: Any = cast("dict[str, Any]", said).get("content") if isinstance(said, dict) else None
        if isinstance(content, list) and not line.get("isMeta"):  # those go with the results of calls
            blocks = cast("list[Any]", content)
            typed = not any(isinstance(block, dict) and block.get("type") == "tool_result" for block in blocks)
        else:
            typed = isinstance(content, str)
        if line.get("type") != "user" or not typed or not self._lines:
            return
        known = {uuid: (i, kept) for i, (uuid, kept) in enumerate(self._lines)}
        beginning = "parentUuid" in line and line["parentUuid"] is None
        place = (-1, 0) if beginning else known.get(str(line.get("parentUuid")))
        if place is None or place[0] == len(self._lines) - 1:
            return
        dropped = self._chat.messages[place[1] :]
        turns = len({str(m.get(RESPONSE) or id(m)) for m in dropped if _role(m) == "assistant"})
        if turns and not any(_role(m) == "tool" for m in dropped[-1:]):
            self._chat.left_out["abandoned_branch"] += turns
            del self._chat.messages[place[1] :]
            del self._lines[place[0] + 1 :]


def _claude(role: str, message: dict[str, Any], chat: ChatRow) -> list[Any]:
    """A message of the API's: its text and calls, or the results that it brings, each a message of its own."""
    content = message.get("content")
    cut = {"weight": 0} if message.get("stop_reason") == "max_tokens" else {}
    if isinstance(content, str) or content is None:
        return [{"role": role, "content": content, RESPONSE: message.get("id"), **cut}]
    if not isinstance(content, list):
        return [BrokenMessage("is neither text nor a list", turn=role == "assistant", field="message.content")]
    said: list[Any] = []
    calls: list[Any] = []
    results: list[Any] = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        unread = count_unknown(block, _BLOCK_KEYS, "content[].", chat.ignored) if isinstance(block, dict) else {}
        if kind == "text":
            said.append(block.get("text"))
        elif kind == "tool_use":
            calls.append(call_of(block.get("name"), block.get("input"), block.get("id"), unread))
        elif kind == "tool_result":
            result = {
                "role": "tool",
                "content": _shown(block.get("content"), chat),
                "tool_call_id": block.get("tool_use_id"),
            }
            results.append(result | {FAILED: block.get("is_error") is True})
        elif kind in ("thinking", "redacted_thinking"):
            chat.ignored["thinking blocks"] += 1
        else:
            chat.ignored[f"blocks of type {kind}"] += 1
    if not all(isinstance(text, str) for text in said):
        return [BrokenMessage("holds a text block without text", turn=role == "assistant", field="message.content")]
    turn: dict[str, Any] = {"role": role, "content": "\n".join(said)}
    if role == "assistant":
        turn |= {RESPONSE: message.get("id"), **cut} | ({"tool_calls": calls} if calls else {})
        return [turn] if said or calls or message.get("id") is None else []
    return [*results, *([turn] if said else [])]


def _shown(content: Any, chat: ChatRow) -> Any:
    """The text that a tool returned; parts that are not text (images, ...) are left out and counted."""
    if not isinstance(content, list):
        return content
    texts = [part for part in content if isinstance(part, dict) and part.get("type", "text") == "text"]
    if len(texts) < len(content):
        chat.ignored["parts of results that are not text"] += len(content) - len(texts)
    return texts
