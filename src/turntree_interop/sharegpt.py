"""ShareGPT: `conversations` or `conversation` of `{from, value}`, and rows of `{instruction, input, output}` (Alpaca).
Every turn is a candidate (PivotRL, appendix A.2).

A text that calls `<search>` or `<python>` and goes on after `<result>` is a turn a call, with the results apart: so the
cold start of Tool-Star and ARPO never trains on what a tool said.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, cast

from turntree.core.errors import InputError
from turntree.render.tool_calls import TAGS
from turntree.run.jsonl import parse_json
from turntree.traces.formats.row import (
    CALL_IN_TEXT,
    UNSEEN,
    ChatRow,
    call_of,
    count_unknown,
    each_object,
    list_of,
    misfit,
    told_by,
    words,
)

_SPEAKERS = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "model": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "tool": "tool", "observation": "tool",
    "function_response": "tool", "function": "tool", "ipython": "tool", "function_call": "call", "tool_call": "call",
}  # fmt: skip
_SHAREGPT_KEYS = words(
    "instruction input output conversations conversation tools id system source task_id success reward resolved"
)
_ALPACA = {"system": "system", "instruction": "human", "input": "human", "output": "gpt"}
_TAGGED = re.compile(r"<(search|python)>(.*?)</\1>\s*<result>(.*?)</result>", re.DOTALL)
_RESULT = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.DOTALL)


def turns_of(row: dict[str, Any]) -> Any:
    """The dialogue of a row, under either of its names, or of the fields of an instruction."""
    if isinstance(row.get("instruction"), str) and isinstance(row.get("output"), str):
        return [{"from": speaker, "value": row[key]} for key, speaker in _ALPACA.items() if row.get(key)]
    return row.get("conversations", row.get("conversation"))


@told_by(lambda row: misfit({"conversations": turns_of(row)}, conversations=("from", "value")))
def read_sharegpt(row: dict[str, Any]) -> ChatRow:
    """Calls are messages from "function_call" (JSON), or `<tool_call>` in the text, results likewise."""
    chat = ChatRow.of(row, _SHAREGPT_KEYS, id="id", group="task_id", told=row)
    chat.declare(row)
    if isinstance(row.get("system"), str) and row["system"] and "output" not in row:
        chat.messages.append({"role": "system", "content": row["system"]})
    key = "conversations" if "conversations" in row else "conversation"
    items = turns_of(row) if "output" in row else list_of(row, key, "a list of {from, value}")
    chat.messages += each_object(items, lambda said: _said(said, f"{key}[].", chat.ignored))
    for message in chat.messages[:1]:
        message |= {UNSEEN: True} if any(row.get(kind) for kind in ("image", "images", "videos", "audios")) else {}
    return chat


def _said(said: dict[str, Any], inside: str, ignored: Counter[str]) -> list[Any]:
    count_unknown(said, ("from", "value", "weight", "loss"), inside, ignored)
    role, value = _SPEAKERS.get(str(said.get("from")), said.get("from")), said.get("value")
    weight = {"weight": 0} if said.get("weight") == 0 or said.get("loss") is False else {}
    if role == "call":
        return [{"role": "assistant", "content": "", "tool_calls": _calls(value), **weight}]
    if role == "tool" and isinstance(value, str) and (results := _RESULT.findall(value)):
        if _RESULT.sub("", value).strip():
            ignored["text beside <tool_response>"] += 1
        return [{"role": "tool", "content": result} for result in results]
    message: dict[str, Any] = {"role": role, "content": value, **weight}
    if role == "assistant" and isinstance(value, str) and (parts := _TAGGED.split(value))[1:]:
        return [one for place in range(0, len(parts), 4) for one in _tagged(parts[place : place + 4], weight)]
    if role == "assistant" and isinstance(value, str):
        thought, ended, text = value.rpartition("</think>")  # a call that is only thought of is none
        if calls := CALL_IN_TEXT.findall(text):
            content = f"{thought}{ended}{CALL_IN_TEXT.sub('', text)}".strip()
            message |= {"content": content, "tool_calls": [one for call in calls for one in _calls(call)]}
    return [message]


def _tagged(part: list[str], weight: dict[str, int]) -> list[dict[str, Any]]:
    """Text, and with it a call and its result, where it does not end the dialogue."""
    text, *call = part
    if not call:
        return [{"role": "assistant", "content": text.strip(), **weight}] if text.strip() else []
    name, value, result = call
    said = {"role": "assistant", "content": text.lstrip(), "tool_calls": [call_of(name, {TAGS[name]: value})], **weight}
    return [said, {"role": "tool", "content": result.strip()}]


def _calls(text: Any) -> list[Any]:
    """A call written as JSON `{name, arguments}`, or a list of parallel ones. Other text is passed on and later refused
    as arguments that are not JSON."""
    try:
        found = parse_json(text) if isinstance(text, str) else text
    except InputError:
        return [call_of("unreadable", text)]
    return [_named(call) for call in cast("list[Any]", found)] if isinstance(found, list) else [_named(found)]


def _named(call: Any) -> Any:
    """The call with its `parameters`, as Llama calls them, under the usual name."""
    if not isinstance(call, dict):
        return call_of("unreadable", str(call))
    other = "parameters" in call and "arguments" not in call
    return {("arguments" if other and key == "parameters" else key): call[key] for key in cast("dict[str, Any]", call)}
