"""Chat messages in tokens, through the tokenizer's own chat template, one segment at a time."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from turntree.core.errors import InputError
from turntree.core.messages import Message
from turntree.core.parts import described_by
from turntree.renderers.rounds import Round, split
from turntree.renderers.segments import SegmentedTemplate, Tools, whole_characters
from turntree.renderers.thoughts import Thoughts, TurnByTurn
from turntree.renderers.tool_calls import ToolFormat, detect_format, parse_message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = tuple[int, ...]

_REMEMBERED_TOKENS = 2**20


@dataclass(frozen=True)
class Options:
    """Options of the renderer of chat templates."""

    tool_format: ToolFormat | None = None
    """How the policy writes tool calls: hermes, json, none (default: as its chat template does)."""
    thoughts: Thoughts = "keep"
    """Thoughts of earlier turns: all stay in the context (keep), or those that the model's own template keeps
    (model)."""


@described_by(Options)
class ChatRenderer(TurnByTurn):
    """`core.protocols.Renderer` over `tokenizer.apply_chat_template`.

    Segments (see `segments`) are tokenised one by one and concatenated, so that the tokens of a demonstrated history
    are those that sampling it turn by turn would have produced:

        prompt(m[:k]) + completion(m[k]) + extend(m[:k+1], m[k+1:k+2]) == prompt(m[:k+2])   for an assistant's m[k]

    and with `thoughts` "model" up to where the template drops a thought (`thoughts.TurnByTurn`). `tool_format` says how
    the policy writes tool calls (None: as its template does). `described` names all that decides
    the tokens beside the tokenizer and its template. Raises `InputError` for a
    template that cannot be sampled turn by turn, and for messages that it leaves out or would later rewrite.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        tool_format: ToolFormat | None = None,
        thoughts: Thoughts = "keep",
    ) -> None:
        super().__init__(thoughts)
        self._tokenizer = tokenizer
        self._template = SegmentedTemplate(tokenizer)
        found = detect_format(str(tokenizer.chat_template))
        self._tool_format: ToolFormat = tool_format or found
        self.described = "template" if self._tool_format == found else f"template {self._tool_format}"
        self.described += "" if thoughts == "keep" else f" thoughts {thoughts}"
        self._segments = Recent(_REMEMBERED_TOKENS)
        eos = cast("int | None", tokenizer.eos_token_id)
        self._stop_ids = frozenset(self._template.stops.values()) | ({eos} if eos is not None else frozenset())

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end an assistant turn: those that the template writes, and the end of the sequence."""
        return self._stop_ids

    @property
    def thinks(self) -> bool:
        return self._template.thought is not None

    def whole(self, messages: Sequence[Message], tools: Tools = ()) -> Ids:
        return self._encode(self._template.whole(messages, tools))

    def written(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        return self._template.render(messages, tools)

    def _grown(self, messages: Sequence[Message], tools: Tools) -> Ids:
        _, rounds = split(messages)
        return self._interleave(self._givens(messages, tools), [part.turn for part in rounds])

    def completion(self, message: Message) -> Ids:
        """Raises `InputError` where the template's rendering of the message is not what a policy can say: no stop
        token at its end, one before its end, or tool calls that `parse` does not find again."""
        if message.role != "assistant":
            raise InputError(f"a message of role {message.role!r} is not a completion", field="role")
        return self._segments.get(("said", key_of(message)), lambda: self._say(message))

    def _follow_on(self, messages: Sequence[Message], new: Sequence[Message], tools: Tools, *, stopped: bool) -> Ids:
        _, rounds = split(new)
        turns = sum(message.role == "assistant" for message in messages)
        ids = self._interleave(self._givens([*messages, *new], tools, first=turns), [part.turn for part in rounds])
        return ids if stopped else (self._closing(messages[-1]), *ids)

    def parse(self, token_ids: Sequence[int], tools: Tools = ()) -> Message:
        ids = list(token_ids)
        if ids and ids[-1] in self._stop_ids:
            ids.pop()
        reasoning, said = self._thought(self._decode(ids))
        return replace(parse_message(said.removeprefix(self._template.lead), self._tool_format), reasoning=reasoning)

    # segments

    def _thought(self, text: str) -> tuple[str, str]:
        """The reasoning that a sampled text begins with, and what is said after it."""
        if self._template.thought is None:
            return "", text
        opened, closed = self._template.thought
        if not text.lstrip().startswith(opened) or closed not in text:
            return "", text
        reasoning, _, said = text.lstrip().removeprefix(opened).partition(closed)
        return reasoning.strip("\n"), said.lstrip("\n")

    def _givens(self, messages: Sequence[Message], tools: Tools, first: int = 0) -> list[Ids]:
        """Token ids of head, follow, follow, ... from number `first` on. They are rendered without reasoning, because a
        template that drops earlier thoughts would rewrite sampled tokens; the sampled thoughts stay."""
        messages = [replace(message, reasoning="") if message.reasoning else message for message in messages]
        if not self._template.is_local(messages, tools):
            texts = self._template.cut(messages, tools)[first:]
            return [self._segments.get(("text", text), lambda text=text: self._encode(text)) for text in texts]
        run, rounds = split(messages)
        givens = [self._follow(part) for part in rounds[max(first - 1, 0) :]]
        return givens if first else [self._head(run, tools), *givens]

    def _head(self, run: Sequence[Message], tools: Tools) -> Ids:
        key = ("head", tuple(map(key_of, run)), json.dumps(list(tools)) if tools else "")
        return self._segments.get(key, lambda: self._encode(self._template.head(run, tools)))

    def _follow(self, part: Round) -> Ids:
        key = ("follow", key_of(part.turn) if part.tied else None, tuple(map(key_of, part.run)))
        return self._segments.get(key, lambda: self._encode(self._template.follow(part)))

    def _interleave(self, givens: Sequence[Ids], turns: Sequence[Message]) -> Ids:
        ids = list(givens[0])
        for turn, given in zip(turns, givens[1:], strict=True):
            ids += self.completion(turn)
            ids += given
        return tuple(ids)

    def _say(self, message: Message) -> Ids:
        said = self._template.said(message)
        ids = self._encode(said.text)
        if not self._stop_ids.isdisjoint(ids):
            raise InputError(
                f"the assistant's {message.content[:40]!r} holds a stop token, after which no policy goes on",
                field="content",
                hint="remove the token",
            )
        ids = (*ids, self._template.stops[said.stop])
        if message.tool_calls and self._tool_format != "none" and _calls(self.parse(ids)) != _calls(message):
            raise InputError(
                f"the calls of an assistant message are not found again in {said.text[:80]!r}",
                field="tool_calls",
                hint=f"the template does not write calls in the format {self._tool_format!r}; "
                "give the right one with --set device.renderer.tool_format=hermes, json or none",
            )
        return ids

    def _closing(self, message: Message) -> int:
        """The stop token that ends a turn cut by length."""
        stops = self._template.stops
        usual = next(iter(stops.values()))
        return stops[self._template.said(message).stop] if message.tool_calls and len(stops) > 1 else usual

    def _encode(self, text: str) -> Ids:
        return tuple(self._tokenizer.encode(whole_characters(text), add_special_tokens=False))

    def _decode(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return cast(str, text)


class Recent:
    """A cache of the segments used last, up to a total number of tokens."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens, self._tokens = max_tokens, 0
        self._held: OrderedDict[Hashable, Ids] = OrderedDict()

    def get(self, key: Hashable, build: Callable[[], Ids]) -> Ids:
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        ids = self._held[key] = build()
        self._tokens += len(ids)
        while self._tokens > self._max_tokens:
            self._tokens -= len(self._held.popitem(last=False)[1])
        return ids


def key_of(message: Message) -> Hashable:
    """Two messages with the same key render alike (arguments are mappings, which do not hash)."""
    calls = tuple((call.name, json.dumps(call.arguments), call.id) for call in message.tool_calls)
    return message.role, message.content, message.reasoning, calls, message.tool_call_id, message.name


def _calls(message: Message) -> list[object]:
    return [(call.name, call.arguments) for call in message.tool_calls]
