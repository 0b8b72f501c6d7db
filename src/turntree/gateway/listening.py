"""What is drawn for one request while it is drawn: its stop texts, its form, and the text that a stream may send."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from turntree.core.messages import Message
from turntree.core.protocols import Renderer
from turntree.gateway.calls import Call, Tools
from turntree.render.grammar import Constraint
from turntree.render.turns import TurnByTurn

_PAUSE = 0.05  # seconds in which drawn tokens are gathered before their text is read again


class Listener:
    """Hears what is drawn for one request, and tells in the event loop what of its text is certain: no call, thought or
    stop text can still take it back."""

    def __init__(self, renderer: TurnByTurn, stop: tuple[str, ...]) -> None:
        self._renderer, self._stop = renderer, stop
        self._ids: Sequence[int] = ()  # the engine's thread adds to them
        self._sent, self._pause = 0, _PAUSE
        self.call: Call | None = None  # once it is placed

    def hear(self, ids: Sequence[int]) -> None:
        """From the engine's thread: the tokens so far, which grow."""
        self._ids = ids

    async def more(self, work: asyncio.Task[Any]) -> Message | None:
        """The certain text, once there is more of it than before; None where `work` is done first."""
        read = 0
        while not (await asyncio.wait({work}, timeout=self._pause))[0]:
            if len(ids := tuple(self._ids)) > read:
                read, started = len(ids), time.perf_counter()
                said = self._certain(ids)
                self._pause = max(_PAUSE, 10 * (time.perf_counter() - started))  # a long answer leaves others room
                if len(said.content) > self._sent:
                    self._sent = len(said.content)
                    return said
        return None

    def _certain(self, ids: tuple[int, ...]) -> Message:
        said, found = cut_at(self._renderer.begun(ids), self._stop)
        text = said.content
        if found is None:
            halves = (k for stop in self._stop for k in range(len(stop) - 1, 0, -1) if text.endswith(stop[:k]))
            text = text[: len(text) - max(halves, default=0)]
        return replace(said, content=text)


class RequestGuide:
    """`core.completion.Guide` of one request: its stop texts, its form, and who listens."""

    def __init__(
        self,
        renderer: Renderer,
        tools: Tools,
        stop: tuple[str, ...],
        restriction: Constraint | None,
        listener: Listener | None,
    ) -> None:
        self.stop, self.grammar = stop, restriction and restriction.grammar
        self._renderer, self._tools, self._restriction, self._listener = renderer, tools, restriction, listener
        # a token has a byte or more; some more tokens, for those that end in the middle of a character or say nothing
        self._reach = max((len(text.encode(errors="surrogatepass")) for text in stop), default=0) + 8
        self._ids: list[int] = []

    def again(self) -> RequestGuide:
        """One for the same request, which is sampled once more."""
        if self._restriction is not None:
            self._restriction.restart()
        return RequestGuide(self._renderer, self._tools, self.stop, self._restriction, self._listener)

    def allowed(self) -> bytes | None:
        return None if self._restriction is None else self._restriction.allowed()

    def take(self, token: int) -> bool:
        if self._restriction is not None:
            self._restriction.take(token)
        self._ids.append(token)
        if self._listener is not None:
            self._listener.hear(self._ids)
        if not self.stop:
            return False
        if isinstance(self._renderer, TurnByTurn):  # reading a whole answer at every token would be quadratic
            end = self._renderer.text(self._ids[-self._reach :])
            if not any(text in end for text in self.stop):
                return False
        try:
            return cut_at(self._renderer.parse(self._ids, self._tools), self.stop)[1] is not None
        except Exception:  # the boundary to foreign parsers; half an answer need not be one that can be read
            return False


def cut_at(answer: Message, stops: tuple[str, ...]) -> tuple[Message, str | None]:
    """The answer up to the first of these texts in what it says, and that text."""
    found = [(place, stop) for stop in stops if (place := answer.content.find(stop)) >= 0]
    if not found:
        return answer, None
    place, stop = min(found, key=lambda one: (one[0], -len(one[1])))
    return replace(answer, content=answer.content[:place]), stop
