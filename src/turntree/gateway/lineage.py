"""Which earlier call a new one continues, and the token ids of its prompt: nothing that was sampled is tokenised again.

A session's calls share most of their tokens and messages. Each is kept as what it adds to an earlier one (its *base*),
in memory and on disk, so that a session of t turns needs room for its tokens once and not t times.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from turntree.core.completion import Completion
from turntree.core.cost import NO_COST, Cost
from turntree.core.errors import InputError
from turntree.core.messages import Message
from turntree.core.protocols import Renderer
from turntree.gateway.calls import Call, Cause, Status
from turntree.renderers.thoughts import whole_prompt

Tools = tuple[dict[str, Any], ...]
Thoughts = Literal["fork", "keep"]  # an answer that comes back without its reasoning
T = TypeVar("T")

# answers that are new times messages: a renderer may look at all messages for each answer, and everybody waits for it
_MOST_WORK = 2**18


@dataclass(eq=False, kw_only=True)
class Kept:
    """A call as what it adds to its base: the first `base_tokens` ids of its prompt are the first of the base's prompt
    and completion, the first `base_messages` messages are the first of the base's messages and answer."""

    call_id: str
    index: int
    added_ids: tuple[int, ...]
    added: tuple[Message, ...]
    tools: Tools = ()
    base: Kept | None = None
    base_tokens: int = 0
    base_messages: int = 0
    cause: Cause = "start"
    request_id: str = ""
    completion: Completion | None = None
    answer: Message | None = None
    status: Status = "kept"
    error: str = ""
    cost: Cost = NO_COST
    meta: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def prompt_tokens(self) -> int:
        return self.base_tokens + len(self.added_ids)

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + (0 if self.completion is None else len(self.completion.token_ids))

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """All ids of the prompt, collected from the calls above."""
        parts, above, count = [self.added_ids], self.base, self.base_tokens
        while above is not None and count:
            if count > above.prompt_tokens:
                assert above.completion is not None
                parts.append(above.completion.token_ids[: count - above.prompt_tokens])
                count = above.prompt_tokens
            if count > above.base_tokens:
                parts.append(above.added_ids[: count - above.base_tokens])
                count = above.base_tokens
            above = above.base
        return _joined(parts)

    @property
    def sequence(self) -> tuple[int, ...]:
        return self.prompt_ids if self.completion is None else self.prompt_ids + self.completion.token_ids

    @property
    def messages(self) -> tuple[Message, ...]:
        parts, above, count = [self.added], self.base, self.base_messages
        while above is not None and count:
            own = above.base_messages + len(above.added)
            if count > own:
                assert above.answer is not None
                parts.append((above.answer,))
                count = own
            if count > above.base_messages:
                parts.append(above.added[: count - above.base_messages])
                count = above.base_messages
            above = above.base
        return _joined(parts)

    @property
    def turn(self) -> int | None:
        """How many calls come before it in the conversation that began the session; None where it is in another one,
        or behind a prefix that the agent rewrote."""
        above, count = self, 0
        while above.base is not None and above.goes_on:
            above, count = above.base, count + 1
        return count if above.base is None and above.index == 0 else None

    @property
    def goes_on(self) -> bool:
        """Whether the agent went on with the conversation of the base."""
        return self.cause in ("continue", "rewritten")

    @property
    def message_count(self) -> int:
        return self.base_messages + len(self.added)

    def call(self, session_id: str, task_id: str) -> Call:
        """The call as a value, with everything that it shares."""
        return Call(
            call_id=self.call_id,
            session_id=session_id,
            task_id=task_id,
            index=self.index,
            prompt_ids=self.prompt_ids,
            completion=self.completion,
            messages=self.messages,
            tools=self.tools,
            answer=self.answer,
            follows=None if self.base is None else self.base.call_id,
            cause=self.cause,
            status=self.status,
            error=self.error,
            cost=self.cost,
            request_id=self.request_id,
            meta=self.meta,
        )


def again(first: Kept, call_id: str, index: int, cause: Cause) -> Kept:
    """Another call with the very prompt of `first`."""
    return Kept(
        call_id=call_id,
        index=index,
        added_ids=(),
        added=(),
        tools=first.tools,
        base=first,
        base_tokens=first.prompt_tokens,
        base_messages=first.message_count,
        cause=cause,
    )


