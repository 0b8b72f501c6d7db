"""What an agent's session is made of: model calls in token ids, and which earlier call each of them continues.

A session's calls share most of their tokens and messages. Each is kept as what it adds to an earlier one (its *base*),
in memory and on disk, so that a session of t turns needs room for its tokens once and not t times. Nothing that was
sampled is tokenised again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from turntree.core.completion import Completion
from turntree.core.cost import NO_COST, Cost
from turntree.core.errors import InputError
from turntree.core.messages import Message
from turntree.core.protocols import Renderer
from turntree.core.tree import StopReason

Tools = tuple[dict[str, Any], ...]
Thoughts = Literal["fork", "keep"]  # an answer that comes back without its reasoning

# answers that are new times messages: a renderer may look at all messages for each answer, and everybody waits for it
_MOST_WORK = 2**18

Cause = Literal["start", "continue", "retry", "compaction", "dropped_reasoning", "edited", "tools"]
"""Why a call's prompt begins where it does.

- `start`: it continues no earlier call (a first call, a sub-agent, a conversation about something else).
- `continue`: an earlier call's prompt, its answer, and new messages. Nothing was tokenised again.
- `retry`: the very prompt of an earlier call, asked again.
- `compaction`: earlier messages were removed or replaced by fewer ones; the call still shares a beginning with another.
- `dropped_reasoning`: an earlier answer came back without its reasoning.
- `edited`: an earlier message came back with another text.
- `tools`: the same messages under other tools.

