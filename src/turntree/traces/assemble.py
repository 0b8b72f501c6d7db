"""From a chat-shaped row to a trace: assistant turns are put together, and what is lost is counted.

Consecutive assistant messages are one turn when the first makes no call, or the next makes calls and says nothing
(data sets write text and calls, or parallel calls, as messages of their own). Their texts are joined by a newline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from turntree.core.errors import InputError
from turntree.core.messages import Message
from turntree.observe.jsonl import located, parse_json
from turntree.traces.candidates import skipped_turns
from turntree.traces.formats.row import ChatRow, RowRefused, fingerprint
from turntree.traces.schema import Trace, check_message, tool_names

NOT_TRAINED = "marked_not_trained"
PIVOT_HISTORY = "history_of_a_pivot_row"
AFTER_MALFORMED = "after_malformed_message"


@dataclass(frozen=True)
class Assembled:
    """`turns` = candidates of the trace + its skipped turns + `lost` ones (where a malformed message cut it off)."""

    trace: Trace | None
    turns: int
    merged_messages: int
    lost: Counter[str] = field(default_factory=Counter[str])


@dataclass(frozen=True)
class _Turn:
    """One message of the trace to be: a raw message, or the raw assistant messages that make one turn."""

    start: int  # index of the first in the row
    parts: tuple[Any, ...]

    @property
    def is_assistant(self) -> bool:
        return _is_assistant(self.parts[0])


def assemble(row: ChatRow, *, keep_going: bool, domain: str = "", source: dict[str, Any] | None = None) -> Assembled:
    """Build the trace of a row.

    A malformed message raises `InputError` with its field; with `keep_going` the trace ends before it instead, and
    the turns from there on are lost and counted. No assistant turn at all raises `RowRefused`.
    """
    turns = _turns(row.messages)
    assistants = sum(turn.is_assistant for turn in turns)
    if not assistants:
        hint = "a trace demonstrates at least one turn"
        raise RowRefused("no_assistant_turn", "hold no assistant turn", field="messages", hint=hint)
    tool_names(_objects(row.tools))
    messages: list[Message] = []
    lost: Counter[str] = Counter()
    skip: dict[str, str] = {}
    for i, turn in enumerate(turns):
        try:
            messages.append(_parse(turn))
        except InputError as error:
            if not keep_going:
                raise
            lost = _lost(turns[i:], error)
            break
        if any(isinstance(part, dict) and part.get("weight") == 0 for part in turn.parts):
            skip[str(sum(message.role == "assistant" for message in messages) - 1)] = NOT_TRAINED
    trace = _trace(row, messages, skip, lost, domain, source) if assistants > lost.total() else None
    merged = sum(len(turn.parts) - 1 for turn in turns)
    return Assembled(trace=trace, turns=assistants, merged_messages=merged, lost=lost)


def _trace(
    row: ChatRow,
    messages: Sequence[Message],
    skip: dict[str, str],
    lost: Counter[str],
    domain: str,
    source: dict[str, Any] | None,
) -> Trace:
    meta = dict(row.meta)
    if row.only_last_turn:
        kept = sum(message.role == "assistant" for message in messages)
        history = kept if lost else kept - 1  # a cut row has lost the turn that it demonstrates
        skip = {str(i): PIVOT_HISTORY for i in range(history)} | skip
    if skip:
        meta["skip_turns"] = skip | dict(meta.get("skip_turns") or {})
    if lost:
        meta["cut"] = next(iter(lost))
    if source:
        meta["source"] = source
    content = [[message.to_chat() for message in messages], row.tools]
    opening = content[0][: next(i for i, message in enumerate(messages) if message.role == "assistant")]
    trace_id = row.id or fingerprint(content)
    meta["group"] = row.group or meta.get("group") or (fingerprint(opening) if opening else trace_id)
    trace = Trace(
        id=trace_id,
        messages=tuple(messages),
        tools=tuple(row.tools),
        domain=row.domain or domain,
        split=cast(Any, row.split),
        success=row.success,
        environment=row.environment,
        meta=meta,
    )
    skipped_turns(trace)  # raises here, with its line, for marks that name no turn
    return trace


def _turns(raw: Sequence[Any]) -> list[_Turn]:
    turns: list[_Turn] = []
    for i, message in enumerate(raw):
        if turns and turns[-1].is_assistant and _is_assistant(message) and _continues(turns[-1].parts[-1], message):
            turns[-1] = _Turn(turns[-1].start, (*turns[-1].parts, message))
        else:
            turns.append(_Turn(i, (message,)))
    return turns


def _continues(before: dict[str, Any], after: dict[str, Any]) -> bool:
    return not before.get("tool_calls") or (bool(after.get("tool_calls")) and not after.get("content"))


def _is_assistant(message: Any) -> bool:
    return isinstance(message, dict) and cast("dict[str, Any]", message).get("role") == "assistant"


def _parse(turn: _Turn) -> Message:
    parsed = [_parse_one(part, f"messages[{turn.start + i}]") for i, part in enumerate(turn.parts)]
    if len(parsed) == 1:
        return parsed[0]
    return Message(
        role="assistant",
        content="\n".join(message.content for message in parsed if message.content),
        tool_calls=tuple(call for message in parsed for call in message.tool_calls),
        reasoning="\n".join(message.reasoning for message in parsed if message.reasoning),
    )


def _parse_one(raw: Any, inside: str) -> Message:
    try:
        if isinstance(raw, dict) and raw.get("role") == "developer":
            raw = {**raw, "role": "system"}
        _check_arguments(raw)
        message = Message.from_chat(raw)
    except InputError as error:
        raise located(error, inside=inside) from error
    check_message(message, inside)
    return message


def _check_arguments(raw: Any) -> None:
    """Arguments written as text must be strict JSON: `Message.from_chat` would let NaN pass."""
    calls = raw.get("tool_calls") if isinstance(raw, dict) else None
    for call in cast("list[Any]", calls) if isinstance(calls, list) else []:
        function: Any = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
            continue
        try:
            parse_json(function["arguments"] or "{}")
        except InputError as error:
            problem = f"the arguments of {function.get('name')!r}: text that {error.problem}"
            raise InputError(problem, field="tool_calls.arguments", hint="write a JSON object") from error


def _lost(turns: Sequence[_Turn], error: InputError) -> Counter[str]:
    """The assistant turns from the malformed one on; the malformed one has a reason of its own."""
    arguments = str(error.field).endswith("tool_calls.arguments")
    lost: Counter[str] = Counter()
    first, *rest = turns
    if first.is_assistant:
        lost["arguments_not_json" if arguments else "malformed_message"] += 1
    later = sum(turn.is_assistant for turn in rest)
    if later:
        lost[AFTER_MALFORMED] += later
    return lost


def _objects(tools: Sequence[Any]) -> list[dict[str, Any]]:
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise InputError(f"is {type(tool).__name__}, not an object", field=f"tools[{i}]")
    return list(tools)
