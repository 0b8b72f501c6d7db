"""Chat rows: `{"messages": [...], "tools": [...], ...}`, the common form of shared traces and data sets."""

from __future__ import annotations

from typing import Any, Literal, cast

from turntree.core.errors import InputError
from turntree.core.messages import REASONING_KEYS
from turntree.traces.formats.row import (
    ChatRow,
    RowRefused,
    chat_tools,
    count_unknown,
    list_of,
    object_of,
    text_of,
    told_by,
    words,
)
from turntree.traces.schema import MESSAGE_KEYS, check_keys

UnknownKeys = Literal["stop", "keep"]

ID_KEYS = "id trajectory_id uuid"
GROUP_KEYS = "group task_id instance_id"
ROW_KEYS = words(
    "messages tools functions system success resolved reward domain split environment meta parallel_tool_calls "
    f"{ID_KEYS} {GROUP_KEYS}"
)
# weight 0: OpenAI's mark for "do not train on this turn"
MESSAGE_KEYS_READ = (MESSAGE_KEYS - {"cut"}) | {"weight", "function_call", "finish_reason", *REASONING_KEYS}
MESSAGE_KEYS_IGNORED = frozenset({"refusal", "annotations", "audio"})
_KEEP = "import with unknown_keys='keep' (--unknown-keys keep) to carry it in meta.extra"


@told_by(lambda row: "" if "messages" in row else "no 'messages'", general=True)
def read_chat_row(row: dict[str, Any], *, unknown_keys: UnknownKeys = "stop") -> ChatRow:
    """Raises `InputError` for a missing `messages`, a wrong type or (unless kept) an unknown key.

    Args:
        unknown_keys: Keys of a row that the schema does not know are refused (stop), or go to `meta.extra` (keep).
    """
    extra = {key: value for key, value in row.items() if key not in ROW_KEYS and value is not None}
    if unknown_keys == "stop":
        _refuse_unknown(extra, ROW_KEYS)
    if row.get("messages") is None:
        hint = "a chat row is {messages: [{role, content, ...}], tools?: [...], ...}"
        raise InputError("is missing", field="messages", hint=hint)
    chat = ChatRow.of(row, ROW_KEYS, id=ID_KEYS, group=GROUP_KEYS, told=row)
    chat.meta = {**object_of(row, "meta"), **chat.meta, **({"extra": extra} if extra else {})}
    chat.messages = list_of(row, "messages", "a list of {role, content, ...}")
    chat.domain, chat.split = text_of(row, ("domain",)) or "", text_of(row, ("split",))
    chat.environment = None if row.get("environment") is None else object_of(row, "environment")
    chat.strict = unknown_keys == "stop"
    chat.ignored.update({"parallel_tool_calls"} & {key for key in row if row[key] is not None})  # OpenAI's fine-tuning
    functions = [{"type": "function", "function": one} for one in list_of(row, "functions", "a list of functions")]
    chat.tools = chat_tools([*functions, *list_of(row, "tools", "a list of tool declarations")], chat.ignored)
    if isinstance(row.get("system"), str) and row["system"]:  # as Anthropic's API has it
        chat.messages = [{"role": "system", "content": row["system"]}, *chat.messages]
    elif row.get("system"):
        raise InputError("is no text", field="system", hint="write it as a message, or as text")
    chat.messages = [_known_part(m, f"messages[{i}].", unknown_keys, chat) for i, m in enumerate(chat.messages)]
    return chat


def _known_part(message: Any, inside: str, unknown_keys: UnknownKeys, chat: ChatRow) -> Any:
    """The message without the fields that a trace has no place for; those are counted."""
    if not isinstance(message, dict):
        return message  # refused, with its place, when messages are parsed
    row = {key: value for key, value in cast("dict[str, Any]", message).items() if value is not None}
    if unknown_keys == "stop":
        _refuse_unknown(row, MESSAGE_KEYS_READ | MESSAGE_KEYS_IGNORED, inside)
    if row.get("weight", 1) not in (0, 1):
        hint = "0 keeps a turn from being a candidate, 1 does not"
        raise InputError(f"is {row['weight']!r}", field=f"{inside}weight", hint=hint)
    count_unknown(row, MESSAGE_KEYS_READ | MESSAGE_KEYS_IGNORED, "messages[].", chat.ignored)
    unread = {key for key in row if key in MESSAGE_KEYS_IGNORED}
    unread |= {key for key in REASONING_KEYS if not isinstance(row.get(key, ""), str)}  # signed blocks of an API
    chat.ignored.update(f"messages[].{key}" for key in unread)
    return {key: value for key, value in row.items() if key in MESSAGE_KEYS_READ and key not in unread}


def _refuse_unknown(row: dict[str, Any], known: frozenset[str], inside: str = "") -> None:
    try:
        check_keys(row, known, hint=_KEEP)
    except InputError as error:
        raise RowRefused("unknown_key", error.problem, field=f"{inside}{error.field}", hint=error.hint) from error
