"""The common form of every source format: a row in chat shape, its messages not yet parsed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar, cast

from turntree.core.errors import InputError
from turntree.core.messages import as_object, read_arguments
from turntree.run.jsonl import parse_json, parse_object

F = TypeVar("F", bound=Callable[..., Any])
Rule = Literal["turns", "tool_calls", "bash", "search"]

# Marks that a format puts on raw messages, for facts that a message itself does not hold:
ACT = "_act"  # of an assistant message: "tool", "bash" or "search", where its text holds the action; "" for none
FAILED = "_failed"  # of a message that answers an action: whether the action failed
LINE = "_line"  # of a row of a session, and of the messages that it became: its line in the file, which errors name
RESPONSE = "_response"  # of an assistant message: the model's response that it is a piece of
SKIP = "_skip"  # why a message must not become a candidate (or, of a user's, is not the task)
UNSEEN = "_unseen"  # of a message: True where the model was shown what a trace cannot hold (an image), or ...
ANOTHER_PROMPT = "another_prompt"  # ... where it was shown another text than the source holds
CALL_IN_TEXT = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


class RowRefused(InputError):
    """A row that cannot become a trace; `reason` is what the import report counts it under (other errors than this:
    malformed_field)."""

    def __init__(self, reason: str, problem: str, *, field: str | None = None, hint: str | None = None) -> None:
        super().__init__(problem, field=field, hint=hint)
        self.reason = reason


class BrokenMessage(InputError):
    """Placeholder in the messages of a row for one that could not be read. The trace ends before it, as before any
    other malformed message; `turn` says whether it was a turn of the agent, to be counted."""

    def __init__(self, problem: str, *, turn: bool = False, field: str | None = None, hint: str | None = None) -> None:
        super().__init__(problem, field=field, hint=hint)
        self.turn = turn


@dataclass(kw_only=True)
class ChatRow:
    """`messages` and `tools` in OpenAI chat form, unparsed; the rest as in `Trace`.

    `rule` says which turns are candidates (`candidates.rule_reason`). `only_last_turn` marks a row that demonstrates
    its last turn only (a pivot row): what precedes is history. `thread` is another name of the group, by which rows of
    other files may know it: rows with either name are one group. `context` numbers the traces of one `id`, from 1:
    later ones have it behind their id. `left_out` counts the agent's turns that are not among `messages`, by reason.
    `ignored` counts fields of the source that a trace has no place for; of a `strict` row, unknown ones inside calls,
    parts and declarations are refused instead.
    """

    messages: list[Any] = field(default_factory=list[Any])
    tools: list[Any] = field(default_factory=list[Any])
    id: str | None = None
    group: str | None = None
    thread: str | None = None
    context: int = 1
    domain: str = ""
    split: str | None = None
    success: bool | None = None
    environment: dict[str, Any] | None = None
    meta: dict[str, Any] = field(default_factory=dict[str, Any])
    rule: Rule = "turns"
    only_last_turn: bool = False
    strict: bool = False
    left_out: Counter[str] = field(default_factory=Counter[str])
    ignored: Counter[str] = field(default_factory=Counter[str])

    @classmethod
    def of(
        cls,
        row: Mapping[str, Any],
        known: Collection[str],
        *,
        id: str = "",
        group: str = "",
        meta: str = "",
        told: Mapping[str, Any] | None = None,
    ) -> ChatRow:
        """What a row says beside its messages. `id`, `group` and `meta` are words, keys of the row: the first that is
        set is its id, or group, and all are kept in `meta`. `told` tells its `outcome`. Keys that are not `known` are
        counted. Raises `InputError`."""
        kept = {key: row[key] for key in meta.split() if row.get(key) is not None}
        chat = cls(id=text_of(row, id.split()), group=text_of(row, group.split()), meta=kept)
        chat.success = outcome(told or {}, kept)
        count_unknown(row, known, "", chat.ignored)
        return chat

    def declare(self, holder: Mapping[str, Any], key: str = "tools") -> None:
        """Take the tool declarations that stand in `holder`."""
        self.tools = chat_tools(list_of(holder, key, "a list of tool declarations"), self.ignored)

    def compacted(self, messages: Iterable[Any] = ()) -> ChatRow:
        """The next context of a session, which begins with these messages; what was counted stays with this one."""
        fresh = {"ignored": Counter[str](), "left_out": Counter[str]()}
        return replace(self, messages=[*messages], context=self.context + 1, **fresh)

    def drop_turns(self) -> None:
        """Of a rollout that failed: no turn of it is a demonstration, and nothing says what it is worth."""
        self.success = None
        self.meta.pop("reward", None)
        self.left_out["rollout_failed"] += sum(role_of(message) == "assistant" for message in self.messages)
        self.messages = [message for message in self.messages if role_of(message) != "assistant"]


WhyNot = Callable[[dict[str, Any]], str]  # "" for a row of the format, else why it is not


@dataclass(frozen=True)
class Told:
    """How `--format auto` recognises a format: by a `row`, or by the first row of a `session`, which is a file whose
    rows are one recording (its reader gets `{"events": rows}`, of a text file its lines). A `general` format is chosen
    only where no other recognises the row."""

    row: WhyNot | None = None
    session: WhyNot | None = None
    general: bool = False


_TOLD = "turntree_told"
_LIMITS = ("length", "max_tokens", "model_length", "max_output_tokens", "model_context_window_exceeded")


def told_by(row: WhyNot | None = None, *, session: WhyNot | None = None, general: bool = False) -> Callable[[F], F]:
    """Of a format's reader: how "auto" recognises it (`Told`). A format without it must be named."""

    def mark(reader: F) -> F:
        setattr(reader, _TOLD, Told(row, session, general))
        return reader

    return mark


