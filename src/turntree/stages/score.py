"""`turntree verifier score` and `turntree verifier audit`: a verifier on pairs from a file, and on traces."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from turntree.core import parts
from turntree.core.config import Count, Part
from turntree.core.errors import ConfigError, InputError
from turntree.core.messages import Message, ToolCall, action_kind, as_object
from turntree.core.progress import progress
from turntree.core.protocols import TurnState, TurnVerifier
from turntree.core.verdict import Verdict
from turntree.rollout.local import judge_turns
from turntree.run.jsonl import parse_json, placed, read_lines
from turntree.stages.candidates import stream_candidates, survey
from turntree.stages.verifier import open_verifier
from turntree.traces.assemble import declared_tools, tools_of
from turntree.traces.formats.chat import MESSAGE_KEYS_IGNORED, MESSAGE_KEYS_READ
from turntree.traces.formats.responses import EVERY_ITEM
from turntree.traces.schema import FILE_SCHEMA, MESSAGE_KEYS, Split, check_keys
from turntree.verify.audit import audit_verifier
from turntree.verify.judge import agreement

_HINT = "write a chat message, Responses items, or {messages: [..., the action], tools?}; one a line"
MALFORMED = "(arguments that are not JSON)"
"""The key under which a call keeps arguments that could not be read; no tool declares it."""
_KEYS = (MESSAGE_KEYS | MESSAGE_KEYS_READ | MESSAGE_KEYS_IGNORED | {"type"}) - {"function_call", "finish_reason"}


@dataclass(frozen=True, kw_only=True)
class ScoreConfig:
    """`turntree verifier score`."""

    verifier: Part
    """recommended, paper, nemo, judge, tool_call, strict, executed, or module:function of your own."""
    gold: str = ""
    """The demonstrated actions, one JSON a line: chat messages or Responses items, with `tools` where they matter. Left
    out for a verifier of whole episodes (rubric)."""
    candidate: str
    """The actions to judge, in the same order; without --gold whole episodes: traces, or rows of {messages, tools?}."""
    tools: str = ""
    """Declared tools for all lines: a JSON list."""
    labels: str = ""
    """Labels, one per line: 1, 0 or null. Adds the verifier's agreement with them."""
    environment: Part | None = field(default=None, metadata=parts.AS_GIVEN)
    """For a verifier that plays actions (executed)."""


@dataclass(frozen=True, kw_only=True)
class AuditConfig:
    """`turntree verifier audit`."""

    traces: str
    """The traces whose demonstrations are judged."""
    verifier: Part
    """recommended, paper, nemo, judge, tool_call, strict, executed, or module:function of your own."""
    split: Literal[Split, ""] = ""
    """Only the traces of this split."""
    limit: Count = 0
    """Judge this many turns, drawn at random, always the same ones (0: all)."""
    environment: Part | None = field(default=None, metadata=parts.AS_GIVEN)
    """For a verifier that plays actions (executed)."""


class Line(NamedTuple):
    """An action of a file, with what its line says of the state."""

    action: Message
    history: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()


def score(config: ScoreConfig) -> dict[str, Any]:
    """The verdicts in order. Raises `InputError` for a line that is not an action, and for files of different
    lengths."""
    if not config.gold:
        return _scored(*_episodes(config), config)
    gold, tried = (list(read_actions(Path(path))) for path in (config.gold, config.candidate))
    if len(gold) != len(tried):
        problem = f"has {len(tried)} actions, and {config.gold} {len(gold)}"
        raise InputError(problem, path=config.candidate, hint="one candidate for every demonstrated action")
    for_all = tuple(tools_of(config.tools))
    pairs: list[tuple[TurnState, Message]] = []
    for n, (one, other) in enumerate(zip(gold, tried, strict=True), 1):
        tools, history = one.tools or other.tools or for_all, one.history or other.history
        pairs.append((TurnState(f"line {n}", 0, history, one.action, tools), other.action))
    verdicts = [_unreadable(*pair) for pair in pairs]
    readable = [pair for pair, verdict in zip(pairs, verdicts, strict=True) if verdict is None]
    with open_verifier(config.verifier, config.environment) as verifier:
        judged = iter(judge_turns(verifier, readable, cut_turns="judge", quiet=False))
        return _scored(verifier.name, [verdict or next(judged) for verdict in verdicts], config)


