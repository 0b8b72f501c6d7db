"""Dialogues as data sets write them, with the actions in the text.

| format | the row, or the file |
|---|---|
| `sharegpt` | `conversations` (or `conversation`) of `{from, value}` |
| `terminus` | `conversations` of `{role, content}` whose assistant answers with JSON `commands` (Terminus 1 and 2) |
| `react` | a text of "Question:", "Thought 1:", "Action 1: Search[...]", "Observation 1:" |

Candidates by the paper's rule (appendix A.2): every turn of a dialogue, every bash action of a Terminus trajectory,
every search-related step of a ReAct text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, cast

from turntree.core.errors import InputError
from turntree.observe.jsonl import parse_json
from turntree.traces.formats.events import acts_in
from turntree.traces.formats.row import (
    ACT,
    CALL_IN_TEXT,
    FAILED,
    BrokenMessage,
    ChatRow,
    RowRefused,
    call_of,
    chat_tools,
    count_unknown,
    each_object,
    first_object,
    list_of,
    outcome,
    text_of,
    told_by,
    words,
)

# ShareGPT

_SPEAKERS = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "model": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "tool": "tool", "observation": "tool",
    "function_response": "tool", "function": "tool", "ipython": "tool", "function_call": "call", "tool_call": "call",
}  # fmt: skip
_SHAREGPT_KEYS = words("conversations conversation tools id system source task_id success reward resolved")
_RESULT = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.DOTALL)


def _talk(row: dict[str, Any]) -> Any:
    return row.get("conversations", row.get("conversation"))


def _is_sharegpt(row: dict[str, Any]) -> str:
    first = first_object(_talk(row))
    return "" if "from" in first and "value" in first else "no 'conversations' of {from, value}"


@told_by(_is_sharegpt)
def read_sharegpt(row: dict[str, Any]) -> ChatRow:
    """Calls are messages from "function_call" (JSON), or `<tool_call>` in the text, results likewise."""
    meta: dict[str, Any] = {}
    chat = ChatRow(
        messages=[],
        id=text_of(row, ("id",)),
        group=text_of(row, ("task_id",)),
        success=outcome(row, meta),
        meta=meta,
    )
    chat.tools = chat_tools(list_of(row, "tools", "a list of tool declarations"), chat.ignored)
    count_unknown(row, _SHAREGPT_KEYS, "", chat.ignored)
    if isinstance(row.get("system"), str) and row["system"]:
        chat.messages.append({"role": "system", "content": row["system"]})
    key = "conversations" if "conversations" in row else "conversation"
    items = list_of(row, key, "a list of {from, value}")
    chat.messages += each_object(items, lambda said: _said(said, f"{key}[].", chat.ignored))
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
    if role == "assistant" and isinstance(value, str):
        thought, ended, text = value.rpartition("</think>")  # a call that is only thought of is none
        if calls := CALL_IN_TEXT.findall(text):
            content = f"{thought}{ended}{CALL_IN_TEXT.sub('', text)}".strip()
            message |= {"content": content, "tool_calls": [one for call in calls for one in _calls(call)]}
    return [message]


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


# Terminus

_TERMINUS_KEYS = words(
    "conversations agent model model_provider date task episode run_id trial_name result reward resolved success id "
    "task_id instruction verifier_output"
)
_REFUSED = ("previous response had parsing errors", "error:", "warnings:")


def _is_terminus(row: dict[str, Any]) -> str:
    first = first_object(_talk(row))
    return "" if "role" in first and "content" in first else "no 'conversations' of {role, content}"


@told_by(_is_terminus)
def read_terminus(row: dict[str, Any]) -> ChatRow:
    """A Terminus trajectory, whose prompts are messages of the user and whose actions are JSON texts."""
    meta = {key: row[key] for key in ("task", "episode", "run_id", "agent", "model") if row.get(key) is not None}
    chat = ChatRow(
        messages=[],
        id=text_of(row, ("id", "trial_name")),
        group=text_of(row, ("task_id", "task")),
        domain="terminal",
        success=outcome(row, meta),
        meta=meta,
        rule="bash",
    )
    if chat.id and row.get("episode") is not None:  # the same trial is written once an episode, each with its prefix
        chat.id = f"{chat.id}/{row['episode']}"
    count_unknown(row, _TERMINUS_KEYS, "", chat.ignored)
    items = list_of(row, "conversations", "a list of {role, content}")
    chat.messages = each_object(items, lambda said: [_terminus(said, chat.ignored)])
    return chat


def _terminus(said: dict[str, Any], ignored: Counter[str]) -> dict[str, Any]:
    count_unknown(said, ("role", "content"), "conversations[].", ignored)
    role, content = said.get("role"), said.get("content")
    marks: dict[str, Any] = acts_in(content) if role == "assistant" else {}
    if role == "user":
        marks = {FAILED: str(content).lstrip().lower().startswith(_REFUSED)}
    return {"role": role, "content": content, **marks}


# ReAct

_STEP = re.compile(r"^\s*(Thought|Action|Observation) ?(\d*) ?: ?")
_ACTION = re.compile(r"^\s*(\w+)\[(.*)\]\s*$", re.DOTALL)
_SECTION = re.compile(r"^(#{5,}|-{5,} ?BEGIN .*|BEGIN TRIAL .*|Trial summary: .*)$")
_SEARCHES = ("search", "lookup", "browse", "open", "click", "visit", "find")


def _is_react(first: dict[str, Any]) -> str:
    text = str(first.get("text", ""))
    known = text.startswith(("Question:", "Thought")) or (bool(_SECTION.match(text)) and "text" in first)
    return "" if known else "no text that begins with 'Question:'"


@told_by(session=_is_react)
def read_react(row: dict[str, Any]) -> Iterator[ChatRow]:
    """A text of ReAct trajectories. The instructions and examples that came before the question are not recorded."""
    lines: list[str] = []
    heading = ""
    for line in cast("Iterable[str]", row.get("events") or ()):
        if not isinstance(line, str):
            raise RowRefused("malformed_field", "is not text", hint="give the file as text, not as JSON")
        if _SECTION.match(line) or line.startswith("Question:"):
            if lines:
                yield _react(lines, heading)
            lines = [line] if line.startswith("Question:") else []
            heading = heading if lines else line
        else:
            lines.append(line)
    if lines:
        yield _react(lines, heading)


def _react(lines: list[str], heading: str) -> ChatRow:
    """One question. Thought and action are one turn; lines that do not begin a step belong to the one before."""
    chat = ChatRow(messages=[], domain="search", rule="search")
    kind, last = "Question", ""
    for line in lines:
        step = _STEP.match(line)
        if line.startswith("Correct answer:"):
            kind = "end"
            chat.meta["answer"] = line.partition(":")[2].strip()
        elif step is None and kind == "end":
            chat.ignored["lines after the answer"] += 1
        elif step is None and chat.messages:
            chat.messages[-1]["content"] += "\n" + line
        elif kind == "Question" and not chat.messages:
            if step is not None:
                chat.messages.append(BrokenMessage("begins without its question", field="Question"))
                break
            chat.messages.append({"role": "user", "content": line})
        elif step is not None:
            last, kind = kind, step[1]
            if kind == "Observation":
                chat.messages.append({"role": "user", "content": line})
            elif kind == "Action" and last == "Thought":
                chat.messages[-1]["content"] += "\n" + line
            else:
                chat.messages.append({"role": "assistant", "content": line})
    for message in chat.messages:
        if isinstance(message, dict) and message["role"] == "assistant":
            message[ACT] = _react_act(message["content"])
    chat.success = _react_outcome(chat, heading)
    return chat


def _react_act(turn: str) -> str:
    action = _ACTION.match(re.sub(r"^.*?Action ?\d* ?: ?", "", turn, flags=re.DOTALL))
    name = action[1].lower() if action else ""
    return "search" if name.startswith(_SEARCHES) else "tool" if name else ""


def _react_outcome(chat: ChatRow, heading: str) -> bool | None:
    last = chat.messages[-1].get("content", "") if chat.messages and isinstance(chat.messages[-1], dict) else ""
    if "Answer is INCORRECT" in last or "HALTED" in heading:
        return False
    return True if "Answer is CORRECT" in last else None
