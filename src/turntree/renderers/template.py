"""Chat messages in tokens, through the tokenizer's own chat template, one segment at a time."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from turntree.core.errors import InputError
from turntree.core.messages import Message
from turntree.renderers.segments import SegmentedTemplate
from turntree.renderers.tool_calls import ToolFormat, detect_format, parse_message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = tuple[int, ...]

_CACHED_SEGMENTS = 2**15


class ChatRenderer:
    """`core.protocols.Renderer` over `tokenizer.apply_chat_template`.

    Segments (see `segments`) are tokenised one by one and concatenated, so that the tokens of a demonstrated history
    are those that sampling it turn by turn would have produced:

        prompt(m[:k]) + completion(m[k]) + extend(m[:k+1], [m[k+1]]) == prompt(m[:k+2])   where m[k] is an assistant's

    `tool_format` says how the policy writes tool calls (by default found in the template). Raises `InputError` for a
    template without a generation prompt, and for messages that the template would render differently later.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, tool_format: ToolFormat | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = SegmentedTemplate(tokenizer)
        source = tokenizer.chat_template
        self._tool_format = tool_format or detect_format(source if isinstance(source, str) else str(source))
        self._stops = {text: self._tokens(text)[0] for text in self._template.stops}
        eos = tokenizer.eos_token_id
        self._stop_ids = frozenset([*self._stops.values(), *([] if eos is None else [eos])])
        self._completions = _Recent(self._new_completion)
        self._heads = _Recent(self._new_head)
        self._follows = _Recent(self._new_follow)

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end an assistant turn: those that the template writes, and the end of the sequence."""
        return self._stop_ids

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> Ids:
        turns = _turns(messages)
        if not self._template.is_local(messages, tools):
            givens = [self._tokens(text) for text in self._template.givens(messages, tools)]
        else:
            first = turns[0] if turns else len(messages)
            givens = [self._heads(messages[:first], tools), *self._local_follows(messages)]
        ids = list(givens[0])
        for turn, given in zip(turns, givens[1:], strict=True):
            ids += self.completion(messages[turn])
            ids += given
        return tuple(ids)

    def completion(self, message: Message) -> Ids:
        if message.role != "assistant":
            raise InputError(f"a message of role {message.role!r} is no completion", field="role")
        return self._completions(message)

    def extend(
        self,
        messages: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        stopped: bool = True,
    ) -> Ids:
        if not messages or messages[-1].role != "assistant":
            raise InputError("the last message before an extension is not the assistant's", field="messages")
        if self._template.is_local([*messages, *new], tools):
            tail = [messages[-1], *new]
            givens = self._local_follows(tail, offset=len(messages) - 1)
        else:
            tail = [messages[-1], *new]
            texts = self._template.givens([*messages, *new], tools)
            givens = [self._tokens(text) for text in texts[-len(_turns(tail)) :]]
        ids = list(givens[0]) if stopped else [self._closing(messages[-1]), *givens[0]]
        for turn, given in zip(_turns(tail)[1:], givens[1:], strict=True):
            ids += self.completion(tail[turn])
            ids += given
        return tuple(ids)

    def parse(self, token_ids: Sequence[int]) -> Message:
        ids = list(token_ids)
        if ids and ids[-1] in self._stop_ids:
            ids.pop()
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return parse_message(text, self._tool_format)

    # segments

    def _local_follows(self, messages: Sequence[Message], offset: int = 0) -> list[Ids]:
        turns = _turns(messages)
        ends = [*turns, len(messages)][1:]
        return [
            self._follows(messages[turn], messages[turn + 1 : end], offset + turn)
            for turn, end in zip(turns, ends, strict=True)
        ]

    def _closing(self, message: Message) -> int:
        """The stop token that ends a turn cut by length."""
        return self._completions(message)[-1] if message.tool_calls else self._stops[self._template.stop]

    def _new_completion(self, message: Message) -> tuple[Hashable, Callable[[], Ids]]:
        def build() -> Ids:
            said = self._template.said(message)
            ids = self._tokens(said.text)
            if not self._stop_ids.isdisjoint(ids):
                raise InputError(
                    f"the assistant message {message.content[:40]!r} contains a stop token, after which nothing is said",
                    field="content",
                    hint="remove the token from the trace",
                )
            return (*ids, self._stops[said.stop])

        return _key(message), build

    def _new_head(self, run: Sequence[Message], tools: Sequence[dict[str, Any]]) -> tuple[Hashable, Callable[[], Ids]]:
        key = (tuple(map(_key, run)), json.dumps(list(tools)))
        return key, lambda: self._tokens(self._template.head(run, tools))

    def _new_follow(self, turn: Message, run: Sequence[Message], index: int) -> tuple[Hashable, Callable[[], Ids]]:
        tied = turn.tool_calls or any(message.role == "tool" for message in run)
        key = (_key(turn) if tied else None, tuple(map(_key, run)))
        return key, lambda: self._tokens(self._template.follow(turn, run, index))

    def _tokens(self, text: str) -> Ids:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


class _Recent:
    """Remembers the segments used last. `describe` gives the key of a segment and how to build it."""

    def __init__(self, describe: Callable[..., tuple[Hashable, Callable[[], Ids]]]) -> None:
        self._describe = describe
        self._held: OrderedDict[Hashable, Ids] = OrderedDict()

    def __call__(self, *arguments: Any) -> Ids:
        key, build = self._describe(*arguments)
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        ids = self._held[key] = build()
        if len(self._held) > _CACHED_SEGMENTS:
            self._held.popitem(last=False)
        return ids


def _key(message: Message) -> Hashable:
    """Equal exactly for equal renderings' sources (arguments are mappings, which do not hash)."""
    calls = tuple((call.name, json.dumps(call.arguments), call.id) for call in message.tool_calls)
    return message.role, message.content, calls, message.tool_call_id, message.name


def _turns(messages: Sequence[Message]) -> list[int]:
    return [index for index, message in enumerate(messages) if message.role == "assistant"]