def told(reader: Any) -> Told | None:
    """What `told_by` said of a reader."""
    return getattr(reader, _TOLD, None)


def misfit(row: Mapping[str, Any], **kinds: type | tuple[str, ...]) -> str:
    """ "" where the row has all these keys with values of these types (`object`: any), or with lists whose first object
    has these keys; else the first mismatch."""
    names = {list: "a list", dict: "an object", str: "text"}
    for key, kind in kinds.items():
        if key not in row:
            return f"no '{key}'"
        if isinstance(kind, tuple):
            if not set(kind) <= first_object(row[key]).keys():
                return f"no '{key}' of {{{', '.join(kind)}}}"
        elif not isinstance(row[key], kind):
            return f"'{key}' is not {names[kind]}"
    return ""


def first_object(items: Any) -> dict[str, Any]:
    """The first object of a list that holds something; {} where there is none."""
    return next(filter(None, map(as_object, cast("list[Any]", items))), {}) if isinstance(items, list) else {}


def role_of(message: Any) -> Any:
    return as_object(message).get("role")


def at_line(row: dict[str, Any], messages: list[Any]) -> list[Any]:
    """The messages that a row of a session became, which know its line."""
    for message in messages:
        if isinstance(message, InputError):
            message.line = message.line or row.get(LINE)
        elif isinstance(message, dict):
            message[LINE] = row.get(LINE)
    return messages


def said_before(message: Any) -> Any:
    """A turn that stands in a later context too is a candidate in the one in which it was said."""
    return message | {SKIP: "said_in_another_conversation"} if role_of(message) == "assistant" else message


def words(text: str) -> frozenset[str]:
    """The words of a text: how formats list the keys of their schemas."""
    return frozenset(text.split())


def count_unknown(row: Mapping[str, Any], known: Collection[str], inside: str, ignored: Counter[str]) -> dict[str, Any]:
    """Count the keys of a source object that its documented schema does not have, the same way in every format, and
    return what they hold."""
    unknown = {key: value for key, value in row.items() if key not in known and value is not None and key != LINE}
    ignored.update(f"unknown key {inside}{key}" for key in unknown)
    return unknown


