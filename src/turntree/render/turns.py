"""Prompts that grow turn by turn: what the renderers of templates and of families share.

A conversation R0 A1 R1 A2 R2 ... (A: assistant turns, R: runs of other messages, maybe empty) has the tokens

    head(R0) completion(A1) follow(A1, R1) completion(A2) follow(A2, R2) ...

so a sampled token is never tokenised again, and thoughts stay in the context, even for a model whose own template drops
them.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unicodedata import normalize

from turntree.core.errors import InputError
from turntree.core.messages import Message, whole_characters
from turntree.render.grammar import Constraint, Grammars
from turntree.render.probes import CALL

Ids = tuple[int, ...]
Tools = Sequence[dict[str, Any]]

_REMEMBERED_TOKENS = 2**20


@dataclass(frozen=True)
class Round:
    """An assistant turn (message number `index`) and the run of messages up to the next one."""

    index: int
    turn: Message
    run: tuple[Message, ...]

    @property
    def tied(self) -> bool:
        """Whether the template may look at the turn to render the run: results refer to the calls before them."""
        return bool(self.turn.tool_calls) or any(message.role == "tool" for message in self.run)


def split(messages: Sequence[Message]) -> tuple[tuple[Message, ...], list[Round]]:
    """R0 and the rounds (A1, R1), (A2, R2), ... of a conversation."""
    turns = [index for index, message in enumerate(messages) if message.role == "assistant"]
    ends = [*turns, len(messages)]
    rounds = [
        Round(turn, messages[turn], tuple(messages[turn + 1 : end])) for turn, end in zip(turns, ends[1:], strict=True)
    ]
    return tuple(messages[: ends[0]]), rounds


def key_of(message: Message) -> Hashable:
    """Two messages with the same key render alike (arguments are mappings, which do not hash)."""
    calls = tuple((call.name, json.dumps(call.arguments), call.id) for call in message.tool_calls)
    return message.role, message.content, message.reasoning, calls, message.tool_call_id, message.name


class TurnByTurn(ABC):
    """The part of `core.protocols.Renderer` that both kinds have, and what a gateway asks beside it, which renderers of
    others need not answer. `stop_ids` end a turn; `thinks`: the form has a place for thoughts. Segments that were used
    lately are not written again.

    The law: the prompt of a history is what sampling it turn by turn would have seen.
    """

    stop_ids: frozenset[int]
    thinks: bool

    def __init__(self) -> None:
        self._segments: dict[Hashable, Ids] = {}
        self._held_tokens = 0
        self._grammars: Grammars | None = None

    def begun(self, token_ids: Sequence[int]) -> Message:
        """The beginning of an answer that no further token changes: its text so far, with the whole thought where there
        is a text. Empty where nothing is certain yet, as for a form of which nothing is known."""
        return Message("assistant")

    def text(self, token_ids: Sequence[int]) -> str:
        """What tokens say as they stand, control tokens included."""
        found = self._words()[0].decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(found)

    def constraint(self, schema: dict[str, Any] | None, tools: Sequence[Mapping[str, Any]]) -> Constraint:
        """Lets a policy sample JSON of the schema, or a call of one of the tools, and nothing else. Raises `InputError`
        where that cannot be."""
        if self._grammars is None:
            tokenizer, thought = self._words()
            text = tokenizer.decode(list(self.completion(CALL)[:-1]), skip_special_tokens=False) if tools else ""
            found = Grammars(tokenizer, self.stop_ids, text, thought)
            if not tools:
                return found.constraint(schema, tools)
            self._grammars = found
        return self._grammars.constraint(schema, tools)

    def completion(self, message: Message) -> Ids:
        """Raises `InputError` where what is written is not what a policy can say in one turn: no stop token at its end,
        one before its end, or calls or thoughts that `parse` does not find again."""
        if message.role != "assistant":
            raise InputError(f"a message of role {message.role!r} is not a completion", field="role")
        return self._segment(("said", key_of(message)), lambda: self._say(message))

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> Ids:
        return self._interleave(self._givens(messages, tools), split(messages)[1])

    def extend(
        self, messages: Sequence[Message], new: Sequence[Message], tools: Tools = (), *, stopped: bool = True
    ) -> Ids:
        if not messages or messages[-1].role != "assistant":
            raise InputError("the last message before an extension is not the assistant's", field="messages")
        turns = sum(message.role == "assistant" for message in messages)
        ids = self._interleave(self._givens([*messages, *new], tools, first=turns), split(new)[1])
        return ids if stopped else (*self._closing(messages[-1]), *ids)

    # of the renderer

    @abstractmethod
    def _say(self, message: Message) -> Ids:
        """The tokens of an assistant's turn."""

    @abstractmethod
    def _words(self) -> tuple[Any, tuple[str, str]]:
        """The tokenizer, and the texts that open and close a thought (none: empty)."""

    @abstractmethod
    def _closing(self, message: Message) -> Ids:
        """The tokens that end a turn which the token limit cut."""

    @abstractmethod
    def _givens(self, messages: Sequence[Message], tools: Tools, first: int = 0) -> list[Ids]:
        """Head, follow, follow, ... from number `first` on (the head is number 0)."""

    # segments

    def _segment(self, key: Hashable, build: Callable[[], Ids]) -> Ids:
        if (held := self._segments.get(key)) is not None:
            return held
        ids = build()
        if self._held_tokens > _REMEMBERED_TOKENS:
            self._segments.clear()
            self._held_tokens = 0
        self._segments[key] = ids
        self._held_tokens += len(ids)
        return ids

    def _interleave(self, givens: Sequence[Ids], rounds: Sequence[Round]) -> Ids:
        ids = list(givens[0])
        for part, given in zip(rounds, givens[1:], strict=True):
            ids += self.completion(part.turn)
            ids += given
        return tuple(ids)


