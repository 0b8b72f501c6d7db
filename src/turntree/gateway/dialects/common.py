"""What the dialects share: fields are read strictly, and a request and its answer have one form inside the gateway.

What a request asks for is applied, refused or recorded, never ignored in silence (table: docs/design/gateway.md).
"""

from __future__ import annotations

import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, cast

from turntree.core.config import UNKNOWN, Between, converted
from turntree.core.errors import InputError
from turntree.core.messages import REASONING_KEYS, Message, as_object
from turntree.gateway.calls import Call, Tools
from turntree.gateway.config import Refused
from turntree.gateway.sampling import Ask, Form
from turntree.run.jsonl import DEEPEST, depth

_NO_HINT = "leave it out"
_MOST = 4096  # messages, items or tools in one request: each is work that keeps everybody waiting
_MOST_RECORDED = 10_000  # characters of one recorded value
_DEEPEST = DEEPEST - 10  # levels of one value: the file of a session holds it inside others
_MOST_STOPS = 16  # stop strings: each is looked for after every token
# of a message: they hold what the model said in another form, or ask to go on from it
UNREAD_SPEECH = ("function_call", "refusal", "audio", "prefix", "partial")
# tools that a server runs for the agent, by the beginning of their type
_HOSTED = ("web_search", "web_fetch", "file_search", "code_interpreter", "code_execution", "image_generation", "mcp",
           "tool_search")  # fmt: skip
APART = "__"  # between a namespace and the name of its tool
Before = Callable[[str], Call | None]
Body = Mapping[str, Any]

