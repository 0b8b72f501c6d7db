"""Check a renderer on test turns and tool loops: which messages of agents it supports."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from turntree.core.errors import InputError
from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import Renderer
from turntree.render.choice import written
from turntree.render.families import FamilyRenderer
from turntree.render.probes import ASK, BRIEF, CALL, RESULT, SAY, SECOND_RESULT, TWO_CALLS
from turntree.render.turns import check_read, split

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TYPES = {"text": "string", "whole": "integer", "real": "number", "flag": "boolean", "nothing": "null"}
_SCHEMA = {"at": "string", **_TYPES, "many": "array", "inner": "object"}
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a thing.",
        "parameters": {
            "type": "object",
            "properties": {key: {"type": kind} for key, kind in _SCHEMA.items()},
            "required": ["at"],
        },
    },
}
_ODD = {
    "at": "a map",
    "text": "true",
    "whole": -7,
    "real": 2.5,
    "flag": False,
    "nothing": None,
    "many": [1, "two", {"three": []}],
    "inner": {"deep": {"er": "x"}, "on": True},
}
_THINKING_CALL = replace(CALL, reasoning="There is a map.\nLook at it.")

TURNS: dict[str, Message] = {
    "text": SAY,
    "one call": CALL,
    "text and a call": replace(CALL, content="I look."),
    "calls side by side": TWO_CALLS,
    "every JSON type": replace(CALL, tool_calls=(ToolCall("look", _ODD, "call00001"),)),
    "reasoning": replace(SAY, reasoning="Left or right?\nLeft, then."),
    "reasoning and a call": _THINKING_CALL,
}
_LOOP = [BRIEF, ASK, CALL, RESULT, CALL, RESULT]
TALK, LOOP = "talk of three turns", "loop of three turns"
LOOPS: dict[str, list[Message]] = {
    TALK: [ASK, SAY, replace(ASK, content="And now?"), SAY, ASK, SAY],
    LOOP: [*_LOOP, SAY],
    "loop with reasoning": [BRIEF, ASK, _THINKING_CALL, RESULT, _THINKING_CALL, RESULT, TURNS["reasoning"]],
    "loop side by side": [BRIEF, ASK, TWO_CALLS, RESULT, SECOND_RESULT, CALL, RESULT, SAY],
    "a second question": [*_LOOP, TURNS["reasoning"], replace(ASK, content="And now?"), SAY],
}


@dataclass(frozen=True)
class Finding:
    """`works`, and in `said` why not, or a remark on what works."""

    case: str
    works: bool
    said: str = ""


def examine(renderer: Renderer, tokenizer: PreTrainedTokenizerBase) -> list[Finding]:
    """One finding a case, in the order of `TURNS` and `LOOPS`."""
    findings = [_tried(case, lambda turn=turn: turn_law(renderer, turn)) for case, turn in TURNS.items()]
    for case, messages in LOOPS.items():
        findings.append(_tried(case, lambda messages=messages: loop_law(renderer, tokenizer, messages)))
    return findings


def shown(renderer: Renderer, tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> str:
    """The text of a conversation as the policy sees it; its own turns are between » and «."""
    (first, rounds), tools = split(messages), _tools(messages)
    try:
        text = _decode(tokenizer, renderer.prompt(first, tools))
        for part in rounds:
            text += f"»{_decode(tokenizer, renderer.completion(part.turn))}«"
            if part.run:
                text += _decode(tokenizer, renderer.extend(messages[: part.index + 1], part.run, tools))
    except InputError as error:
        return f"cannot be shown: {error}"
    return text


def _tried(case: str, law: Callable[[], str]) -> Finding:
    try:
        return Finding(case, True, law())
    except (InputError, AssertionError) as error:
        return Finding(case, False, " ".join(str(error).split()))


def turn_law(renderer: Renderer, turn: Message) -> str:
    """A turn ends with its only stop token, and what is read in it is the turn. Raises `AssertionError` naming the
    difference, and `InputError` where the renderer refuses it."""
    ids = renderer.completion(turn)
    if ids[-1] not in renderer.stop_ids or not renderer.stop_ids.isdisjoint(ids[:-1]):
        raise AssertionError("does not end with its only stop token")
    read = renderer.parse(ids, [LOOK])
    left_out = bool(turn.reasoning and not read.reasoning)
    check_read(turn, read, thinks=not left_out)
    return "left out: the form has no place for it" if left_out else ""


def loop_law(renderer: Renderer, tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> str:
    """Check that a conversation has the same tokens turn by turn and as a whole; returns how the folder's own template
    renders the whole."""
    (first, rounds), tools = split(messages), _tools(messages)
    ids = renderer.prompt(first, tools)
    for part in rounds:
        if renderer.prompt(messages[: part.index], tools) != ids:
            raise AssertionError(f"the prompt of turn {part.index} is not what sampling up to there saw")
        ids += renderer.completion(part.turn)
        if part.run:
            ids += renderer.extend(messages[: part.index + 1], part.run, tools)
    before = messages[: rounds[-1].index]
    ids, whole = renderer.prompt(before, tools), written(tokenizer, before, tools)
    if whole is None and isinstance(renderer, FamilyRenderer):
        whole = renderer.written(before, tools)
    if whole is None:
        return "there is no template to compare with"
    ours = _decode(tokenizer, ids)
    if ours == whole or list(ids) == tokenizer.encode(whole, add_special_tokens=False):
        return ""
    if "".join(ours.split()) == "".join(whole.split()):
        return "white space is not all as the template writes it"
    ours, whole = _thoughtless(ours), _thoughtless(whole)
    if ours == whole:
        return "thoughts stay that the template drops"
    at = next((place for place, (a, b) in enumerate(zip(ours, whole, strict=False)) if a != b), 0)
    around = slice(max(at - 12, 0), at + 12)
    return f"has {ours[around]!r} where the template has {whole[around]!r}"


def _tools(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [LOOK] if any(message.tool_calls for message in messages) else []


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _thoughtless(text: str) -> str:
    """Without thoughts, empty ones too, and without white space."""
    for thought in (r"<think>.*?</think>", r"<\|channel>thought.*?<channel\|>", r"</?think>", r"\s+"):
        text = re.sub(thought, "", text, flags=re.DOTALL)
    return text
