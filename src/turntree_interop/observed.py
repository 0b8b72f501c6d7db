"""Calls of a model as a service for tracing recorded them (LangSmith, Langfuse), each with its whole history: of one
trace, the conversations that no later call continues. Also how other recordings tell calls, contents and responses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from turntree.core.errors import InputError
from turntree.run.identity import fingerprint
from turntree.run.jsonl import parse_json
from turntree.traces.formats.row import (
    FAILED,
    RESPONSE,
    ChatRow,
    call_of,
    chat_tools,
    count_unknown,
    each_object,
    part_of,
    said_before,
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
            told["tool_calls"] = calls_in(calls, _CALL_KEYS, "tool_calls[].", self.ignored)
        told |= {key: message[key] for key in ("tool_call_id", "function_call") if message.get(key)}
        told |= {"weight": 0} if any(map(was_cut, (raw, message, message.get("response_metadata")))) else {}
        return told | ({FAILED: True} if message.get("status") == "error" else {})


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
            chat.messages[place] = said_before(chat.messages[place])
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


def calls_in(calls: Any, known: Collection[str], inside: str, ignored: Counter[str], named: str = "name id") -> Any:
    """Calls that tell their name and arguments themselves, or in a `function`, both with these keys; `named`: what
    their names and ids are called."""
    name, place = named.split()

    def read(call: dict[str, Any]) -> list[Any]:
        function = part_of(call, "function") or call
        unread = count_unknown(call, known, inside, ignored)
        unread |= {} if function is call else count_unknown(function, known, inside, ignored)
        return [call_of(function.get(name), function.get("args", function.get("arguments")), call.get(place), unread)]

    return each_object(cast("list[Any]", calls), read) if isinstance(calls, list) else calls


def texts_of(content: Any, ignored: Counter[str]) -> tuple[Any, bool]:
    """The parts of a content that are text, and whether there were more: others are left out and counted."""
    if not isinstance(content, list):
        return content, False
    parts = cast("list[Any]", content)
    texts = [part for part in parts if isinstance(part, dict) and part.get("type", "text") == "text"]
    ignored += Counter({"parts that are not text": len(content) - len(texts)})
    return texts, len(texts) < len(content)


def one_turn_a_response(messages: list[Any]) -> list[Any]:
    """The messages with the pieces of one response of the model side by side, where results were logged between its
    parallel calls."""
    pieces: dict[Any, list[Any]] = {}
    for place, message in enumerate(messages):
        response = message.get(RESPONSE) if isinstance(message, dict) else None
        pieces.setdefault(response if isinstance(response, str) else place, []).append(message)
    return [message for response in pieces.values() for message in response]
