"""The trace record, `turntree.trace/1`: one demonstrated episode and what is known about it (docs/traces.md).

On disk: JSON lines. The first line is a header, `{"schema": "turntree.traces/1", ...}`; every further line is one
trace. Reading is strict: an unknown key is an error with its file, line and field, and is never skipped.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

from turntree.core.errors import InputError
from turntree.core.messages import Message, as_object
from turntree.run.jsonl import parse_json, placed, read_lines, write_lines

FILE_SCHEMA = "turntree.traces/1"
TRACE_SCHEMA = "turntree.trace/1"

Split = Literal["train", "dev", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)

MESSAGE_KEYS = frozenset({"role", "content", "tool_calls", "tool_call_id", "name", "cut", "reasoning_content"})


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One episode as it was demonstrated, or as a policy played it and a teacher labelled it. Raises `InputError`
    (naming the field) unless it holds an assistant turn.

    `tools` are declarations in the OpenAI chat form, `{"type": "function", "function": {"name", "parameters"}}`;
    empty means that the source did not record them. `environment` says how to rebuild the environment and is opaque
    here. `meta` holds JSON values; some keys have a meaning (docs/traces.md): "group" (traces of one group share a
    split), "skip_turns" (assistant turn index as text -> why it must not become a candidate), "reward".

    `labels` (assistant turn index -> message) is what a teacher would say there. A label is the demonstration of its
    turn in place of what was played; the history keeps what was played. An empty `labels` is an episode of the
    demonstrator's own; otherwise a turn without a label is not a candidate.
    """

    id: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    domain: str = ""
    split: Split | None = None
    success: bool | None = None
    environment: dict[str, Any] | None = None
    meta: dict[str, Any] = field(default_factory=dict[str, Any])
    labels: dict[int, Message] = field(default_factory=dict[int, Message])

    def __post_init__(self) -> None:
        if not self.id:
            raise InputError("is empty", field="id", hint="give every trace its own id")
        if not any(message.role == "assistant" for message in self.messages):
            raise InputError("hold no assistant turn", field="messages", hint="a trace demonstrates at least one turn")
        if self.split is not None and self.split not in SPLITS:
            raise InputError(f"is {self.split!r}", field="split", hint=f"use one of {', '.join(SPLITS)}, or null")
        tool_names(self.tools)
        for turn, label in self.labels.items():
            if label.role != "assistant" or not 0 <= turn < len(self.turn_positions):
                problem = f"is a message of {label.role!r}, and the trace has {len(self.turn_positions)} turns"
                raise InputError(problem, field=f"labels.{turn}", hint="label assistant turns with assistant messages")

    @property
    def turn_positions(self) -> tuple[int, ...]:
        """Where in `messages` the assistant turns 0, 1, 2, ... stand."""
        return tuple(i for i, message in enumerate(self.messages) if message.role == "assistant")

    @property
    def group(self) -> str:
        """Traces with the same group belong to the same split; a trace without one is a group of its own."""
        group = self.meta.get("group")
        return self.id if group is None else str(group)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": TRACE_SCHEMA,
            "id": self.id,
            "domain": self.domain,
            "split": self.split,
            "success": self.success,
            "messages": [message.to_chat() for message in self.messages],
            "tools": list(self.tools),
            "environment": self.environment,
            "meta": self.meta,
            **({"labels": {str(turn): label.to_chat() for turn, label in self.labels.items()}} if self.labels else {}),
        }

    @classmethod
    def from_json(cls, value: Any) -> Trace:
        """Inverse of `to_json`. Raises `InputError` naming the field."""
        row = _object(value, None)
        _check_schema(row.get("schema"), TRACE_SCHEMA)
        check_keys(row, _TRACE_KEYS)
        tools = _typed(row, "tools", list, [])
        check_tools(tools)
        for key in ("id", "messages"):
            if key not in row:
                raise InputError("is missing", field=key, hint="every trace has an id and messages")
        return cls(
            id=_typed(row, "id", str, ""),
            messages=tuple(_message(m, f"messages[{i}]") for i, m in enumerate(_typed(row, "messages", list, []))),
            tools=tuple(tools),
            domain=_typed(row, "domain", str, ""),
            split=cast("Split | None", _typed(row, "split", str, None)),
            success=_typed(row, "success", bool, None),
            environment=_typed(row, "environment", dict, None),
            meta=_typed(row, "meta", dict, {}),
            labels=dict(_label(*pair) for pair in _typed(row, "labels", dict, {}).items()),
        )