SAMPLED = {"temperature": Annotated[float, Between(0, 2)], "top_p": Annotated[float, Between(1e-9, 1)]}
RECORDED = frozenset({"temperature", "top_p", "model", "user", "metadata", "parallel_tool_calls"})
NOTHING = frozenset(
    {"store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "prompt_cache_options"}
)


@dataclass(frozen=True, kw_only=True)
class Fields:
    """What is done with the fields of a request: `read`, each by its type; `recorded` with the call, without effect on
    its answer; `nothing`; `neutral`: what changes the distribution, accepted with the values that change nothing."""

    read: Mapping[str, Any]
    recorded: frozenset[str]
    nothing: frozenset[str]
    neutral: Mapping[str, tuple[Any, ...]]

    def of(self, body: Body) -> dict[str, Any]:
        """The fields that are read, None where the body has none, and under `meta` those that are recorded. Raises
        `InputError` for a field that is unknown, of another type, or that would change the distribution."""
        found = {name: converted(kind | None, body.get(name), field=name) for name, kind in self.read.items()}
        meta: dict[str, Any] = {}
        for name, value in sorted(body.items()):
            if value is None or name in self.nothing:
                continue
            if name in self.recorded:
                if len(json.dumps(value)) > _MOST_RECORDED:
                    raise InputError(f"has more than {_MOST_RECORDED} characters", field=name)
                meta[name] = shallow(value, name)
            elif name in self.neutral:
                if not any(value == one and type(value) is type(one) for one in self.neutral[name]):
                    message = f"{name!r} is not supported: the policy is sampled as it is; {_NO_HINT}"
                    raise Refused(400, message, code="unsupported_parameter", param=name)
            elif name not in self.read:
                raise InputError(UNKNOWN, field=name, hint=_NO_HINT)
        return {**found, "meta": meta}


# messages and tools


def bounded(rows: list[Any], field: str) -> list[Any]:
    """The rows of a request. Raises `Refused` where they are too many."""
    if len(rows) > _MOST:
        raise Refused(413, f"has {len(rows)} rows, and may have {_MOST}", code="too_large", param=field)
    return rows


def shallow(value: Any, field: str) -> Any:
    """The value. Raises `InputError` where its session could not be read again."""
    if depth(value) > _DEEPEST:
        raise InputError(f"is nested more than {_DEEPEST} levels deep", field=field)
    return value


def needed(row: Mapping[str, Any], key: str, where: str, known: Collection[str] = ()) -> None:
    """Raise `InputError` for a row without this key: what it says would be read as nothing."""
    if key not in row:
        others = ", ".join(sorted(row.keys() - {"role", "type", key, *known})) or "no key"
        raise InputError("is missing", field=f"{where}.{key}", hint=f"what stands under {others} is not read as it")


def read_message(given: Any, where: str) -> Message:
    """One message in the form of chat completions; `where` names it in errors. Raises `InputError`."""
    if not isinstance(given, dict):
        raise InputError(f"is {type(given).__name__}, not an object", field=where)
    row = cast("dict[str, Any]", given)
    if row.get("role") != "assistant" or not row.keys() & {"tool_calls", *REASONING_KEYS, *UNREAD_SPEECH}:
        needed(row, "content", where)
    for name in UNREAD_SPEECH:
        if row.get(name):
            hint = "only content, reasoning and tool_calls are read; leave it out"
            raise InputError("is not supported", field=f"{where}.{name}", hint=hint)
    try:
        message = Message.from_chat(row)
    except InputError as error:
        raise InputError(error.problem, field=f"{where}.{error.field}", hint=error.hint) from error
    for j, call in enumerate(message.tool_calls):
        shallow(call.arguments, f"{where}.tool_calls[{j}].arguments")
    # only the gateway knows which of its answers were cut
    return replace(message, cut=False) if message.cut else message


def joined_turns(messages: Sequence[Message]) -> list[Message]:
    """Messages in which all that the assistant says and calls in a row is one turn."""
    turns: list[Message] = []
    for spoken, run in itertools.groupby(messages, lambda message: message.role == "assistant"):
        said = list(run)
        if spoken:
            content, reasoning = ("".join(getattr(each, name) for each in said) for name in ("content", "reasoning"))
            calls = tuple(call for message in said for call in message.tool_calls)
            said = [replace(said[0], content=content, reasoning=reasoning, tool_calls=calls)]
        turns += said
    return turns


def read_tools(given: list[Any]) -> Tools:
    """Declarations in the form of chat completions."""
    for i, tool in enumerate(bounded(given, "tools")):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(cast("dict[str, Any]", function).get("name"), str):
            raise InputError("is not {type: function, function: {name, ...}}", field=f"tools[{i}]")
        shallow(function, f"tools[{i}].function")
    return tuple(given)


def flat_tools(
    given: list[Any], schema: str, known: frozenset[str]
) -> tuple[Tools, dict[str, list[str]], frozenset[str]]:
    """Declarations with the name beside the schema (its key is `schema`), in the form of chat completions; the kinds of
    tools that the server would run, as a call records them: the policy is not shown these, for there are none; and the
    namespaces, which the names of their tools begin with. Raises `InputError` for a tool of another type that the agent
    would run."""
    tools, hosted, namespaces = list[Any](), list[str](), set[str]()
    for i, tool in enumerate(bounded(given, "tools")):
        row = as_object(tool)
        kind = row.get("type", "function")
        if isinstance(kind, str) and kind.startswith(_HOSTED):
            hosted.append(kind)
        elif kind == "namespace" and isinstance(row.get("tools"), list) and isinstance(row.get("name"), str):
            namespaces.add(row["name"])
            inner, _, _ = flat_tools(row["tools"], schema, known)
            names = [{**one["function"], "name": f"{row['name']}{APART}{one['function'].get('name')}"} for one in inner]
            tools += [{"type": "function", "function": one} for one in names]
        elif (kind != "function" and schema not in row) or kind not in ("function", "custom"):
            hint = "declare it as a function with a schema"
            raise InputError(f"is of type {kind!r}", field=f"tools[{i}]", hint=hint)
        else:
            if schema not in row and (unknown := sorted(row.keys() - known)):
                raise InputError(f"unknown key, and no {schema}", field=f"tools[{i}].{unknown[0]}")
            named = {"name": row.get("name"), "description": row.get("description"), "parameters": row.get(schema)}
            tools.append({"type": "function", "function": {k: v for k, v in named.items() if v is not None}})
    return read_tools(tools), {"hosted_tools": hosted} if hosted else {}, frozenset(namespaces)


# what the answer must be


def read_stops(given: str | list[Any] | None, field: str) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else given or []
    if not all(isinstance(stop, str) for stop in stops) or len(stops) > _MOST_STOPS:
        raise InputError(f"is not a list of at most {_MOST_STOPS} texts", field=field)
    return tuple(stop for stop in stops if stop)


def form_of(choice: str, tools: Tools, schema: dict[str, Any] | None) -> tuple[Tools, Form | None]:
    """The tools that the policy is shown and the form of its answer, if it has one. `choice` is auto, none, any, or the
    name of the tool to call after a colon. A schema binds an answer that is no call."""
    if choice == "none":
        tools = ()
    names = [tool["function"]["name"] for tool in tools]
    if choice in ("auto", "none"):
        return tools, None if schema is None else Form(schema=schema, calls=tuple(names))
    wanted = names if choice == "any" else [name for name in names if name == choice.partition(":")[2]]
    if not wanted:
        raise InputError("names no tool of this request", field="tool_choice", hint="declare it in tools")
    return tools, Form(calls=tuple(wanted))


def read_schema(form: dict[str, Any] | None, param: str, inside: str | None = None) -> dict[str, Any] | None:
    """The JSON schema that an answer must have, or None for text; `inside` is the key that holds the schema's own
    object."""
    kind = "text" if form is None else form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    holder: Any = form if inside is None or form is None else form.get(inside)
    schema = cast("dict[str, Any]", holder).get("schema") if isinstance(holder, dict) else None
    if kind != "json_schema" or not isinstance(schema, dict):
        raise InputError("is neither text, json_object, nor json_schema with a schema", field=param)
    return cast("dict[str, Any]", schema)


# answers


class Stream(ABC):
    """The events of one streamed answer. `said` is told what is certain of it so far (never less than before), `ended`
    writes the rest, `failed` an error behind what was sent already."""

    def __init__(self, name: str, model: str, ask: Ask) -> None:
        self.name, self.model, self.ask = name, model, ask
        self.sent = 0  # characters of the text
        self.begun = False

    def new(self, message: Message) -> str:
        """The text that was not sent before."""
        text, self.sent = message.content[self.sent :], len(message.content)
        return text

    @abstractmethod
    def said(self, message: Message) -> Iterator[str]: ...

    @abstractmethod
    def ended(self, call: Call) -> Iterator[str]: ...

    @abstractmethod
    def failed(self, error: Refused) -> Iterator[str]: ...


@dataclass(frozen=True)
class Dialect:
    """An API that agents speak: how a request is read, and how its answer is written, as a whole, as a stream, or as an
    error."""

    read: Callable[[Body, Before], Ask]
    body: Callable[[Call, str, Ask], dict[str, Any]]
    stream: type[Stream]
    error: Callable[[Refused], dict[str, Any]] = lambda refused: dict(refused.body)


def finish_reason(call: Call) -> str:
    """In the words of chat completions."""
    assert call.answer is not None
    return "length" if call.answer.cut else "tool_calls" if call.answer.tool_calls else "stop"


def usage(call: Call) -> dict[str, Any]:
    """In the form of chat completions."""
    assert call.completion is not None
    sampled, prompt = len(call.sampled_ids), call.prompt_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": min(prompt, call.completion.cost.reused_tokens)},
    }


def event(kind: str, **more: Any) -> str:
    """An event of a stream that has names."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **more})}\n\n"
