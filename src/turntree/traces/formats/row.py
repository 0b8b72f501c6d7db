"""What every source format is turned into: a row in chat shape, its messages not yet parsed."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from turntree.core.errors import InputError
from turntree.observe.jsonl import parse_json


class RowRefused(InputError):
    """A row that cannot become a trace; `reason` is what the import report counts it under."""

    def __init__(self, reason: str, problem: str, *, field: str | None = None, hint: str | None = None) -> None:
        super().__init__(problem, field=field, hint=hint)
        self.reason = reason


@dataclass(kw_only=True)
class ChatRow:
    """`messages` and `tools` in OpenAI chat form, unparsed; the rest as in `Trace`.

    `only_last_turn` marks a row that demonstrates its last turn only (a pivot row): what precedes is history.
    `ignored` counts fields of the source that a trace has no place for.
    """

    messages: list[Any]
    tools: list[Any] = field(default_factory=list[Any])
    id: str | None = None
    group: str | None = None
    domain: str = ""
    split: str | None = None
    success: bool | None = None
    environment: dict[str, Any] | None = None
    meta: dict[str, Any] = field(default_factory=dict[str, Any])
    only_last_turn: bool = False
    ignored: Counter[str] = field(default_factory=Counter[str])


def outcome(row: Mapping[str, Any], meta: dict[str, Any]) -> bool | None:
    """Whether the episode succeeded: `success`, else `resolved`, else `reward` >= 1 (kept in `meta`), else unknown."""
    reward = row.get("reward")
    if reward is not None:
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            raise RowRefused("malformed_field", f"is {reward!r}, not a number", field="reward", hint="write 0.0 or 1.0")
        meta["reward"] = reward
    for key in ("success", "resolved"):
        value = row.get(key)
        if value is None:
            continue
        if value not in (True, False):  # 0 and 1 are equal to them
            raise RowRefused("malformed_field", f"is {value!r}", field=key, hint="write true, false or null")
        return bool(value)
    return None if reward is None else reward >= 1


def text_of(row: Mapping[str, Any], keys: Iterable[str]) -> str | None:
    """The first of `keys` that is set, as text (numbers are written out)."""
    for key in keys:
        value = row.get(key)
        if isinstance(value, bool) or not isinstance(value, str | int | None):
            raise RowRefused("malformed_field", f"is {type(value).__name__}", field=key, hint="write text or a number")
        if value not in (None, ""):
            return str(value)
    return None


def list_of(row: Mapping[str, Any], key: str, hint: str) -> list[Any]:
    """A list, or the JSON text of one (some data sets store columns so); absent and null are empty."""
    value = row.get(key)
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except InputError as error:
            raise RowRefused("malformed_field", f"is text that {error.problem}", field=key, hint=hint) from error
    if value is None:
        return []
    if not isinstance(value, list):
        raise RowRefused("malformed_field", f"is {type(cast(Any, value)).__name__}, not a list", field=key, hint=hint)
    return cast("list[Any]", value)


def chat_tools(declarations: list[Any], ignored: Counter[str]) -> list[Any]:
    """Tool declarations in chat form; the flat Responses form is nested, built-in tools without a name are counted."""
    tools: list[Any] = []
    for tool in declarations:
        if not isinstance(tool, dict) or "function" in tool:
            tools.append(tool)
            continue
        flat = cast("dict[str, Any]", tool)
        if flat.get("type", "function") != "function":
            ignored[f"tools[] of type {flat['type']!r}"] += 1
            continue
        tools.append({"type": "function", "function": {key: flat[key] for key in flat if key != "type"}})
    return [tool for i, tool in enumerate(tools) if tool not in tools[:i]]


def fingerprint(value: Any) -> str:
    """A short name for JSON content: equal values, equal names."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
