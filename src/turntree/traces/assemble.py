"""From a chat-shaped row to a trace: assistant turns are put together, and what is lost is counted.

Consecutive assistant messages are one turn when the first makes no call, or the next makes calls and says nothing
(data sets write text and calls, or parallel calls, as messages of their own). Their texts are joined by a newline.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from turntree.core.errors import InputError
from turntree.core.messages import REASONING_KEYS, Message, ToolCall, as_object
from turntree.run.identity import fingerprint
from turntree.run.jsonl import located, parse_json, parse_object, placed, read_text
from turntree.traces.candidates import rule_reason, skipped_turns
from turntree.traces.formats.row import (
    ACT,
    CALL_IN_TEXT,
    FAILED,
    LINE,
    RESPONSE,
    SKIP,
    UNSEEN,
    BrokenMessage,
    ChatRow,
    RowRefused,
    Rule,
    chat_tools,
    count_unknown,
    failed_exit,
    of_today,
)
from turntree.traces.schema import MESSAGE_KEYS, Trace, check_schemas, check_tools

NOT_TRAINED = "marked_not_trained"
PIVOT_HISTORY = "history_of_a_pivot_row"
AFTER_IMAGE = "after_an_image"
ARGUMENTS = "arguments_not_json"
MALFORMED = "malformed_message"
AFTER_MALFORMED = "after_malformed_message"
_READ = MESSAGE_KEYS | {*REASONING_KEYS, "weight", ACT, FAILED, LINE, RESPONSE, SKIP, UNSEEN}
# how the text of a failed tool's result begins: no heading ("Error rate: 3%", "Errors: 0")
_ERROR = re.compile(
    r"traceback \(most recent call last\)|\[error\]|<\w*error>|\{\s*'errors?'\s*:\s*+(?!none|''|\[\]|false|0\b)"
    r"|error\s*(?:[:!.(\d-](?!\s*(?:0|none|null|no)\s*(?:\n|\Z))|\n|\Z)"
    r"|error\s+(?:executing|calling|running|invoking|while|when|during|occurred|code|in|from|parsing|reading|opening)\b"
    r"|(?-i:(?:\w+\.)*(?:[A-Z]\w*(?:Error|Exception)|Exception))\s*:",
    re.IGNORECASE,
)
_NO_ERROR = ("0", "none", "null", "no", "false", "ok")


@dataclass(frozen=True)
class Assembled:
    """`turns` of the agent = `candidates` of the trace + those `dropped` by reason: skipped, after a malformed message,
    or left out by the format."""

    trace: Trace | None
    turns: int
    merged_messages: int
    cut: str | None  # the kind of malformed message that ended the trace
    dropped: Counter[str]

    @property
    def candidates(self) -> int:
        return self.turns - self.dropped.total()


@dataclass(frozen=True)
class _Turn:
    """One message of the trace to be: a raw message, or the raw assistant messages that make one turn."""

    start: int  # index of the first in the row
    parts: tuple[Any, ...]

    @property
    def is_assistant(self) -> bool:
        return _is_assistant(self.parts[0])


def assemble(
    row: ChatRow, *, keep_going: bool, source: dict[str, Any] | None = None, rule: Rule | None = None
) -> Assembled:
    """Build the trace of a row. `rule` says which turns are candidates, if not what the row says.

    A malformed message raises `InputError` with its field; with `keep_going` the trace ends before it instead, and
    the turns from there on are lost and counted. No assistant turn at all raises `RowRefused`.
    """
    turns = _turns([of_today(message, row.ignored) for message in row.messages])
    assistants = sum(turn.is_assistant for turn in turns)
    if not assistants and not row.left_out:
        for turn in () if keep_going else turns:
            _parse(turn, row)  # raises: what could not be read may have been one
        hint = "a trace demonstrates at least one turn"
        raise RowRefused("no_assistant_turn", "hold no assistant turn", field="messages", hint=hint)
    try:
        check_tools(row.tools, row.ignored, strict=row.strict)
        check_schemas(row.tools)
    except InputError as error:
        raise _advised(error, row) from error
    messages: list[Message] = []
    lost: Counter[str] = Counter()
    cut = None
    for i, turn in enumerate(turns):
        try:
            messages.append(_parse(turn, row))
        except InputError as error:
            if not keep_going:
                raise
            cut = ARGUMENTS if str(error.field).endswith("tool_calls.arguments") else MALFORMED
            lost = _lost(turns[i:], cut)
            break
    skip = _skipped(turns[: len(messages)], messages, rule or row.rule)
    trace = _trace(row, messages, skip, cut, source) if assistants > lost.total() else None
    merged = sum(len(turn.parts) - 1 for turn in turns)
    skipped = Counter(skipped_turns(trace).values()) if trace is not None else Counter[str]()
    return Assembled(trace, assistants + row.left_out.total(), merged, cut, lost + row.left_out + skipped)


def count_turns(row: ChatRow) -> int:
    """The number of the agent's turns in a row, readable or not."""
    return sum(turn.is_assistant for turn in _turns(row.messages)) + row.left_out.total()