def object_of(row: Mapping[str, Any], key: str) -> dict[str, Any]:
    """An object; absent and null are empty."""
    value = row.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InputError(f"is {type(value).__name__}, not an object", field=key)
    return cast("dict[str, Any]", value)


def part_of(row: Any, key: str) -> dict[str, Any]:
    """The object at a key; empty where there is none, or something else."""
    return as_object(as_object(row).get(key))


def each_object(items: Iterable[Any], read: Callable[[dict[str, Any]], list[Any]]) -> list[Any]:
    """The messages that `read` makes of every object. What is no object stays, and is refused with its place when
    messages are parsed."""
    return [message for item in items for message in (read(item) if isinstance(item, dict) else [item])]


def outcome(row: Mapping[str, Any], meta: dict[str, Any]) -> bool | None:
    """Whether the episode succeeded: `success`, else `resolved`, else `reward` >= 1 (kept in `meta`), else unknown."""
    reward = row.get("reward")
    if reward is not None:
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            raise InputError(f"is {reward!r}, not a number", field="reward", hint="write 0.0 or 1.0")
        meta["reward"] = reward
    for key in ("success", "resolved"):
        value = row.get(key)
        if value is None:
            continue
        if value not in (True, False):  # 0 and 1 are equal to them
            raise InputError(f"is {value!r}", field=key, hint="write true, false or null")
        return bool(value)
    return None if reward is None else reward >= 1


def text_of(row: Mapping[str, Any], keys: Iterable[str]) -> str | None:
    """The first of `keys` that is set, as text (whole numbers are written out)."""
    for key in keys:
        value = row.get(key)
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # pandas writes the numbers of a column with gaps so
        if isinstance(value, bool) or not isinstance(value, str | int | None):
            raise InputError(f"is {type(value).__name__}", field=key, hint="write text or a number")
        if value not in (None, ""):
            return str(value)
    return None


def was_cut(told: Any) -> bool:
    """Whether an object tells, in the words of some provider, that the token limit ended an answer."""
    row = as_object(told)
    reasons = [row.get(key) for key in ("finish_reason", "stop_reason", "stopReason", "done_reason")]
    reasons.append(part_of(row, "incomplete_details").get("reason"))
    return any(str(reason).lower() in _LIMITS for reason in reasons)


def failed_exit(told: Any) -> bool | None:
    """Whether a command ended with an exit code above 0, which `told` or its `metadata` has; None without a code."""
    for place in (told, part_of(told, "metadata")):
        code = as_object(place).get("exit_code")
        if isinstance(code, int):
            return code > 0
    return None


def list_of(row: Mapping[str, Any], key: str, hint: str) -> list[Any]:
    """A list, or the JSON text of one (some data sets store columns so); absent and null are empty."""
    value = row.get(key)
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except InputError as error:
            raise InputError(f"is text that {error.problem}", field=key, hint=hint) from error
    if value is None:
        return []
    if not isinstance(value, list):
        raise InputError(f"is {type(cast(Any, value)).__name__}, not a list", field=key, hint=hint)
    return cast("list[Any]", value)


def chat_tools(declarations: list[Any], ignored: Counter[str]) -> list[Any]:
    """Tool declarations in chat form, to be checked by `schema.check_tools`: the flat form of Responses, Anthropic and
    MCP is nested, a schema that is JSON text is parsed, built-in tools without a name are counted."""
    tools: list[Any] = []
    for i, tool in enumerate(declarations):
        declared = as_object(tool)
        if declared and "function" not in declared:
            if declared.get("type") not in ("function", None) and "input_schema" not in declared:
                ignored[f"tools[] of type {declared['type']!r}"] += 1
                continue
            declared = {"type": "function", "function": {key: declared[key] for key in declared if key != "type"}}
        function: Any = declared.get("function")
        if isinstance(function, dict):
            declared = {**declared, "function": _with_parameters(cast("dict[str, Any]", function), f"tools[{i}]")}
        tools.append(declared or tool)
    return [tool for i, tool in enumerate(tools) if tool not in tools[:i]]


