"""ReAct: a text of "Question:", "Thought 1:", "Action 1: Search[...]", "Observation 1:". Every search-related step is a
candidate (PivotRL, appendix A.2).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, cast

from turntree.core.errors import InputError
from turntree.traces.formats.row import ACT, BrokenMessage, ChatRow, told_by

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
            raise InputError("is not text", hint="give the file as text, not as JSON")
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
    chat = ChatRow(domain="search", rule="search")
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
