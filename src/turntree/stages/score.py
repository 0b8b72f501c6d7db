"""`turntree verifier score` and `turntree verifier audit`: a verifier on pairs from a file, and on traces."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from turntree.core import parts
from turntree.core.config import Between, Part
from turntree.core.errors import ConfigError, InputError
from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import TurnState, TurnVerifier
from turntree.core.verdict import Verdict
from turntree.rollout.local import judge_turns
from turntree.run.files import read_json
from turntree.run.jsonl import parse_json, read_lines
from turntree.stages.candidates import stream_candidates, survey
from turntree.stages.verifier import open_verifier
from turntree.traces.formats.responses import EVERY_ITEM
from turntree.traces.formats.row import chat_tools
from turntree.traces.schema import Split, check_schemas, check_tools
from turntree.verify.audit import audit_verifier
from turntree.verify.judge import agreement
from turntree.verify.strict import MALFORMED

_HINT = "write a chat message, Responses items, or {messages: [..., the action], tools?}; one a line"


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
    limit: Annotated[int, Between(0)] = 0
    """Judge this many turns, drawn at random, always the same ones (0: all)."""
    environment: Part | None = field(default=None, metadata=parts.AS_GIVEN)
    """For a verifier that plays actions (executed)."""


@dataclass(frozen=True)
class Said:
    """An action of a file, with the state that its line gives."""

    action: Message
    history: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    malformed: bool = False


def score(config: ScoreConfig) -> dict[str, Any]:
    """The verdicts in order. Raises `InputError` for a line that is not an action, and for files of different
    lengths."""
    if not config.gold:
        return _scored(*_episodes(config), config)
    gold, tried = (list(read_actions(Path(path))) for path in (config.gold, config.candidate))
    if len(gold) != len(tried):
        problem = f"has {len(tried)} actions, and {config.gold} {len(gold)}"
        raise InputError(problem, path=config.candidate, hint="one candidate for every demonstrated action")
    declared = _tools(read_json(Path(config.tools)), config.tools) if config.tools else ()
    shared: dict[str, tuple[dict[str, Any], ...]] = {}
    states = [_state(n, one, other, declared, shared) for n, (one, other) in enumerate(zip(gold, tried, strict=True))]
    with open_verifier(config.verifier, config.environment) as verifier:
        verdicts = _judged(verifier, states, gold, tried)
        name = verifier.name
    return _scored(name, verdicts, config)


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
        declared = _tools(read_json(Path(config.tools)), config.tools) if config.tools else ()
        told = [_episode(row, path, n, declared) for path, n, row in _rows(Path(config.candidate))]
        with ThreadPoolExecutor(verifier.concurrency, thread_name_prefix="turntree-verdicts") as pool:
            return verifier.name, list(pool.map(lambda each: verifier.grade(*each), told))


def _episode(
    row: Any, path: Path, line: int, declared: tuple[dict[str, Any], ...]
) -> tuple[tuple[Message, ...], tuple[dict[str, Any], ...]]:
    if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
        hint = "write {messages: [...], tools?}, as `turntree traces import` does; one a line"
        raise InputError("is no episode", path=path, line=line, field="messages", hint=hint)
    try:
        tools = _tools(row["tools"], "tools") if row.get("tools") else declared
        return tuple(map(Message.from_chat, cast("list[Any]", row["messages"]))), tools
    except InputError as error:
        raise InputError(error.problem, path=path, line=line, field=error.field, hint=error.hint) from error


def _judged(verifier: TurnVerifier, states: list[TurnState], gold: list[Said], tried: list[Said]) -> list[Verdict]:
    whole = [place for place in range(len(states)) if not gold[place].malformed]
    verdicts = [Verdict(None, "unjudgeable demonstration: its arguments are not JSON")] * len(states)
    found = judge_turns(verifier, [(states[place], tried[place].action) for place in whole], cut_turns="judge")
    for place, verdict in zip(whole, found, strict=True):
        verdicts[place] = verdict
    return verdicts


def _state(
    place: int, gold: Said, tried: Said, declared: tuple[dict[str, Any], ...], shared: dict[str, Any]
) -> TurnState:
    tools = gold.tools or tried.tools or declared
    tools = shared.setdefault(json.dumps(tools, sort_keys=True), tools)  # read once where lines repeat them
    return TurnState(f"line {place + 1}", 0, gold.history or tried.history, gold.action, tools)


def run_audit(config: AuditConfig) -> dict[str, Any]:
    """The verifier's verdicts on the demonstrations and on broken copies of them."""
    chosen = survey(config.traces, config.split).draw(config.limit, seed=0)
    states = stream_candidates(config.traces, config.split, chosen)
    with open_verifier(config.verifier, config.environment) as verifier:
        audit = audit_verifier(verifier, states)
    if not audit.states:
        raise InputError("hold no turn to judge", path=config.traces, hint="name another split, or other traces")
    return audit.to_json()


