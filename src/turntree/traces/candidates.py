"""Pivot candidates: every assistant turn of a trace with the history before it (PivotRL, Eq. 3).

A turn that cannot be trained on, or whose state the policy would never meet, is not a candidate; it stays in the
history of later turns and is counted under one reason. Law: candidates plus skipped turns are all assistant turns.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, cast

from turntree.core.errors import InputError
from turntree.core.messages import Message
from turntree.core.protocols import TurnState
from turntree.traces.schema import Trace, tool_names

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")  # web_search, WebSearch and webSearch are the same two words
_BASH = frozenset({"bash", "shell", "sh", "terminal", "exec", "run", "execute", "command", "keystrokes"})
_SEARCH = frozenset(
    {"search", "browse", "browser", "open", "visit", "fetch", "lookup", "find", "scroll", "goto", "web"}
)


class SkipReason(StrEnum):
    """Why an assistant turn is not a candidate; the first reason that holds, in this order."""

    EMPTY_TURN = "empty_turn"  # no text and no calls
    UNNAMED_CALL = "unnamed_call"  # a call whose tool has an empty name
    UNDECLARED_TOOL = "undeclared_tool"  # the trace declares tools, but not the one called here
    NO_PROMPT = "no_prompt"  # neither a system nor a user message comes before: the task was not recorded
    CANNED_OPENING = "canned_opening"  # text before the first user message, as harnesses put it in
    AFTER_ASSISTANT = "after_assistant"  # follows another assistant turn directly
    UNANSWERED_CALL = "unanswered_call"  # a call has no result, although the episode continued
    RESULT_WITHOUT_CALL = "result_without_call"  # a tool result follows that answers none of the calls
    UNLABELLED = "unlabelled"  # the trace has labels, and none here


def candidates(trace: Trace) -> list[TurnState]:
    """The candidate turns of `trace`, in order. Raises `InputError` for a malformed `meta["skip_turns"]`."""
    skipped = skipped_turns(trace)
    return [state for state in states_of(trace) if state.turn not in skipped]


def states_of(trace: Trace) -> list[TurnState]:
    """The states of all turns, in order, also of turns that nothing can be learned from."""
    return [
        TurnState(
            trace_id=trace.id,
            turn=turn,
            history=trace.messages[:position],
            demonstration=trace.labels.get(turn, trace.messages[position]),
            tools=trace.tools,
            environment=trace.environment,
        )
        for turn, position in enumerate(trace.turn_positions)
    ]


def skipped_turns(trace: Trace) -> dict[int, str]:
    """Assistant turn index -> why it is not a candidate: a mark in `meta["skip_turns"]`, else a `SkipReason`. At a
    labelled turn the label is looked at, and not what was played."""
    marked = _marked(trace)
    names = tool_names(trace.tools)
    skipped: dict[int, str] = {}
    for turn, position in enumerate(trace.turn_positions):
        if turn in trace.labels:
            reason = marked.get(turn) or _reason((*trace.messages[:position], trace.labels[turn]), position, names)
        elif trace.labels:
            reason = marked.get(turn, SkipReason.UNLABELLED)
        else:
            reason = marked.get(turn) or _reason(trace.messages, position, names)
        if reason is not None:
            skipped[turn] = str(reason)
    return skipped


def rule_reason(rule: str, turn: Message, acts: Sequence[str], failed: bool) -> str | None:
    """Why the paper's rule for the domain (appendix A.2) excludes `turn` from the candidates; None where it does not.

    `acts` are the kinds of action that its text holds ("tool", "bash", "search"), besides those of its calls, which
    their names tell; `failed` says that the answer to it reported an error.
    """
    kinds = {*acts, *(kind for call in turn.tool_calls for kind in _kinds(call.name))}
    if rule == "tool_calls":
        return "not_a_tool_call" if not kinds else "error_tool_call" if failed else None
    if rule == "bash":
        return None if "bash" in kinds else "not_a_bash_action"
    if rule == "search":
        return None if "search" in kinds else "not_a_search_step"
    return None


def _kinds(name: str) -> set[str]:
    words = set(_WORD.findall(name))
    lower = {word.lower() for word in words}
    return {"tool"} | ({"bash"} if lower & _BASH else set()) | ({"search"} if lower & _SEARCH else set())


def _reason(messages: Sequence[Message], position: int, names: frozenset[str]) -> SkipReason | None:
    turn, before, after = messages[position], messages[:position], messages[position + 1 :]
    if not turn.tool_calls and not turn.content.strip():
        return SkipReason.EMPTY_TURN
    if any(not call.name.strip() for call in turn.tool_calls):
        return SkipReason.UNNAMED_CALL
    if names and any(call.name not in names for call in turn.tool_calls):
        return SkipReason.UNDECLARED_TOOL
    asked = any(message.role == "user" for message in before)
    if not asked and not any(message.role == "system" for message in before):
        return SkipReason.NO_PROMPT
    if not asked and not turn.tool_calls and any(message.role == "user" for message in after):
        return SkipReason.CANNED_OPENING
    if before[-1].role == "assistant":
        return SkipReason.AFTER_ASSISTANT
    return _result_problem(turn, after)


def _result_problem(turn: Message, after: Sequence[Message]) -> SkipReason | None:
    """Compare the calls with the results right after them: by id where both have ids, else by number."""
    results: list[Message] = []
    for message in after:
        if message.role != "tool":
            break
        results.append(message)
    went_on = len(results) < len(after)
    calls = Counter(call.id for call in turn.tool_calls)
    answered = Counter(result.tool_call_id for result in results)
    if None in calls or None in answered:
        unanswered, surplus = calls.total() - answered.total(), answered.total() - calls.total()
    else:
        unanswered, surplus = (calls - answered).total(), (answered - calls).total()
    if unanswered > 0 and went_on:
        return SkipReason.UNANSWERED_CALL
    return SkipReason.RESULT_WITHOUT_CALL if surplus > 0 else None


def _marked(trace: Trace) -> dict[int, str]:
    raw: Any = trace.meta.get("skip_turns") or {}
    turns = len(trace.turn_positions)
    hint = f"write {{turn index as text: reason}}, with indices from 0 to {turns - 1}"
    if not isinstance(raw, Mapping):
        raise InputError(f"of trace {trace.id!r} is not an object", field="meta.skip_turns", hint=hint)
    marked: dict[int, str] = {}
    for key, reason in cast("Mapping[Any, Any]", raw).items():
        known = isinstance(key, str) and key.isdecimal() and len(key) < 10 and int(key) < turns
        if not known or not isinstance(reason, str) or not reason:
            raise InputError(f"of trace {trace.id!r} holds {key!r}: {reason!r}", field="meta.skip_turns", hint=hint)
        marked[int(key)] = reason
    return marked
