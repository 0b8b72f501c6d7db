"""Thoughts of earlier turns: kept as they were sampled, or shown as the model's own template shows them.

Many families drop a thought once its turn is over (DeepSeek-R1), or once a new question comes (Qwen3, GLM, gpt-oss).
Served by such a template, a model never sees what it thought before. With thoughts="model" neither does a policy in a
rollout: where a thought would be dropped, the *context is rewritten*. The next prompt is then the model's own rendering
of the whole conversation, which does not extend the tokens so far, and the rollout's tree branches there
(docs/design/architecture.md). Between two such places nothing that was sampled is tokenised again.

Where a context is rewritten depends on roles and calls only, never on what the policy said: a made-up conversation of
the same shape, with a thought in every turn, is rendered and searched for them.
"""

from __future__ import annotations

import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, Literal

from turntree.core.errors import InputError
from turntree.core.messages import Message
from turntree.renderers.probes import ASK, CALL, RESULT, SAY, TOOL

Ids = tuple[int, ...]
Tools = Sequence[dict[str, Any]]
Thoughts = Literal["keep", "model"]

_TAGGED = re.compile(r"\s*(<\w+>).*(</\w+>)\s*", re.DOTALL)  # Qwen takes results for results in a user's message too
_REMEMBERED_SHAPES = 4096


class TurnByTurn(ABC):
    """Prompts that grow turn by turn, and where they are rewritten instead: the part of `core.protocols.Renderer` that
    the renderers of templates and of families share.

    The law (tests/renderers/test_thoughts.py): the prompt of a history is what sampling it turn by turn would have
    seen, with either setting.
    """

    def __init__(self, thoughts: Thoughts) -> None:
        self.thoughts: Thoughts = thoughts
        self._dropped: dict[Hashable, frozenset[int]] = {}

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

    @property
    def rewrites(self) -> bool:
        """Whether a thought is ever dropped, seen on a tool loop that a question follows."""
        return self._rewritten_at([ASK, CALL, RESULT, SAY, ASK], ()) is not None

    # of the renderer

    @property
    @abstractmethod
    def thinks(self) -> bool:
        """Whether its form has a place for thoughts."""

    @abstractmethod
    def completion(self, message: Message) -> Ids: ...

    @abstractmethod
    def whole(self, messages: Sequence[Message], tools: Tools = ()) -> Ids:
        """The model's own rendering of a conversation at once, with the opening of the next turn."""

    @abstractmethod
    def written(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        """Its text."""

    @abstractmethod
    def _grown(self, messages: Sequence[Message], tools: Tools) -> Ids:
        """The prompt by segments, with all thoughts."""

    @abstractmethod
    def _follow_on(self, messages: Sequence[Message], new: Sequence[Message], tools: Tools, *, stopped: bool) -> Ids:
        """What follows the sampled turn `messages[-1]`, by segments."""

    # where it is rewritten

    def _rewritten_at(self, messages: Sequence[Message], tools: Tools, after: int = 0) -> int | None:
        """The last place (a number of messages, more than `after`) at which the prompt drops a thought that the prompt
        before it had."""
        if self.thoughts == "keep" or not self.thinks:
            return None
        shape, named = tuple(map(_shape, messages)), bool(tools)
        ends = [*(place for place, message in enumerate(messages) if message.role == "assistant"), len(messages)]
        for now, before in itertools.pairwise(reversed(ends)):
            if now <= after:
                return None
            if self._drops(shape[:now], named) != self._drops(shape[:before], named):
                return now
        return None

    def _drops(self, shape: tuple[Hashable, ...], tools: bool) -> frozenset[int]:
        """The turns whose thoughts are not in the prompt of a conversation of this shape."""
        key = (shape, tools)
        if key not in self._dropped:
            if len(self._dropped) >= _REMEMBERED_SHAPES:
                self._dropped.clear()
            self._dropped[key] = self._looked_up(shape, tools)
        return self._dropped[key]

    def _looked_up(self, shape: tuple[Any, ...], tools: bool) -> frozenset[int]:
        messages = _conversation(shape)
        thoughts = {place: message.reasoning for place, message in enumerate(messages) if message.reasoning}
        text = self.written(messages, [TOOL] if tools else ()) if thoughts else ""
        return frozenset(place for place, thought in thoughts.items() if thought not in text)


def _shape(message: Message) -> Hashable:
    tagged = _TAGGED.fullmatch(message.content) if message.role != "assistant" else None
    return message.role, len(message.tool_calls), tagged.groups() if tagged else ()


def _conversation(shape: Sequence[tuple[str, int, tuple[str, ...]]]) -> list[Message]:
    """A made-up conversation of this shape, with another thought in every turn."""
    messages: list[Message] = []
    unanswered: list[str | None] = []
    for place, (role, calls, tags) in enumerate(shape):
        if role == "assistant":
            made = [replace(CALL.tool_calls[0], id=f"call{100 * place + number:05}") for number in range(calls)]
            turn, unanswered = (replace(CALL, tool_calls=tuple(made)) if calls else SAY), [call.id for call in made]
            messages.append(replace(turn, reasoning=f"Hm, {place} left."))
            continue
        of = RESULT if role == "tool" else replace(ASK, role=role)
        if role == "tool" and unanswered:
            of = replace(of, tool_call_id=unanswered.pop(0))
        messages.append(replace(of, content=of.content.join(tags)) if tags else of)
    return messages