# reading actions


def read_actions(path: Path) -> Iterator[Said]:
    """The actions of a JSONL file. Raises `InputError` with the line that is not an action."""
    for _, number, row in _rows(path):
        try:
            yield _said(row)
        except InputError as error:
            raise InputError(error.problem, path=path, line=number, field=error.field, hint=error.hint) from error


def _rows(path: Path) -> Iterator[tuple[Path, int, Any]]:
    return ((path, number, parse_json(line, path, number)) for number, line in read_lines(path))


def _said(value: Any) -> Said:
    if isinstance(value, str):
        return Said(Message("assistant", value))
    if isinstance(value, list):
        return _of_items(cast("list[Any]", value), ())
    if not isinstance(value, dict):
        raise InputError("is no action", hint=_HINT)
    row = cast("dict[str, Any]", value)
    tools = _tools(row["tools"], "tools") if row.get("tools") else ()
    request: Any = row.get("responses_create_params")
    if isinstance(request, dict) and request.get("tools"):
        tools = tools or _tools(request["tools"], "responses_create_params.tools")
    for key in ("message", "action", "expected_action", "response"):
        if isinstance(row.get(key), dict | list):
            inner = _said(row[key])
            return Said(inner.action, inner.history or _history(row), inner.tools or tools, inner.malformed)
    if isinstance(row.get("messages"), list) and row["messages"]:
        *before, last = row["messages"]
        inner = _said(last)
        return Said(inner.action, tuple(map(Message.from_chat, before)), tools, inner.malformed)
    if isinstance(row.get("output"), list):
        return _of_items(row["output"], tools)
    if "type" in row and row.get("type") != "function":
        calls: Any = row.get("calls")
        items = cast("list[Any]", calls) if row["type"] == "function_call_batch" and isinstance(calls, list) else [row]
        return _of_items(items, tools)
    if "role" in row or "content" in row or "tool_calls" in row or "function_call" in row:
        return _of_chat(row, tools)
    raise InputError("is no action", hint=_HINT)


def _history(row: dict[str, Any]) -> tuple[Message, ...]:
    found: Any = row.get("messages") or row.get("history") or []
    return tuple(map(Message.from_chat, found)) if isinstance(found, list) else ()


def _of_chat(row: dict[str, Any], tools: tuple[dict[str, Any], ...]) -> Said:
    if row.get("role", "assistant") != "assistant":
        raise InputError(f"is {row['role']!r}", field="role", hint="an action is an assistant message")
    calls: Any = row.get("tool_calls") or ([{"function": row["function_call"]}] if row.get("function_call") else [])
    if not isinstance(calls, list):
        raise InputError("is not a list", field="tool_calls", hint=_HINT)
    read = [_call(call) for call in cast("list[Any]", calls)]
    text = Message.from_chat({"role": "assistant", "content": row.get("content")}).content
    return Said(Message("assistant", text, tuple(read)), (), tools, any(MALFORMED in c.arguments for c in read))


def _of_items(items: Sequence[Any], tools: tuple[dict[str, Any], ...]) -> Said:
    """Responses items of one turn: texts are joined, reasoning is left out."""
    texts: list[str] = []
    calls: list[ToolCall] = []
    for item in items:
        kind = item.get("type", "message" if "role" in item else None) if isinstance(item, dict) else None
        if kind == "function_call":
            calls.append(_call({key: item[key] for key in item if key not in (*EVERY_ITEM, "call_id")}))
        elif kind == "message":
            texts.append(Message.from_chat({"role": "assistant", "content": item.get("content")}).content)
        elif kind == "output_text":
            texts.append(str(item.get("text", "")))
        elif kind != "reasoning":
            raise InputError(f"holds an item of type {kind!r}", hint=_HINT)
    malformed = any(MALFORMED in call.arguments for call in calls)
    return Said(Message("assistant", "\n".join(texts), tuple(calls)), (), tools, malformed)


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


def _tools(value: Any, where: str) -> tuple[dict[str, Any], ...]:
    """Declarations in the chat form; those of other APIs are flat."""
    if not isinstance(value, list):
        raise InputError("is not a list of tool declarations", field=where, hint="write [{type: function, ...}]")
    tools = chat_tools(cast("list[Any]", value), Counter())
    check_tools(tools)
    check_schemas(tools)
    return tuple(tools)


def _labels(path: Path, count: int) -> list[float | None]:
    found: list[Any] = [parse_json(line, path, n) for n, line in read_lines(path) if line.strip()]
    found = [value.get("label") if isinstance(value, dict) else value for value in found]
    right: Callable[[Any], bool] = lambda v: v is None or (isinstance(v, int | float) and 0 <= v <= 1)  # noqa: E731
    if len(found) != count or not all(map(right, found)):
        raise InputError(f"are not {count} numbers from 0 to 1", path=path, hint="one a line: 1, 0 or null")
    return [None if value is None else float(value) for value in found]
