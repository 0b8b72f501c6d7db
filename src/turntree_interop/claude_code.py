"""Claude Code: `<session>.jsonl`, lines of `type` user and assistant with the API's `message`, of one session.

A session holds several traces where its context was compacted (the policy then sees the summary) and where it ran
sub-agents. All of them share one group. The schemas of its tools are not recorded. Every non-error tool call is a
candidate (PivotRL, appendix A.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from turntree.core.messages import as_object
from turntree.traces.formats.row import (
    FAILED,
    RESPONSE,
    UNSEEN,
    BrokenMessage,
    ChatRow,
    at_line,
    call_of,
    count_unknown,
    list_of,
    part_of,
    role_of,
    text_of,
    told_by,
    was_cut,
    words,
)
from turntree_interop.observed import one_turn_a_response, texts_of

_SAID = ("user", "assistant")
_CLAUDE_KEYS = words(
    "type uuid parentUuid logicalParentUuid sessionId timestamp message isSidechain userType cwd version gitBranch "
    "requestId isMeta isCompactSummary isVisibleInTranscriptOnly toolUseResult toolUseID parentToolUseID slug agentId "
    "permissionMode entrypoint isApiErrorMessage error sourceToolAssistantUUID sourceToolUseID thinkingMetadata todos "
    "promptId origin level subtype content compactMetadata leafUuid summary snapshot messageId isSnapshotUpdate data "
    "operation attachment durationMs teamName imagePasteIds planContent apiError mcpMeta"
)
_BLOCK_KEYS = words(
    "type text thinking signature data citations cache_control id name input caller tool_use_id content is_error source"
)


def _is_claude(first: dict[str, Any]) -> str:
    said = first.get("type") in _SAID and isinstance(first.get("message"), dict) and "uuid" in first
    marks, others = ("sessionId", "leafUuid", "messageId"), {"payload", "traceId", "startTime"}
    other = isinstance(first.get("type"), str) and any(key in first for key in marks) and others.isdisjoint(first)
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
        raw = as_object(line)
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
        self._chat = ChatRow(domain="software engineering", rule="tool_calls")
        self._lines: dict[str, int] = {}  # uuid of a line, of whatever type, and the number of messages after it

    def take(self, line: Any, session: str | None, first: str | None) -> Iterator[ChatRow]:
        """The next line; yields the trace that a compaction ends."""
        chat = self._chat
        if not isinstance(line, dict):
            chat.messages.append(line)  # refused, with its place, when messages are parsed
            return
        count_unknown(line, _CLAUDE_KEYS, "lines[].", chat.ignored)
        uuid = line["uuid"] if isinstance(line.get("uuid"), str) else ""
        if uuid and uuid in self._lines:
            chat.ignored["lines that are written twice"] += 1
            return
        kind, message = _said(line)
        if kind not in _SAID or line.get("isApiErrorMessage"):
            what = "lines that report an error of the API" if kind in _SAID else f"lines of type {kind}"
            chat.ignored[what] += 1
            self._lines |= {uuid: len(chat.messages)} if uuid else {}
            return
        if line.get("isCompactSummary") and chat.messages:
            yield from self.close(session, first)
            chat = self._chat = chat.compacted()
            self._lines = {}
        self._rewind(line)
        broken = BrokenMessage("has no message", turn=kind == "assistant", field="message")
        chat.messages += at_line(line, _claude(str(kind), message, chat) if isinstance(message, dict) else [broken])
        self._lines |= {uuid: len(chat.messages)} if uuid else {}

    def close(self, session: str | None, first: str | None) -> Iterator[ChatRow]:
        """The trace. A fork of the session repeats its lines under another name, but with their uuids."""
        chat = self._chat
        chat.messages = one_turn_a_response(chat.messages)
        chat.id = f"{session}/{self._name}" if session and self._name else session
        chat.group, chat.thread = session, first
        if chat.messages:
            yield chat

    def _rewind(self, line: dict[str, Any]) -> None:
        """Where a user message follows an earlier line than the last one, the lines between are another branch."""
        content: Any = part_of(line, "message").get("content")
        if isinstance(content, list) and not line.get("isMeta"):  # those go with the results of calls
            blocks = cast("list[Any]", content)
            typed = not any(isinstance(block, dict) and block.get("type") == "tool_result" for block in blocks)
        else:
            typed = isinstance(content, str)
        if line.get("type") != "user" or not typed or not self._lines:
            return
        beginning = "parentUuid" in line and line["parentUuid"] is None
        kept = 0 if beginning else self._lines.get(str(line.get("parentUuid")))
        if kept is None:
            return
        dropped = self._chat.messages[kept:]
        turns = len({str(m.get(RESPONSE) or id(m)) for m in dropped if role_of(m) == "assistant"})
        if turns and not any(role_of(m) == "tool" for m in dropped[-1:]):
            self._chat.left_out["abandoned_branch"] += turns
            del self._chat.messages[kept:]
            self._lines = {uuid: count for uuid, count in self._lines.items() if count <= kept}


def _said(line: dict[str, Any]) -> tuple[str, Any]:
    """The type of a line and its message; what the user typed while the agent worked is an attachment."""
    attached = part_of(line, "attachment")
    if line.get("type") == "attachment" and attached.get("type") == "queued_command":
        if attached.get("commandMode") == "prompt":
            return "user", {"content": attached.get("prompt")}
        return f"attachment ({attached.get('type')}, {attached.get('commandMode')})", None
    return str(line.get("type")), line.get("message")


def _claude(role: str, message: dict[str, Any], chat: ChatRow) -> list[Any]:
    """A message of the API's: its text and calls, or the results that it brings, each a message of its own."""
    content = message.get("content")
    cut = {"weight": 0} if was_cut(message) else {}
    if isinstance(content, str) or content is None:
        return [{"role": role, "content": content, RESPONSE: message.get("id"), **cut}]
    if not isinstance(content, list):
        return [BrokenMessage("is neither text nor a list", turn=role == "assistant", field="message.content")]
    said: list[Any] = []
    calls: list[Any] = []
    results: list[Any] = []
    unseen_here = False
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        unread = count_unknown(block, _BLOCK_KEYS, "content[].", chat.ignored) if isinstance(block, dict) else {}
        if kind == "text":
            said.append(block.get("text"))
        elif kind == "tool_use":
            calls.append(call_of(block.get("name"), block.get("input"), block.get("id"), unread))
        elif kind == "tool_result":
            text, unseen = texts_of(block.get("content"), chat.ignored)
            result = {"role": "tool", "content": text, "tool_call_id": block.get("tool_use_id"), UNSEEN: unseen}
            results.append(result | {FAILED: block.get("is_error") is True})
        elif kind in ("thinking", "redacted_thinking"):
            chat.ignored["thinking blocks"] += 1
        else:
            chat.ignored[f"blocks of type {kind}"] += 1
            unseen_here = True
    if not all(isinstance(text, str) for text in said):
        return [BrokenMessage("holds a text block without text", turn=role == "assistant", field="message.content")]
    turn: dict[str, Any] = {"role": role, "content": "\n".join(said), UNSEEN: unseen_here}
    if role == "assistant":
        turn |= {RESPONSE: message.get("id"), **cut} | ({"tool_calls": calls} if calls else {})
        return [turn] if said or calls or message.get("id") is None else []
    return [*results, *([turn] if said or unseen_here else [])]
