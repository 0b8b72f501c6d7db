"""Thoughts of earlier turns: kept as they were sampled, or shown as the model's own template shows them.

Many families drop a thought once its turn is over (DeepSeek-R1), or once a new question comes (Qwen3, GLM, gpt-oss).
Served by such a template, a model never sees what it thought before. With thoughts="model" neither does a policy in a
rollout: where a thought would be dropped, the *context is rewritten*. The next prompt is then the model's own rendering
of the whole conversation, which does not extend the tokens so far, and the rollout's tree branches there
(docs/design/architecture.md). Between two such places nothing that was sampled is tokenised again.

Where a context is rewritten depends on roles, calls and where there is a thought, never on what the policy said: a
made-up conversation of the same shape is rendered, and the prompts of two turns are compared.
"""

from __future__ import annotations

import itertools
import json
import re
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, TypeGuard

from turntree.core.errors import InputError
from turntree.core.messages import Message
from turntree.core.protocols import Renderer, RewritingRenderer
from turntree.render.probes import ASK, CALL, RESULT, SAY, TOOL

Ids = tuple[int, ...]
Tools = Sequence[dict[str, Any]]
Thoughts = Literal["keep", "model"]

_TAGGED = re.compile(r"\s*(<\w+>).*(</\w+>)\s*", re.DOTALL)  # Qwen takes results for results in a user's message too
_REMEMBERED_SHAPES, _REMEMBERED_TOKENS = 4096, 2**20


def whole_prompt(renderer: Renderer, said: Sequence[Message], new: Sequence[Message], tools: Tools) -> Ids | None:
    """The prompt after `new` messages where it is another context than that of `said`; None where that is extended."""
    return renderer.rewritten(said, new, tools) if rewrites(renderer) else None


def rewrites(renderer: Renderer) -> TypeGuard[RewritingRenderer]:
    """Whether the renderer may rewrite the context of a rollout."""
    return bool(getattr(renderer, "rewrites", False))


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