def _skipped(turns: Sequence[_Turn], messages: Sequence[Message], rule: Rule) -> dict[str, str]:
    """Assistant turn index as text -> why the source, or the rule of its domain, excludes the turn from training."""
    skip: dict[str, str] = {}
    number = 0
    unseen: Any = False
    for i, (turn, message) in enumerate(zip(turns, messages, strict=True)):
        parts = [cast("dict[str, Any]", part) for part in turn.parts]
        unseen = unseen or next((part[UNSEEN] for part in parts if part.get(UNSEEN)), False)
        if not turn.is_assistant:
            continue
        if unseen:
            skip[str(number)] = AFTER_IMAGE if unseen is True else unseen
        elif any(part.get("weight") == 0 for part in parts):
            skip[str(number)] = NOT_TRAINED
        elif marked := next((part[SKIP] for part in parts if SKIP in part), None):
            skip[str(number)] = marked
        else:
            later = zip(turns[i + 1 : len(messages)], messages[i + 1 :], strict=True)
            answers = itertools.takewhile(lambda other: not other[0].is_assistant, later)
            failed = rule == "tool_calls" and any(_failed(*answer) for answer in answers)
            reason = rule_reason(rule, message, [part[ACT] for part in parts if part.get(ACT)], failed)
            if reason is not None:
                skip[str(number)] = reason
        number += 1
    return skip


def _failed(turn: _Turn, message: Message) -> bool:
    """Whether an answer reports an error: as its format says, else (of a tool's result) as its text does."""
    marked = turn.parts[0].get(FAILED)
    if marked is not None:
        return bool(marked)
    return message.role == "tool" and reports_error(message.content.strip().removeprefix("OBSERVATION:").lstrip())


def reports_error(text: str) -> bool:
    """Whether the text of a tool's result tells that the call failed: it begins with an error, or is a JSON object that
    holds one."""
    try:
        told = parse_object(text) if text.startswith("{") else {}
    except InputError:
        told = {}
    if not told:
        return _ERROR.match(text) is not None
    errors = [told.get(key) for key in ("error", "errors", "isError", "is_error")]
    said = any(one and not isinstance(one, float) and str(one).lower() not in _NO_ERROR for one in errors)
    denied = told.get("success") is False or told.get("ok") is False or told.get("status") == "error"
    return said or denied or failed_exit(told) is True


def _trace(
    row: ChatRow, messages: Sequence[Message], skip: dict[str, str], cut: str | None, source: dict[str, Any] | None
) -> Trace:
    meta = dict(row.meta)
    if row.only_last_turn:
        kept = sum(message.role == "assistant" for message in messages)
        history = kept if cut else kept - 1  # a cut row has lost the turn that it demonstrates
        skip = {str(i): PIVOT_HISTORY for i in range(history)} | skip
    marked = meta.get("skip_turns") or {}
    if skip and isinstance(marked, dict):  # `skipped_turns` refuses anything but an object
        meta["skip_turns"] = skip | marked
    if cut:
        meta["cut"] = cut
    if source:
        meta["source"] = source
    content = [[message.to_chat() for message in messages], row.tools]
    opening = content[0][: _first_turn(messages)]
    known = {"success": row.success, "reward": meta.get("reward"), "split": row.split, "environment": row.environment}
    told = {key: value for key, value in known.items() if value is not None}
    name = row.id and (row.id if row.context == 1 else f"{row.id}#{row.context}")
    trace_id = name or fingerprint([*content, told] if told else content)
    meta["group"] = row.group or meta.get("group") or (fingerprint(opening) if opening else trace_id)
    return Trace(
        id=trace_id,
        messages=tuple(messages),
        tools=tuple(row.tools),
        domain=row.domain,
        split=cast(Any, row.split),
        success=row.success,
        environment=row.environment,
        meta=meta,
    )


def declared_tools(value: Any) -> list[dict[str, Any]]:
    """A user's declarations of tools, a list or the object that holds it as `tools`, in chat form. Raises
    `InputError`."""
    value = value.get("tools", value) if isinstance(value, dict) else value
    if not isinstance(value, list):
        raise InputError("is not a list of tool declarations", field="tools", hint="write [{type: function, ...}]")
    tools = chat_tools(cast("list[Any]", value), Counter())
    check_tools(tools)
    check_schemas(tools)
    return tools


def tools_of(file: str) -> list[dict[str, Any]]:
    """The declarations of a JSON file; none without a file."""
    with placed(path=file):
        return declared_tools(parse_json(read_text(file), file)) if file else []