_TRACE_KEYS = frozenset(
    {"schema", "id", "domain", "split", "success", "messages", "tools", "environment", "meta", "labels"}
)
_NULLABLE = frozenset({"split", "success", "environment"})


def read_traces(path: str | Path, split: str = "") -> Iterator[Trace]:
    """The traces of a file that are in `split` ("": all), one at a time. Raises `InputError` with file, line and field,
    also for a trace of another split."""
    ids: dict[str, int] = {}
    header: dict[str, Any] | None = None
    for number, text in read_lines(path):
        value = parse_json(text, path, number)
        with placed(path=path, line=number):
            if header is None:
                header = _object(value, None)
                _check_schema(header.get("schema"), FILE_SCHEMA)
                continue
            trace = Trace.from_json(value)
        _check_unique(trace.id, ids, number, path)
        if split in ("", trace.split):
            yield trace
    if header is None:
        raise InputError("is empty", path=path, hint=f"the first line is {{'schema': '{FILE_SCHEMA}'}}")
    counted = header.get("traces")
    if type(counted) is int and counted != len(ids):
        problem = f"holds {len(ids)} traces, and its header counts {counted}"
        raise InputError(problem, path=path, hint="make it again, or correct the number in its first line")


def write_traces(path: str | Path, traces: Iterable[Trace], header_extra: Mapping[str, Any] | None = None) -> int:
    """Write a trace file atomically and return the number of traces. Equal traces give equal bytes. Where their number
    is known beforehand the header counts them.

    Raises `InputError` for two traces with one id and for values that are not JSON.
    """
    counted = {"traces": len(traces)} if isinstance(traces, Sized) else {}
    return write_rows(path, (trace.to_json() for trace in traces), {**(header_extra or {}), **counted})


def write_rows(path: str | Path, rows: Iterable[dict[str, Any]], header: Mapping[str, Any]) -> int:
    """`write_traces` of traces as JSON values."""

    def unique() -> Iterator[dict[str, Any]]:
        ids: dict[str, int] = {}
        yield {"schema": FILE_SCHEMA} | dict(header) | {"schema": FILE_SCHEMA}
        for number, row in enumerate(rows, start=2):
            _check_unique(row["id"], ids, number, path)
            yield row

    return write_lines(path, unique()) - 1


def tool_names(tools: Iterable[dict[str, Any]]) -> frozenset[str]:
    """The declared names. Raises `InputError` for a declaration without a name or a name declared twice."""
    names: set[str] = set()
    for i, tool in enumerate(tools):
        name = as_object(tool.get("function")).get("name")
        if not isinstance(name, str):
            raise InputError(
                "has no function name", field=f"tools[{i}]", hint="declare {type: 'function', function: {name, ...}}"
            )
        if name in names:
            raise InputError(f"declares {name!r} a second time", field=f"tools[{i}]", hint="declare each tool once")
        names.add(name)
    return frozenset(names)


def check_tools(tools: Sequence[Any], ignored: Counter[str] | None = None, *, strict: bool = False) -> None:
    """Raise `InputError` for a declaration that is none. An unknown key stays where it is and is counted; in a `strict`
    row, or where a declaration without parameters may hold them, it is refused."""
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict):
            hint = "declare {type: 'function', function: {name, ...}}"
            raise InputError(f"is {type(tool).__name__}, not an object", field=f"tools[{i}]", hint=hint)
    tool_names(tools)
    for i, tool in enumerate(cast("Sequence[dict[str, Any]]", tools)):
        function, inside = tool["function"], f"tools[{i}]"
        lacks = function.get("parameters") is None
        for row, known in ((tool, ("type", "function")), (function, _DECLARED)):
            for key, value in row.items():
                if key in known or value is None:
                    continue
                if strict or (lacks and isinstance(value, dict | list)):
                    hint = "a declaration is {name, description, parameters: a JSON schema}"
                    problem = f"unknown key{', and no parameters' if lacks else ''}"
                    raise InputError(problem, field=f"{inside}.{key}", hint=hint)
                if ignored is not None:
                    ignored[f"unknown key tools[].{key}"] += 1