From `compaction` on the prompt was rendered anew. All but `start` and `continue` are forks in the tree, with this
cause.
"""

Status = Literal["kept", "failed", "disconnected"]


@dataclass(kw_only=True)
class Call:
    """One model call of a session: one prompt and what was sampled for it.

    A call is kept as what it adds to its base: the first `base_tokens` ids of its prompt are the first of the base's
    prompt and completion, the first `base_messages` messages are the first of the base's messages and answer.
    """

    call_id: str
    index: int  # order of the calls of a session, from 0, by the time at which they were asked
    added_ids: tuple[int, ...]
    added: tuple[Message, ...]  # as the agent sent them
    tools: Tools = ()
    base: Call | None = field(default=None, repr=False)
    base_tokens: int = 0
    base_messages: int = 0
    cause: Cause = "start"
    completion: Completion | None = None  # None unless the call was kept
    answer: Message | None = None  # what `completion` says
    status: Status = "kept"
    error: str = ""  # why it failed
    cost: Cost = NO_COST  # of a call without a completion: what the engine had done by then
    stop: str | None = None  # the text of the agent's that ended it: the answer is cut before it, the tokens are not
    draw: int = 0  # its number among the calls of this prompt
    constrained: bool = False  # it was sampled under a grammar, and so not from the policy alone
    meta: dict[str, Any] = field(default_factory=dict[str, Any])  # what the agent said about the call (`metadata`)

    @property
    def prompt_tokens(self) -> int:
        return self.base_tokens + len(self.added_ids)

    @property
    def sampled_ids(self) -> tuple[int, ...]:
        return () if self.completion is None else self.completion.token_ids

    @property
    def message_count(self) -> int:
        return self.base_messages + len(self.added)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return _collected(self, lambda call: (call.base_tokens, call.added_ids, call.sampled_ids))

    @property
    def messages(self) -> tuple[Message, ...]:
        """Those of the prompt."""
        return _collected(self, lambda call: (call.base_messages, call.added, (call.answer,) if call.answer else ()))

    @property
    def goes_on(self) -> bool:
        """Whether the agent went on with the conversation of the base."""
        return self.cause == "continue"

    @property
    def turn(self) -> int | None:
        """How many calls come before it in the conversation that began the session; None where it is in another one,
        or behind a prefix that the agent rewrote."""
        above, count = self, 0
        while above.base is not None and above.goes_on:
            above, count = above.base, count + 1
        return count if above.base is None and above.index == 0 else None


def _collected(call: Call, items_of: Callable[[Call], tuple[int, tuple[Any, ...], tuple[Any, ...]]]) -> tuple[Any, ...]:
    """All items of a prompt, from the calls that it continues: `items_of` gives how many items of its base's a call
    shares, those that it adds, and those of its answer."""
    shared, added, _ = items_of(call)
    parts, above = [added], call.base
    while above is not None and shared:
        start, added, answer = items_of(above)
        own = start + len(added)
        parts += [answer[: max(0, shared - own)], added[: max(0, shared - start)]]
        shared, above = min(shared, start), above.base
    return tuple(item for part in reversed(parts) for item in part)


@dataclass(frozen=True, kw_only=True)
class Session:
    """One rollout of an agent. `reward` is None where there is none: it is then censored for `reason`, never 0.

    Where the one who rewards knows what became of single calls, `call_rewards` says so by call id (an invalid answer,
    a failed sub-agent)."""

    session_id: str
    task_id: str
    calls: tuple[Call, ...] = ()
    reward: float | None = None
    success: bool | None = None
    reason: str = ""
    call_rewards: dict[str, float] = field(default_factory=dict[str, float])
    stop: StopReason = StopReason.COMPLETED  # or the limit that the agent ran into last and did not get over
    sample: int = 0  # its place in the group of its task


class Lineage:
    """The calls of one session, found by what was said.

    A message counts as the one that was answered if it says the same: white space around an answer, and the order of
    keys in a call's arguments, do not matter. `thoughts` says whether an answer that comes back without its reasoning
    is the same one ("keep": the sampled thoughts stay in the context) or another ("fork").
    """

    def __init__(self, renderer: Renderer, thoughts: Thoughts = "fork") -> None:
        self._renderer, self._thoughts = renderer, thoughts
        self._dialogues: dict[tuple[str, bytes], Call] = {}  # by tools, messages and answer
        self._prompts: dict[tuple[str, bytes], Call] = {}  # by tools and messages
        self._beginnings: set[bytes] = set()  # of every dialogue, whatever the tools
        self._without_thoughts: set[bytes] = set()  # the same, all reasoning left out
        self._answers: dict[bytes, Call] = {}
        self._longest = 0

    def place(self, messages: Sequence[Message], tools: Tools, call_id: str, index: int) -> Call:
        """A call that is to be sampled. Raises `InputError` for messages that the renderer cannot write."""
        messages = tuple(messages)
        if not messages or messages[-1].role == "assistant":
            problem = "are empty" if not messages else "end with an answer of the assistant"
            raise InputError(problem, field="messages", hint="end with a message of the user or a tool")
        chain, named = self._chain(messages), _tools_key(tools)
        asked = self._prompts.get((named, chain[-1]))
        if asked is not None:
            return Call(
                call_id=call_id,
                index=index,
                added_ids=(),
                added=(),
                tools=asked.tools,
                base=asked,
                base_tokens=asked.prompt_tokens,
                base_messages=asked.message_count,
                cause="retry",
            )
        count = len(messages) - 1
        while count and (named, chain[count - 1]) not in self._dialogues:
            count -= 1
        base = self._dialogues[named, chain[count - 1]] if count else None
        rest = messages[count:]
        answers = sum(message.role == "assistant" for message in rest)
        if answers * len(messages) > _MOST_WORK:
            problem = f"are {len(messages)}, with {answers} answers that are not those of an earlier call"
            raise InputError(problem, field="messages", hint=f"send at most {_MOST_WORK // len(messages)} of those")
        goes_on = base is not None and not answers
        if base is not None:
            shared, added = base.prompt_tokens + len(base.sampled_ids), self._follow(messages, count, tools, base)
        else:
            shared, added = 0, self._render(messages, tools)
        return Call(
            call_id=call_id,
            index=index,
            added_ids=added,
            added=rest,
            tools=tools if base is None else base.tools,
            base=base,
            base_tokens=shared,
            base_messages=count,
            cause="continue" if goes_on else self._cause(messages, chain, named),
        )

    def add(self, call: Call) -> None:
        """Make a call findable. One without an answer is found as a prompt only."""
        messages, named = call.messages, _tools_key(call.tools)
        chain = self._chain(messages)
        self._prompts.setdefault((named, chain[-1]), call)
        said = messages if call.answer is None else (*messages, call.answer)
        self._longest = max(self._longest, len(said))
        whole = self._chain(said[len(messages) :], chain[-1])
        self._beginnings.update(chain[call.base_messages :], whole)
        self._without_thoughts.update(chained([digest_of(message, thoughts=False) for message in said]))
        if call.answer is not None and call.completion is not None:
            self._dialogues[named, whole[-1]] = call
            self._answers[self._of(call.answer)] = call

    # ids

    def _render(self, messages: Sequence[Message], tools: Tools) -> tuple[int, ...]:
        first = next((i for i, message in enumerate(messages) if message.role == "assistant"), len(messages))
        if first == len(messages) or first == 0 or _adjacent(messages):
            return self._renderer.prompt(messages, tools)
        opening, (ids, stopped) = self._renderer.prompt(messages[:first], tools), self._said(messages[first])
        return opening + ids + self._rounds(messages, first + 1, tools, stopped)

    def _follow(self, messages: Sequence[Message], count: int, tools: Tools, base: Call) -> tuple[int, ...]:
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
        call = self._answers.get(self._of(answer))
        if call is None or call.completion is None:
            return self._renderer.completion(answer), True
        return call.completion.token_ids, call.completion.finish == "stop"

    # causes

    def _cause(self, messages: Sequence[Message], chain: Sequence[bytes], named: str) -> Cause:
        """Why no earlier call, or an early one only, is continued."""
        known = _known(chain, self._beginnings)
        systems = next((i for i, message in enumerate(messages) if message.role != "system"), len(messages))
        bare = chained([digest_of(message, thoughts=False) for message in messages])
        if known > systems:  # these messages were a prompt or a whole dialogue, but under other tools only?
            shown = {tools for tools, key in (*self._dialogues, *self._prompts) if key == chain[known - 1]}
            if shown and named not in shown:
                return "tools"
        if known == len(messages):
            return "compaction"
        if _known(bare, self._without_thoughts) > known and messages[known].role == "assistant":
            return "dropped_reasoning"
        resumed = any(self._of(message) in self._answers for message in messages if message.role == "assistant")
        if known <= systems and not resumed:
            return "start"
        return "compaction" if len(messages) <= self._longest else "edited"

    # names of messages

    def _of(self, message: Message) -> bytes:
        return digest_of(message, thoughts=self._thoughts == "fork")

    def _chain(self, messages: Sequence[Message], after: bytes = b"") -> list[bytes]:
        """A name for every beginning of the messages."""
        return chained([self._of(message) for message in messages], after)


def digest_of(message: Message, *, thoughts: bool) -> bytes:
    content = message.content.strip() if message.role == "assistant" else message.content
    calls = [(call.name, _whole(call.arguments)) for call in message.tool_calls]
    parts = (message.role, content, calls, message.tool_call_id, message.name, thoughts and message.reasoning.strip())
    return _hash(json.dumps(parts, sort_keys=True).encode())


def _whole(value: Any) -> Any:
    """A JSON value whose whole numbers are alike: JavaScript sends 1.0 back as 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in cast("dict[str, Any]", value).items()}
    return value


def chained(digests: Sequence[bytes], after: bytes = b"") -> list[bytes]:
    return list(itertools.accumulate(digests, lambda before, one: _hash(before + one), initial=after))[1:]


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _known(chain: Sequence[bytes], beginnings: set[bytes]) -> int:
    """How many messages begin an earlier dialogue."""
    return next((i for i, key in enumerate(chain) if key not in beginnings), len(chain))


def _tools_key(tools: Tools) -> str:
    return json.dumps(tools, sort_keys=True) if tools else ""


def _adjacent(messages: Sequence[Message]) -> bool:
    """Whether two answers follow each other, so that nothing lies between them to be rendered alone."""
    return any(a.role == b.role == "assistant" for a, b in itertools.pairwise(messages))