def _scored(name: str, verdicts: Sequence[Verdict], config: ScoreConfig) -> dict[str, Any]:
    rewards = [verdict.reward for verdict in verdicts]
    result: dict[str, Any] = {
        "verifier": name,
        "verdicts": [
            {"reward": one.reward, "reason": one.reason, "kind": one.kind} | ({"parts": one.parts} if one.parts else {})
            for one in verdicts
        ],
        "judged": sum(reward is not None for reward in rewards),
        "accepted": sum(reward == 1 for reward in rewards),
    }
    if config.labels:
        result["agreement"] = agreement(rewards, _labels(Path(config.labels), len(rewards)))
    return result


def _episodes(config: ScoreConfig) -> tuple[str, list[Verdict]]:
    """The name of a verifier that needs no demonstration (its method `grade`), and its verdicts on whole episodes."""
    verifier = parts.build("verifiers", config.verifier)
    if not isinstance(verifier, TurnVerifier) or not verifier.whole_episodes:
        hint = "name the demonstrated actions with --gold"
        raise ConfigError(f"{config.verifier.name!r} compares with a demonstration", field="gold", hint=hint)
    with contextlib.closing(verifier):
        declared = tuple(tools_of(config.tools))
        told = [
            _episode(row, path, n, declared)
            for path, n, row in _rows(Path(config.candidate))
            if not (isinstance(row, dict) and row.get("schema") == FILE_SCHEMA)  # the first line of traces
        ]
        with ThreadPoolExecutor(verifier.concurrency, thread_name_prefix="turntree-verdicts") as pool:
            return verifier.name, [*progress(pool.map(lambda each: verifier.grade(*each), told), "verdicts", len(told))]


def _episode(
    row: Any, path: Path, line: int, declared: tuple[dict[str, Any], ...]
) -> tuple[tuple[Message, ...], tuple[dict[str, Any], ...]]:
    if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
        hint = "write {messages: [...], tools?}, as `turntree traces import` does; one a line"
        raise InputError("is no episode", path=path, line=line, field="messages", hint=hint)
    with placed(path=path, line=line):
        tools = tuple(declared_tools(row["tools"])) if row.get("tools") else declared
        messages = tuple(map(_message, cast("list[Any]", row["messages"])))
        if all(message.role != "assistant" for message in messages):
            raise InputError("has no turn of the assistant", field="messages", hint="leave the line out")
        return messages, tools


def run_audit(config: AuditConfig) -> dict[str, Any]:
    """The verifier's verdicts on the demonstrations and on broken copies of them."""
    chosen = survey(config.traces, config.split).draw(config.limit, seed=0)
    states = stream_candidates(config.traces, config.split, chosen)
    with open_verifier(config.verifier, config.environment) as verifier:
        audit = audit_verifier(verifier, progress(states, "demonstrations", total=len(chosen)))
    if not audit.states:
        raise InputError("hold no turn to judge", path=config.traces, hint="name another split, or other traces")
    return audit.to_json()


# reading actions


def read_actions(path: Path) -> Iterator[Line]:
    """The actions of a JSONL file. Raises `InputError` with the line that is not an action."""
    for _, number, row in _rows(path):
        with placed(path=path, line=number):
            yield _line(row)


def _rows(path: Path) -> Iterator[tuple[Path, int, Any]]:
    return ((path, number, parse_json(line, path, number)) for number, line in read_lines(path))


def _line(value: Any) -> Line:
    row = as_object(value)
    tools = tuple(declared_tools(row["tools"])) if row.get("tools") else ()
    messages: Any = row.get("messages")
    if isinstance(messages, list) and messages:
        *before, last = cast("list[Any]", messages)
        return Line(_action(last), tuple(map(_message, before)), tools)
    return Line(_action(row.get("message", value)), (), tools)