def _with_parameters(function: dict[str, Any], inside: str) -> dict[str, Any]:
    """A declaration whose schema is called `parameters`, and is no text."""
    other = next((key for key in ("input_schema", "inputSchema") if function.get(key) is not None), None)
    if other is not None and function.get("parameters") is None:
        function = {("parameters" if key == other else key): function[key] for key in function if key != "parameters"}
    if not isinstance(function.get("parameters"), str):
        return function
    try:
        return {**function, "parameters": parse_json(function["parameters"])}
    except InputError as error:
        where = f"{inside}.function.parameters"
        raise InputError(f"is text that {error.problem}", field=where, hint=error.hint) from error


def of_today(message: Any, ignored: Counter[str]) -> Any:
    """A message of the old form (`function_call`, role "function") as one of today's. A turn that the token limit
    ended has weight 0."""
    if not isinstance(message, dict):
        return message
    message = cast("dict[str, Any]", message)
    if message.keys().isdisjoint(("function_call", "finish_reason")) and message.get("role") != "function":
        return message
    row = {key: value for key, value in message.items() if key not in ("function_call", "finish_reason")}
    old, calls = message.get("function_call"), row.get("tool_calls")
    if isinstance(old, dict) and (old.get("name") or old.get("arguments") not in (None, "", "{}", {})):  # else: "none"
        if not calls:
            row["tool_calls"] = [{"function": old}]
        elif isinstance(calls, list) and any(_same(old, call) for call in cast("list[Any]", calls)):
            ignored["messages[].function_call that is one of tool_calls"] += 1
        else:
            problem, hint = "is another call than those of tool_calls", "write the calls of a turn in one form"
            return BrokenMessage(problem, turn=True, field="function_call", hint=hint)
    elif old and not isinstance(old, dict):
        return BrokenMessage("is not an object", turn=True, field="function_call", hint="write {name, arguments}")
    role = {"role": "tool"} if row.get("role") == "function" else {}
    return row | role | ({"weight": 0} if message.get("finish_reason") == "length" else {})


def _same(old: dict[str, Any], call: Any) -> bool:
    """Whether a call of the old form is one of today's, in a log that writes both."""
    new = part_of(call, "function")
    try:
        told = [read_arguments("", one.get("arguments")) for one in (old, new)]
    except InputError:
        told = [old.get("arguments"), new.get("arguments")]
    return old.get("name") == new.get("name") and told[0] == told[1]


def call_of(name: Any, arguments: Any, call_id: Any = None, unread: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """One tool call in chat form; what is absent stays absent, so that parsing refuses it with its field. `unread` is
    what stands beside the arguments and was counted: where there are none, it stays, and parsing refuses the call."""
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    beside = {} if arguments not in (None, "", "{}", {}) else dict(unread or {})
    return {**beside, "type": "function", "id": call_id, "function": function}


def reasoning_in(said: Mapping[str, Any], ignored: Counter[str]) -> dict[str, str]:
    """The reasoning of a turn, where it is text; other forms (signed or encrypted blocks) are counted."""
    for key in ("thinking_blocks", "responses_reasoning_item"):
        if said.get(key):
            ignored[key] += 1
    text = said.get("reasoning_content")
    return {"reasoning_content": text} if isinstance(text, str) and text else {}


def acts_in(content: Any) -> dict[str, Any]:
    """The mark of a Terminus turn, whose text is a JSON object with `commands`: it acts where there is a command."""
    text = str(content).rpartition("</think>")[2]
    start, end = text.find("{"), text.rfind("}")
    try:
        answer = parse_object(text[start : end + 1])
    except InputError:
        return {ACT: "bash" if "<keystrokes" in text else ""}
    return {ACT: "bash" if answer.get("commands") else ""}


def answers(ids: list[Any], content: Any, **marks: Any) -> list[dict[str, Any]]:
    """The results of calls that one text answers: the last call's is the text, those of the others are empty."""
    texts = [*([""] * (len(ids) - 1)), content]
    return [{"role": "tool", "content": c, "tool_call_id": i, **marks} for i, c in zip(ids, texts, strict=True)]
