"""Chat rows: `{"messages": [...], "tools": [...], ...}`, the common form of shared traces and data sets."""

from __future__ import annotations

from typing import Any, Literal, cast

from turntree.core.errors import InputError
from turntree.core.messages import REASONING_KEYS, read_arguments
from turntree.traces.formats.row import (
    ChatRow,
    RowRefused,
    chat_tools,
    count_unknown,
    list_of,
    object_of,
    outcome,
    part_of,
    text_of,
    told_by,
)
from turntree.traces.schema import MESSAGE_KEYS, check_keys

UnknownKeys = Literal["stop", "keep"]

ID_KEYS = ("id", "trajectory_id", "uuid")
GROUP_KEYS = ("group", "task_id", "instance_id")
ROW_KEYS = frozenset(
    {"messages", "tools", "functions", *ID_KEYS, *GROUP_KEYS, "success", "resolved", "reward", "domain", "split"}
    | {"environment", "meta", "parallel_tool_calls"}
)
# weight 0: OpenAI's mark for "do not train on this turn"
MESSAGE_KEYS_READ = (MESSAGE_KEYS - {"cut"}) | {"weight", *REASONING_KEYS}
MESSAGE_KEYS_IGNORED = frozenset({"refusal", "annotations", "audio"})
_KEEP = "import with unknown_keys='keep' (--unknown-keys keep) to carry it in meta.extra"


@told_by(lambda row: "" if "messages" in row else "no 'messages'", general=True)
def read_chat_row(row: dict[str, Any], *, unknown_keys: UnknownKeys = "stop") -> ChatRow:
    """Raises `RowRefused` for a missing `messages`, a wrong type or (unless kept) an unknown key.

    Args:
        unknown_keys: Keys of a row that the schema does not know are refused (stop), or go to `meta.extra` (keep).
    """
    extra = {key: value for key, value in row.items() if key not in ROW_KEYS and value is not None}
    if unknown_keys == "stop":
        _refuse_unknown(extra, ROW_KEYS)
    if row.get("messages") is None:
        hint = "a chat row is {messages: [{role, content, ...}], tools?: [...], ...}"
        raise RowRefused("malformed_field", "is missing", field="messages", hint=hint)
    meta = dict(object_of(row, "meta"))
    if extra:
        meta["extra"] = extra
    chat = ChatRow(
        messages=list_of(row, "messages", "a list of {role, content, ...}"),
        id=text_of(row, ID_KEYS),
        group=text_of(row, GROUP_KEYS),
        domain=text_of(row, ("domain",)) or "",
        split=text_of(row, ("split",)),
        success=outcome(row, meta),
        environment=None if row.get("environment") is None else object_of(row, "environment"),
        meta=meta,
        strict=unknown_keys == "stop",
    )
    count_unknown(extra, (), "", chat.ignored)
    chat.ignored.update({"parallel_tool_calls"} & {key for key in row if row[key] is not None})  # OpenAI's fine-tuning
    functions = [{"type": "function", "function": one} for one in list_of(row, "functions", "a list of functions")]
    chat.tools = chat_tools([*functions, *list_of(row, "tools", "a list of tool declarations")], chat.ignored)
    chat.messages = [_known_part(m, f"messages[{i}].", unknown_keys, chat) for i, m in enumerate(chat.messages)]
    return chat


def _known_part(message: Any, inside: str, unknown_keys: UnknownKeys, chat: ChatRow) -> Any:
    """The message without the fields that a trace has no place for; those are counted."""
    if not isinstance(message, dict):
        return message  # refused, with its place, when messages are parsed
    said = {key: value for key, value in cast("dict[str, Any]", message).items() if value is not None}
    row = _today(said, inside, chat)
    if unknown_keys == "stop":
        _refuse_unknown(row, MESSAGE_KEYS_READ | MESSAGE_KEYS_IGNORED, inside)
    if row.get("weight", 1) not in (0, 1):
        hint = "0 keeps a turn from being a candidate, 1 does not"
        raise RowRefused("malformed_field", f"is {row['weight']!r}", field=f"{inside}weight", hint=hint)
    count_unknown(row, MESSAGE_KEYS_READ | MESSAGE_KEYS_IGNORED, "messages[].", chat.ignored)
    unread = {key for key in row if key in MESSAGE_KEYS_IGNORED}
    unread |= {key for key in REASONING_KEYS if not isinstance(row.get(key, ""), str)}  # signed blocks of an API
    chat.ignored.update(f"messages[].{key}" for key in unread)
    return {key: value for key, value in row.items() if key in MESSAGE_KEYS_READ and key not in unread}


def _today(row: dict[str, Any], inside: str, chat: ChatRow) -> dict[str, Any]:
    """A message of the old form (`function_call`, role "function") as one of today's. A turn that the token limit
    ended has weight 0."""
    old: Any = row.get("function_call")
    if isinstance(old, dict):
        del row["function_call"]
        calls = row.get("tool_calls")
        if not old.get("name") and old.get("arguments") in (None, "", "{}", {}):  # some data sets write it for "none"
            pass
        elif not calls:
            row["tool_calls"] = [{"function": old}]
        elif isinstance(calls, list) and any(_same(old, call) for call in cast("list[Any]", calls)):
            chat.ignored["messages[].function_call that is one of tool_calls"] += 1
        else:
            problem, hint = "is another call than those of tool_calls", "write the calls of a turn in one form"
            raise RowRefused("malformed_field", problem, field=f"{inside}function_call", hint=hint)
    if row.get("role") == "function":
        row["role"] = "tool"
    if row.pop("finish_reason", None) == "length":
        row["weight"] = 0
    return row


def _same(old: dict[str, Any], call: Any) -> bool:
    """Whether a call of the old form is one of today's, in a log that writes both."""
    new = part_of(call, "function")
    try:
        told = [read_arguments("", one.get("arguments")) for one in (old, new)]
    except InputError:
        told = [old.get("arguments"), new.get("arguments")]
    return old.get("name") == new.get("name") and told[0] == told[1]


def _refuse_unknown(row: dict[str, Any], known: frozenset[str], inside: str = "") -> None:
    try:
        check_keys(row, known, hint=_KEEP)
    except InputError as error:
        raise RowRefused("unknown_key", error.problem, field=f"{inside}{error.field}", hint=error.hint) from error