class Lineage:
    """The calls of one session, found by what was said.

    A message counts as the one that was answered if it says the same: white space around an answer, and the order of
    keys in a call's arguments, do not matter. `thoughts` says whether an answer that comes back without its reasoning
    is the same one ("keep": the sampled thoughts stay in the context) or another ("fork").
    """

    def __init__(self, renderer: Renderer, thoughts: Thoughts = "fork") -> None:
        self._renderer, self._thoughts = renderer, thoughts
        self._dialogues: dict[tuple[str, bytes], Kept] = {}  # by tools, messages and answer
        self._prompts: dict[tuple[str, bytes], Kept] = {}  # by tools and messages
        self._beginnings: set[bytes] = set()  # of every dialogue, whatever the tools
        self._without_thoughts: set[bytes] = set()  # the same, all reasoning left out
        self._answers: dict[bytes, Kept] = {}
        self._longest = 0

    def place(self, messages: Sequence[Message], tools: Tools, call_id: str, index: int) -> Kept:
        """A call that is to be sampled. Raises `InputError` for messages that the renderer cannot write."""
        messages = tuple(messages)
        if not messages or messages[-1].role == "assistant":
            problem = "are empty" if not messages else "end with an answer of the assistant"
            raise InputError(problem, field="messages", hint="end with a message of the user or a tool")
        chain, named = self._chain(messages), _tools_key(tools)
        asked = self._prompts.get((named, chain[-1]))
        if asked is not None:
            return again(asked, call_id, index, "retry")
        count = len(messages) - 1
        while count and (named, chain[count - 1]) not in self._dialogues:
            count -= 1
        base = self._dialogues[named, chain[count - 1]] if count else None
        rest = messages[count:]
        answers = sum(message.role == "assistant" for message in rest)
        if answers * len(messages) > _MOST_WORK:
            problem = f"are {len(messages)}, with {answers} answers that are not those of an earlier call"
            raise InputError(problem, field="messages", hint=f"send at most {_MOST_WORK // len(messages)} of those")
        goes_on: Cause | None = "continue" if base is not None and not answers else None
        prompt = None if base is None else self._rewritten(base, rest, tools)
        if base is not None and prompt is not None:
            shared, goes_on = common(base.sequence, prompt), goes_on and "rewritten"
            added = prompt[shared:]
        elif base is not None:
            shared, added = base.total_tokens, self._follow(messages, count, tools, base)
        else:
            shared, added = 0, self._render(messages, tools)
        return Kept(
            call_id=call_id,
            index=index,
            added_ids=added,
            added=rest,
            tools=tools if base is None else base.tools,
            base=base,
            base_tokens=shared,
            base_messages=count,
            cause=goes_on or self._cause(messages, chain, named),
        )

    def add(self, kept: Kept) -> None:
        """Make a call findable. One without an answer is found as a prompt only."""
        messages, named = kept.messages, _tools_key(kept.tools)
        chain = self._chain(messages)
        self._prompts.setdefault((named, chain[-1]), kept)
        said = messages if kept.answer is None else (*messages, kept.answer)
        self._longest = max(self._longest, len(said))
        whole = self._chain(said[len(messages) :], chain[-1])
        self._beginnings.update(chain[kept.base_messages :], whole)
        self._without_thoughts.update(chained([digest_of(message, thoughts=False) for message in said]))
        if kept.answer is not None and kept.completion is not None:
            self._dialogues[named, whole[-1]] = kept
            self._answers[self._of(kept.answer)] = kept

    # ids

    def _render(self, messages: Sequence[Message], tools: Tools) -> tuple[int, ...]:
        first = next((i for i, message in enumerate(messages) if message.role == "assistant"), len(messages))
        if first == len(messages) or first == 0 or _adjacent(messages):
            return self._renderer.prompt(messages, tools)
        if (prompt := whole_prompt(self._renderer, messages[: first + 1], messages[first + 1 :], tools)) is not None:
            return prompt
        opening, (ids, stopped) = self._renderer.prompt(messages[:first], tools), self._said(messages[first])
        return opening + ids + self._rounds(messages, first + 1, tools, stopped)

    def _rewritten(self, base: Kept, new: Sequence[Message], tools: Tools) -> tuple[int, ...] | None:
        """The prompt after the dialogue of `base`, as it was sampled, where the template drops thoughts of it."""
        assert base.answer is not None
        return whole_prompt(self._renderer, (*base.messages, base.answer), new, tools)

    def _follow(self, messages: Sequence[Message], count: int, tools: Tools, base: Kept) -> tuple[int, ...]:
        """The ids after the first `count` messages, which are the dialogue of `base`."""
        stopped = base.completion is not None and base.completion.finish == "stop"
        if _adjacent(messages[count - 1 :]):
            return self._renderer.extend(messages[:count], messages[count:], tools, stopped=stopped)
        return self._rounds(messages, count, tools, stopped)

    def _rounds(self, messages: Sequence[Message], count: int, tools: Tools, stopped: bool) -> tuple[int, ...]:
        """The ids after message number `count - 1`, an answer. Answers further on that were sampled in this session
        keep their ids."""
        ids: tuple[int, ...] = ()
        while count < len(messages):
            end = next((i for i in range(count, len(messages)) if messages[i].role == "assistant"), len(messages))
            ids += self._renderer.extend(messages[:count], messages[count:end], tools, stopped=stopped)
            count = end
            if end < len(messages):
                said, stopped = self._said(messages[end])
                ids, count = ids + said, end + 1
        return ids

    def _said(self, answer: Message) -> tuple[tuple[int, ...], bool]:
        """The ids of an answer, and whether they end with a stop token: those that were sampled, where it was."""
        kept = self._answers.get(self._of(answer))
        if kept is None or kept.completion is None:
            return self._renderer.completion(answer), True
        return kept.completion.token_ids, kept.completion.finish == "stop"

    # causes

    def _cause(self, messages: Sequence[Message], chain: Sequence[bytes], named: str) -> Cause:
        """Why no earlier call, or an early one only, is continued."""
        common = _known(chain, self._beginnings)
        given = next((i for i, message in enumerate(messages) if message.role != "system"), len(messages))
        bare = chained([digest_of(message, thoughts=False) for message in messages])
        if common > given and self._other_tools(chain[common - 1], named):
            return "tools"
        if common == len(messages):
            return "compaction"
        if _known(bare, self._without_thoughts) > common and messages[common].role == "assistant":
            return "dropped_reasoning"
        resumed = any(self._of(message) in self._answers for message in messages if message.role == "assistant")
        if common <= given and not resumed:
            return "start"
        return "compaction" if len(messages) <= self._longest else "edited"

    def _other_tools(self, beginning: bytes, named: str) -> bool:
        """Whether these messages were a prompt or a whole dialogue, but under other tools only."""
        held = {tools for tools, key in (*self._dialogues, *self._prompts) if key == beginning}
        return bool(held) and named not in held

    # names of messages

    def _of(self, message: Message) -> bytes:
        return digest_of(message, thoughts=self._thoughts == "fork")

    def _chain(self, messages: Sequence[Message], after: bytes = b"") -> list[bytes]:
        """A name for every beginning of the messages."""
        return chained([self._of(message) for message in messages], after)


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens two sequences begin with in common."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # equal slices are compared in C
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def digest_of(message: Message, *, thoughts: bool) -> bytes:
    content = message.content.strip() if message.role == "assistant" else message.content
    calls = [(call.name, call.arguments) for call in message.tool_calls]
    said = (message.role, content, calls, message.tool_call_id, message.name, thoughts and message.reasoning.strip())
    return hashlib.blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=16).digest()


def chained(digests: Sequence[bytes], after: bytes = b"") -> list[bytes]:
    found: list[bytes] = []
    for each in digests:
        after = hashlib.blake2b(after + each, digest_size=16).digest()
        found.append(after)
    return found


def _known(chain: Sequence[bytes], beginnings: set[bytes]) -> int:
    """How many messages begin an earlier dialogue."""
    return next((i for i, key in enumerate(chain) if key not in beginnings), len(chain))


def _tools_key(tools: Tools) -> str:
    return json.dumps(tools, sort_keys=True) if tools else ""


def _adjacent(messages: Sequence[Message]) -> bool:
    """Whether two answers follow each other, so that nothing lies between them to be rendered alone."""
    return any(a.role == b.role == "assistant" for a, b in itertools.pairwise(messages))


def _joined(parts: list[tuple[T, ...]]) -> tuple[T, ...]:
    return tuple(item for part in reversed(parts) for item in part)