def _message(row: Any) -> Message:
    if isinstance(row, dict):
        check_keys(cast("dict[str, Any]", row), _KEYS)
    return Message.from_chat(row)


def _action(value: Any) -> Message:
    if isinstance(value, list):
        return _of_items(cast("list[Any]", value))
    row = as_object(value)
    if isinstance(row.get("output"), list):
        status = row.get("status", "completed")
        if status != "completed" or row.get("error"):  # a server's failure, or a turn that was cut, is no action
            hint = "leave the line out, and the one of the other file"
            raise InputError(f"is {status!r}, and no action was finished", field="status", hint=hint)
        return _of_items(row["output"])
    if row.get("type", "function") != "function":
        return _of_items([row])
    if not row.keys() & {"role", "content", "tool_calls"}:
        raise InputError("is no action", hint=_HINT)
    if row.get("role", "assistant") != "assistant":
        raise InputError(f"is {row['role']!r}", field="role", hint="an action is an assistant message")
    calls: Any = row.get("tool_calls") or []
    if not isinstance(calls, list) or "function_call" in row:
        raise InputError("is not a list of calls", field="tool_calls", hint="write {tool_calls: [{function: ...}]}")
    check_keys(row, _KEYS | {"tools"})
    text = Message.from_chat({"role": "assistant", "content": row.get("content")}).content
    return Message("assistant", text, tuple(map(_call, cast("list[Any]", calls))))


def _of_items(items: Sequence[Any]) -> Message:
    """Responses items of one turn: texts are joined, reasoning is left out."""
    texts: list[str] = []
    calls: list[ToolCall] = []
    if not items:
        raise InputError("is no action", hint=_HINT)
    for item in items:
        kind = item.get("type", "message" if "role" in item else None) if isinstance(item, dict) else None
        if kind == "function_call":
            calls.append(_call({key: item[key] for key in item if key not in (*EVERY_ITEM, "call_id")}))
        elif kind == "message" and item.get("role", "assistant") == "assistant":
            texts.append(Message.from_chat({"role": "assistant", "content": item.get("content")}).content)
        elif kind != "reasoning":
            raise InputError(f"holds an item of type {kind!r} that is no part of an action", hint=_HINT)
    return Message("assistant", "\n".join(texts), tuple(calls))


def _call(call: Any) -> ToolCall:
    """A call; arguments that are no JSON object are kept under a name that no tool declares, so that they match
    nothing."""
    try:
        return Message.from_chat({"role": "assistant", "tool_calls": [call]}).tool_calls[0]
    except InputError as error:
        if error.field != "tool_calls.arguments":
            raise
    function: dict[str, Any] = call.get("function") or call
    given = function["arguments"]
    return ToolCall(function["name"], {MALFORMED: given if isinstance(given, str) else json.dumps(given)})


def _unreadable(state: TurnState, action: Message) -> Verdict | None:
    """The verdict where the arguments of the demonstration could not be read: no call is known to be equal to it."""
    if not any(MALFORMED in call.arguments for call in state.demonstration.tool_calls):
        return None
    return Verdict(None, "unjudgeable demonstration: its arguments are not JSON", action_kind(action))


def _labels(path: Path, count: int) -> list[float | None]:
    rows: list[Any] = [parse_json(line, path, n) for n, line in read_lines(path) if line.strip()]
    labels = [row.get("label") if isinstance(row, dict) else row for row in rows]
    wrong = any(isinstance(row, dict) and "label" not in row for row in rows) or any(
        label is not None and not (isinstance(label, int | float) and 0 <= label <= 1) for label in labels
    )
    if wrong or len(labels) != count:
        raise InputError(f"are not {count} numbers from 0 to 1", path=path, hint="one a line: 1, 0 or null")
    return [None if label is None else float(label) for label in labels]