def check_complete(
    render: Callable[[Sequence[Message]], object],
    messages: Sequence[Message],
    written: tuple[str, object],
    offset: int = 0,
) -> None:
    """Raise `InputError` for a message (number `offset` + its place) whose content does not change what is written:
    `written` is its text, and what `render` gives of `messages`."""
    text, whole = written
    for place, message in enumerate(messages):
        if message.role == "assistant" or message.content.strip() in text:
            continue
        try:
            without = render([*messages[:place], replace(message, content=""), *messages[place + 1 :]])
        except InputError:  # so the form does look at it
            continue
        if without == whole:
            raise left_out(f"message {offset + place} ({message.role})", "messages")


_HINTS = {
    "tool_calls": "let calls stand outside of a thought that does not end, or name their form with --set "
    "device.renderer.tool_format=hermes, json or none",
    "content": "no policy can say this in this form: put a call into tool_calls, quote it otherwise, or leave it out",
    "reasoning_content": "no policy can say this in this form",
}


def check_read(message: Message, read: Message, *, thinks: bool = True, closed: str = "") -> None:
    """Raise `InputError` where a message is read otherwise than it was said: a demonstration would teach something
    else, and no rollout could match it. `closed` ends a thought, which files may have in the content."""
    said = message.content
    if closed and not message.reasoning and _plain(said.rpartition(closed)[2]) == _plain(read.content):
        said = read.content
    for field, meant, found in (
        ("tool_calls" if message.tool_calls else "content", calls_of(message), calls_of(read)),
        ("content", _plain(said), _plain(read.content)),
        ("reasoning_content", _plain(message.reasoning), _plain(read.reasoning)),
    ):
        if meant != found and (thinks or field != "reasoning_content"):
            problem = f"is read as {found!r:.80} where the message has {meant!r:.80}"
            raise InputError(problem, field=field, hint=_HINTS[field])


def without_thoughts(text: str, opened: str, closed: str) -> str:
    """`opened` is empty where a prompt has begun the first thought."""
    mark = opened or closed.replace("/", "", 1)
    return re.sub(rf"{re.escape(mark)}.*?(?:{re.escape(closed)}|\Z)", "", text, flags=re.DOTALL) if mark else text


def calls_of(message: Message) -> list[str]:
    """Comparable as JSON: in Python, 1 equals true."""
    return [f"{call.name} {json.dumps(call.arguments, sort_keys=True)}" for call in message.tool_calls]


def _plain(text: str) -> str:
    """Without what templates (white space at the ends) and tokenizers (the composition of letters) may change."""
    return normalize("NFC", whole_characters(text)).strip()


def left_out(what: str, field: str) -> InputError:
    hint = "use a template that renders this, or put it into the content of a message that is rendered"
    return InputError(f"the chat template leaves out {what}", field=field, hint=hint)
