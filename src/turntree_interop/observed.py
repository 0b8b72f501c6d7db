"""Calls of a model as a service for tracing recorded them (LangSmith, Langfuse), each with its whole history: of one
trace, the conversations that no later call continues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from turntree.core.errors import InputError
from turntree.run.identity import fingerprint
from turntree.run.jsonl import parse_json
from turntree.traces.formats.row import (
    FAILED,
    SAID_BEFORE,
    ChatRow,
    call_of,
    chat_tools,
    count_unknown,
    part_of,
    was_cut,
    words,
)

# of a message of OpenAI's or LangChain's, as text, as `{lc, kwargs}`, or as Langfuse writes it
_MESSAGE_KEYS = words(
    "role type content tool_calls tool_call_id name id function_call refusal annotations audio artifact "
    "additional_kwargs response_metadata usage_metadata invalid_tool_calls status example finish_reason stop_reason"
)
_CALL_KEYS = words("id type name args arguments function index")
_ROLES = {"human": "user", "ai": "assistant"}


@dataclass
class Call:
    """What a model was asked and said, as messages; `said` is None where the call failed."""

    trace: str | None
    asked: list[Any]
    said: Any
    tools: list[Any]
    at: str


@dataclass
class Observed:
    """The calls of each thread or trace, and what is not read of the rows."""

    threads: dict[str | None, list[Call]] = field(default_factory=dict[str | None, list[Call]])
    ignored: Counter[str] = field(default_factory=Counter[str])
    damaged: list[Any] = field(default_factory=list[Any])

    def add(self, thread: str | None, trace: str | None, asked: Any, said: Any, tools: Any, at: Any) -> None:
        """`asked` and `said` in any of the forms above. `thread`: what several traces belong to, if known."""
        declared = list(cast("list[Any]", tools) if isinstance(tools, list) else ())
        call = Call(trace, [], self._message(said), declared, str(at))
        for raw in cast("list[Any]", asked) if isinstance(asked, list) else [asked]:
            tool = cast("dict[str, Any]", raw).get("content") if isinstance(raw, dict) else None
            if isinstance(tool, dict) and "function" in tool:  # Langfuse tells LangChain's tools as messages
                call.tools.append(tool)
            else:
                call.asked.append(self._message(raw))
        self.threads.setdefault(thread or trace, []).append(call)

    def rows(self) -> Iterator[ChatRow]:
        named = Counter[str | None]()
        for thread, calls in self.threads.items():
            for name, chat in _conversations(calls):
                named[name] += 1
                chat.ignored, self.ignored = chat.ignored + self.ignored, Counter()
                chat.id, chat.group, chat.context = name, thread, named[name]
                yield chat
        if self.damaged:  # refused with their lines
            yield ChatRow(messages=self.damaged, ignored=self.ignored)

    def _message(self, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        message = cast("dict[str, Any]", raw)
        message = message["kwargs"] if isinstance(message.get("kwargs"), dict) else message
        count_unknown(message, _MESSAGE_KEYS, "messages[].", self.ignored)
        role, content = message.get("role") or message.get("type"), message.get("content")
        calls = message.get("tool_calls") or part_of(message, "additional_kwargs").get("tool_calls")
        if message.get("invalid_tool_calls") and isinstance(calls, list | None):  # a turn is not the one without them
            calls = [*(calls or ()), *message["invalid_tool_calls"]]
        if isinstance(content, list) and calls:  # Anthropic's blocks say the calls again
            content = [part for part in content if not (isinstance(part, dict) and part.get("type") == "tool_use")]
        told: dict[str, Any] = {"role": _ROLES.get(str(role), role), "content": content}
        if calls:
            told["tool_calls"] = [self._call(one) for one in calls] if isinstance(calls, list) else calls
        told |= {key: message[key] for key in ("tool_call_id", "function_call") if message.get(key)}
        told |= {"weight": 0} if any(map(was_cut, (raw, message, message.get("response_metadata")))) else {}
        return told | ({FAILED: True} if message.get("status") == "error" else {})

    def _call(self, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        unread = count_unknown(raw, _CALL_KEYS, "tool_calls[].", self.ignored)
        called: Any = raw["function"] if isinstance(raw.get("function"), dict) else raw
        unread |= count_unknown(called, _CALL_KEYS, "tool_calls[].", self.ignored) if called is not raw else {}
        return call_of(called.get("name"), called.get("args", called.get("arguments")), raw.get("id"), unread)


def _conversations(calls: Iterable[Call]) -> Iterator[tuple[str | None, ChatRow]]:
    """Each with the trace of its last call. A call continues the one with the longest history that its own begins with.
    A turn that stands in the history of several conversations is a candidate in the one in which it was said."""
    open_: dict[tuple[str, ...], tuple[Call, dict[int, Any]]] = {}  # with what was said in it, by its place
    answers: set[str] = set()
    failed = Counter[str]()
    for call in sorted(calls, key=lambda call: call.at):
        if call.said is None:
            failed["failed_call"] += 1
            continue
        names = tuple(_name(message) for message in (*call.asked, call.said))
        before = next((names[:n] for n in range(len(names) - 1, 0, -1) if names[:n] in open_), None)
        own = open_.pop(before)[1] if before else dict[int, Any]()
        open_[names] = (call, own | {len(call.asked): call.said})
        answers.add(names[-1])
    for names, (call, own) in open_.items():
        chat = ChatRow(messages=[*call.asked, call.said], left_out=failed)
        chat.tools, failed = chat_tools(call.tools, chat.ignored), Counter[str]()
        for place, said in own.items():
            chat.messages[place] = said  # later histories need not tell that it was cut
        for place in {n for n, name in enumerate(names) if name in answers} - own.keys():
            chat.messages[place] = {**chat.messages[place], **SAID_BEFORE}
        yield call.trace, chat
    if failed:
        yield None, ChatRow(left_out=failed)


def _name(message: Any) -> str:
    """Equal messages, equal names, however nothing is written."""
    said = cast("dict[str, Any]", message).items() if isinstance(message, dict) else None
    return fingerprint(str(message) if said is None else {key: value for key, value in said if value})


def from_text(value: Any) -> Any:
    """A value, or the one that its text is: tables hold inputs and outputs as JSON."""
    if not isinstance(value, str) or value[:1] not in ("{", "["):
        return value
    try:
        return parse_json(value)
    except InputError:
        return value