def check_schemas(tools: Sequence[dict[str, Any]]) -> None:
    """Raise `InputError` for parameters of a source that are no JSON schema. (Those of an environment, which our own
    files hold, may be anything: a verifier says what it cannot use.)"""
    for i, tool in enumerate(tools):
        parameters = tool["function"].get("parameters")
        problem = None if parameters is None else _schema_problem(parameters)
        if problem is not None:
            hint = "write a JSON schema: {type: object, properties: {name: {type: string, ...}}}"
            raise InputError(problem, field=f"tools[{i}].function.parameters", hint=hint)


_DECLARED = ("name", "description", "parameters", "strict")
_TYPES = ("string", "number", "integer", "boolean", "array", "object", "null")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_TABLES = ("properties", "patternProperties", "$defs", "definitions")


def _schema_problem(schema: Any) -> str | None:
    """Why these parameters are no JSON schema, as far as other ways of writing them are confused with one. (Whether it
    is a valid one its verifier says. Data sets fill what is absent with null.)"""
    if not isinstance(schema, dict):
        return f"is {type(schema).__name__}, not a JSON schema"
    top = cast("dict[str, Any]", schema)
    known = (*_TABLES, "additionalProperties")
    if top and all(isinstance(value, dict) and key not in known for key, value in top.items()):
        return f"names arguments ({', '.join(list(top)[:3])}) where a JSON schema has type and properties"
    left: list[tuple[str, Any]] = [("the parameters", top)]
    while left:
        name, one = left.pop()
        if not isinstance(one, dict):
            if isinstance(one, bool | None):
                continue
            return f"describes {name} by {one!r}, not by a JSON schema"
        part = cast("dict[str, Any]", one)
        kinds: Any = part.get("type")
        for kind in cast("list[Any]", kinds) if isinstance(kinds, list) else [kinds]:
            if kind is not None and kind not in _TYPES:
                return f"has the type {kind!r} for {name}, which JSON schema does not know"
        left += [(name, sub) for key in _LISTS if isinstance(part.get(key), list) for sub in part[key]]
        left += [(repr(sub), part[key][sub]) for key in _TABLES if isinstance(part.get(key), dict) for sub in part[key]]
        left += [(name, part[key]) for key in ("items", "additionalProperties") if isinstance(part.get(key), dict)]
    return None


def check_keys(row: Mapping[str, Any], known: frozenset[str], hint: str | None = None) -> None:
    """Raise `InputError` for the first unknown key, naming the nearest known one that the row does not have."""
    for key in row:
        if key not in known:
            near = difflib.get_close_matches(key, known - row.keys(), n=1, cutoff=0.75)
            advice = [f"did you mean {near[0]!r}?"] if near else []
            advice += [hint] if hint else [] if near else [f"known keys: {', '.join(sorted(known))}"]
            raise InputError("unknown key", field=key, hint=" Or ".join(advice))


def _check_schema(found: Any, expected: str) -> None:
    if found == expected:
        return
    if found is None:
        hint = "make it with `turntree traces import`"
        raise InputError(f"is missing (this version reads {expected})", field="schema", hint=hint)
    older = str(found).partition("/")[0] == expected.partition("/")[0]
    hint = f"this version reads {expected}: {'import the source again' if older else 'name the right file'}"
    raise InputError(f"is {found!r}", field="schema", hint=hint)


def _check_unique(trace_id: str, ids: dict[str, int], line: int, path: str | Path) -> None:
    if trace_id in ids:
        problem = f"{trace_id!r} is already the trace of line {ids[trace_id]}"
        raise InputError(problem, path=path, line=line, field="id", hint="give every trace its own id")
    ids[trace_id] = line


def _label(turn: str, value: Any) -> tuple[int, Message]:
    if not turn.isdecimal() or len(turn) > 9:
        raise InputError("is not the index of a turn", field=f"labels.{turn}", hint="count assistant turns from 0")
    return int(turn), _message(value, f"labels.{turn}")


def _message(value: Any, inside: str) -> Message:
    row = _object(value, inside)
    with placed(inside=inside):
        check_keys(row, MESSAGE_KEYS)
        _typed(row, "cut", bool, False)
        return Message.from_chat(row)


def _typed(row: dict[str, Any], key: str, kind: type, default: Any) -> Any:
    value = row.get(key, default)
    if isinstance(value, kind) or (value is None and key in _NULLABLE):
        return value
    names = {str: "text", list: "a list", dict: "an object", bool: "true or false"}
    raise InputError(f"is {type(value).__name__}", field=key, hint=f"it must be {names[kind]}")


def _object(value: Any, field_name: str | None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"is {type(value).__name__}, not an object", field=field_name)
    return cast("dict[str, Any]", value)