class TurnByTurn(ABC):
    """Prompts that grow turn by turn, and where they are rewritten instead: the part of `core.protocols.Renderer` that
    the renderers of templates and of families share. `stop_ids` end a turn; `thinks`: the form has a place for
    thoughts. Segments that were used lately are not written again.

    The law (tests/render/test_thoughts.py): the prompt of a history is what sampling it turn by turn would have
    seen, with either setting.
    """

    stop_ids: frozenset[int]
    thinks: bool

    def __init__(self, thoughts: Thoughts) -> None:
        self.thoughts: Thoughts = thoughts
        self._seen: dict[Hashable, bool] = {}
        self._segments = Recent(_REMEMBERED_TOKENS)

    def completion(self, message: Message) -> Ids:
        """Raises `InputError` where what is written is not what a policy can say in one turn: no stop token at its end,
        one before its end, or calls or thoughts that `parse` does not find again."""
        if message.role != "assistant":
            raise InputError(f"a message of role {message.role!r} is not a completion", field="role")
        return self._segments.get(("said", key_of(message)), lambda: self._say(message))

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> Ids:
        end = self._rewritten_at(messages, tools)
        if end is None:
            return self._grown(messages, tools)
        ids = self.whole(messages[:end], tools)
        if end == len(messages):
            return ids
        said = self.completion(messages[end])
        return (*ids, *said, *self._follow_on(messages[: end + 1], messages[end + 1 :], tools, stopped=True))

    def extend(
        self, messages: Sequence[Message], new: Sequence[Message], tools: Tools = (), *, stopped: bool = True
    ) -> Ids:
        """Raises `InputError` where the context is rewritten (`rewritten`)."""
        if not messages or messages[-1].role != "assistant":
            raise InputError("the last message before an extension is not the assistant's", field="messages")
        if self._rewritten_at((*messages, *new), tools, after=len(messages) - 1) is not None:
            raise InputError("the context is rewritten here, so nothing extends it", field="renderer.thoughts")
        return self._follow_on(messages, new, tools, stopped=stopped)

    def rewritten(self, messages: Sequence[Message], new: Sequence[Message], tools: Tools = ()) -> Ids | None:
        """`core.protocols.RewritingRenderer`."""
        after = (*messages, *new)
        return None if self._rewritten_at(after, tools, after=len(messages) - 1) is None else self.prompt(after, tools)

    @cached_property
    def rewrites(self) -> bool:
        """Whether a thought is ever dropped, seen on a tool loop that a question follows."""
        call, say = replace(CALL, reasoning="Hm."), replace(SAY, reasoning="Hm.")
        return self._rewritten_at([ASK, call, RESULT, say, ASK], ()) is not None

    @cached_property
    def _speaks_beside_calls(self) -> bool:
        try:
            return bool(self.completion(replace(CALL, content=SAY.content)))
        except InputError:
            return False

    # of the renderer

    @abstractmethod
    def _say(self, message: Message) -> Ids:
        """The tokens of an assistant's turn."""

    @abstractmethod
    def _head(self, run: Sequence[Message], tools: Tools) -> Ids:
        """What stands before the first assistant turn."""

    @abstractmethod
    def whole(self, messages: Sequence[Message], tools: Tools = ()) -> Ids:
        """The model's own rendering of a conversation at once, with the opening of the next turn."""

    @abstractmethod
    def written(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        """Its text."""

    @abstractmethod
    def _decode(self, ids: Sequence[int]) -> str: ...

    @abstractmethod
    def _grown(self, messages: Sequence[Message], tools: Tools) -> Ids:
        """The prompt by segments, with all thoughts."""

    @abstractmethod
    def _follow_on(self, messages: Sequence[Message], new: Sequence[Message], tools: Tools, *, stopped: bool) -> Ids:
        """What follows the sampled turn `messages[-1]`, by segments."""

    # segments

    def _opening_of(self, run: Sequence[Message], tools: Tools) -> Ids:
        key = ("head", tuple(map(key_of, run)), json.dumps(list(tools)) if tools else "")
        return self._segments.get(key, lambda: self._head(run, tools))

    def _interleave(self, givens: Sequence[Ids], turns: Sequence[Message]) -> Ids:
        ids = list(givens[0])
        for turn, given in zip(turns, givens[1:], strict=True):
            ids += self.completion(turn)
            ids += given
        return tuple(ids)

    # where it is rewritten

    def _rewritten_at(self, messages: Sequence[Message], tools: Tools, after: int = 0) -> int | None:
        """The last place (a number of messages, more than `after`) at which the prompt does not go on from the prompt
        before it and the turn that was said there."""
        if self.thoughts == "keep" or not self.thinks:
            return None
        shape = tuple(map(_shape, messages))
        ends = [*(place for place, message in enumerate(messages) if message.role == "assistant"), len(messages)]
        for now, before in itertools.pairwise(reversed(ends)):
            if now <= after:
                return None
            if not self._goes_on(shape[:now], before, bool(tools)):
                return now
        return None

    def _goes_on(self, shape: tuple[Any, ...], turn: int, tools: bool) -> bool:
        """Whether the prompt of a conversation of this shape begins with the one at its message `turn`, and that."""
        key = (shape, turn, tools)
        if key not in self._seen:
            if len(self._seen) >= _REMEMBERED_SHAPES:
                self._seen.clear()
            messages, declared = _conversation(shape, beside=self._speaks_beside_calls), [TOOL] if tools else []
            said = self._decode(self.completion(messages[turn]))
            before, now = self.written(messages[:turn], declared), self.written(messages, declared)
            self._seen[key] = now.startswith(before + said)
        return self._seen[key]


def _shape(message: Message) -> Hashable:
    if message.role == "assistant":
        # Gemma 4 moves what is said beside calls behind their results
        return (
            message.role,
            len(message.tool_calls),
            (bool(message.reasoning), bool(message.tool_calls and message.content.strip())),
        )
    tagged = _TAGGED.fullmatch(message.content)
    return message.role, 0, tagged.groups() if tagged else ()


def _conversation(shape: Sequence[tuple[str, int, Any]], *, beside: bool) -> list[Message]:
    """A made-up conversation of this shape. `beside`: something may be said beside calls."""
    messages: list[Message] = []
    unanswered: list[str | None] = []
    for place, (role, calls, more) in enumerate(shape):
        if role == "assistant":
            made = [replace(CALL.tool_calls[0], id=f"call{100 * place + number:05}") for number in range(calls)]
            thinks, speaks = more
            content = SAY.content if not calls or (speaks and beside) else ""
            unanswered = [call.id for call in made]
            reasoning = f"Hm, {place} left." if thinks else ""
            messages.append(Message("assistant", content, tuple(made), reasoning=reasoning))
            continue
        of = RESULT if role == "tool" else replace(ASK, role=role)
        if role == "tool" and unanswered:
            of = replace(of, tool_call_id=unanswered.pop(0))
        messages.append(replace(of, content=of.content.join(more)) if more else of)
    return messages