def _first_turn(messages: Sequence[Message]) -> int:
    """Where the first turn stands that is no greeting: text before the user said anything is the same in every talk."""
    asked = next((i for i, message in enumerate(messages) if message.role == "user"), -1)
    spoken = [i for i, message in enumerate(messages) if message.role == "assistant"]
    return next((i for i in spoken if i > asked or messages[i].tool_calls), spoken[0])


def _turns(raw: Sequence[Any]) -> list[_Turn]:
    turns: list[_Turn] = []
    for i, message in enumerate(raw):
        if turns and turns[-1].is_assistant and _is_assistant(message) and _continues(turns[-1].parts[-1], message):
            turns[-1] = _Turn(turns[-1].start, (*turns[-1].parts, message))
        else:
            turns.append(_Turn(i, (message,)))
    return turns


def _continues(before: Any, after: Any) -> bool:
    if isinstance(before, BrokenMessage) or isinstance(after, BrokenMessage):
        return False
    if before.get("name") != after.get("name"):  # two speakers
        return False
    pieces = before.get(RESPONSE) is not None and before.get(RESPONSE) == after.get(RESPONSE)
    return pieces or not before.get("tool_calls") or (bool(after.get("tool_calls")) and not after.get("content"))


def _is_assistant(message: Any) -> bool:
    """Whether a raw message is a turn of the agent, or would be if it could be read."""
    return message.turn if isinstance(message, BrokenMessage) else as_object(message).get("role") == "assistant"


def _parse(turn: _Turn, row: ChatRow) -> Message:
    parsed = [_parse_one(part, f"messages[{turn.start + i}]", row) for i, part in enumerate(turn.parts)]
    whole = replace(
        parsed[0],
        content="\n".join(message.content for message in parsed if message.content),
        tool_calls=tuple(call for message in parsed for call in message.tool_calls),
        reasoning="\n".join(message.reasoning for message in parsed if message.reasoning),
    )
    return _each_call_once(whole, row.ignored)


def _parse_one(raw: Any, inside: str, row: ChatRow) -> Message:
    try:
        if isinstance(raw, InputError):
            raise raw
        _check_arguments(raw)
        message = Message.from_chat(raw, row.ignored, strict=row.strict)
    except InputError as error:
        raise located(_advised(error, row), line=as_object(raw).get(LINE), inside=inside) from error
    count_unknown(raw, _READ, "messages[].", row.ignored)
    return message


def _advised(error: InputError, row: ChatRow) -> InputError:
    """What may be counted instead is said."""
    if row.strict and error.problem == "unknown key":
        hint = f"{error.hint}; or count it with unknown_keys='keep' (--unknown-keys keep)"
        return InputError(error.problem, field=error.field, hint=hint)
    return error


def _each_call_once(turn: Message, ignored: Counter[str]) -> Message:
    """A log may tell one call twice: with one id, or in the sampled text beside the calls that a server read in it."""
    if not turn.tool_calls:
        return turn
    calls = [call for i, call in enumerate(turn.tool_calls) if call.id is None or call not in turn.tool_calls[:i]]
    thought, ended, text = turn.content.rpartition("</think>")
    told = [block for block in CALL_IN_TEXT.finditer(text) if _is_among(block[1], calls)]
    if len(calls) == len(turn.tool_calls) and not told:
        return turn
    ignored["calls that are told twice"] += len(turn.tool_calls) - len(calls) + len(told)
    for block in told:
        text = text.replace(block[0], "", 1)
    return replace(turn, tool_calls=tuple(calls), content=f"{thought}{ended}{text}".rstrip() if told else turn.content)


def _is_among(text: str, calls: Sequence[ToolCall]) -> bool:
    try:
        told = Message.from_chat({"role": "assistant", "tool_calls": [parse_json(text)]}).tool_calls[0]
    except InputError:
        return False
    return any((told.name, told.arguments) == (call.name, call.arguments) for call in calls)


def _check_arguments(raw: Any) -> None:
    """Arguments written as text must be strict JSON: `Message.from_chat` would let half characters pass."""
    calls = as_object(raw).get("tool_calls")
    for call in cast("list[Any]", calls) if isinstance(calls, list) else []:
        function = as_object(as_object(call).get("function", call))
        if not isinstance(function.get("arguments"), str):
            continue
        try:
            parse_json(function["arguments"] or "{}")
        except InputError as error:
            problem = f"the arguments of {function.get('name')!r}: text that {error.problem}"
            raise InputError(problem, field="tool_calls.arguments", hint="write a JSON object") from error


def _lost(turns: Sequence[_Turn], cut: str) -> Counter[str]:
    """The assistant turns from the malformed one on; the malformed one has a reason of its own."""
    first, *rest = turns
    return +Counter({cut: int(first.is_assistant), AFTER_MALFORMED: sum(turn.is_assistant for turn in rest)})
