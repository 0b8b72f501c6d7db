"""A chat template cut into the texts between assistant turns and the assistant turns themselves.

A conversation (see `turns`) is rendered as

    head(R0) said(A1) follow(A1, R1) said(A2) follow(A2, R2) ...

where head and follow end with the generation prompt and said ends with a stop text. Every said(A) is a function of A
alone: it is what the policy would have sampled. Where the template is *message-local* (checked on conversations of
the same kind) the other pieces are functions of their own messages, too, and cost one small render each; where it is
not, the whole conversation is rendered and cut. A template that renders an earlier message differently once later
ones arrive cannot be cut: sampled tokens are never rewritten, so it is refused, naming the message. Only thoughts may
be missing there: a local template that drops them, or its empty ones, is cut as if it kept them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from turntree.core.errors import InputError
from turntree.core.messages import Message
from turntree.render.probes import ASK, CALL, SAY, Kind
from turntree.render.turns import Round, Tools, check_complete, left_out, split
from turntree.render.words import Words, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Some templates write today's date into the system message; the tokens of a run must not depend on the day.
NO_CLOCK = """{%- macro strftime_now(format) -%}
{{- format | replace('%Y', '2025') | replace('%B', 'January') | replace('%b', 'Jan') | replace('%A', 'Wednesday')
    | replace('%a', 'Wed') | replace('%y', '25') | replace('%m', '01') | replace('%d', '01') | replace('%H', '12')
    | replace('%M', '00') | replace('%S', '00') -}}
{%- endmacro %}"""


def rendered(
    tokenizer: PreTrainedTokenizerBase, chats: list[dict[str, Any]], tools: Tools, *, generation_prompt: bool = True
) -> str:
    """What the template that Transformers takes (of several: `tool_use` where there are tools) writes, without today's
    date. A template may raise anything."""
    source = tokenizer.get_chat_template(tools=list(tools) or None)
    text = tokenizer.apply_chat_template(
        chats,
        tools=list(tools) or None,
        chat_template=NO_CLOCK + source if "strftime_now" in source else source,
        add_generation_prompt=generation_prompt,
        tokenize=False,
    )
    return cast(str, text)


@dataclass(frozen=True)
class Said:
    """The text of an assistant turn up to its stop text, and that stop text."""

    text: str
    stop: str


class SegmentedTemplate:
    """The texts of one tokenizer's chat template.

    `stops` maps the texts of the tokens that end an assistant turn to their ids, the usual one first; `lead` is the
    white space that the template writes before the assistant's content, and so expects the policy to say. `tools` are
    declared where pieces are rendered: of several templates in a folder, one is for conversations with tools. Raises
    `InputError` for a template without a generation prompt, or one that does not end an assistant turn.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools: Tools = ()) -> None:
        self._tokenizer, self._tools = tokenizer, tools
        self.words = Words(tokenizer, str(tokenizer.chat_template))
        added = tokenizer.added_tokens_decoder
        self._special = {id for id, token in added.items() if token.special}
        self._ends = {*added, cast("int | None", tokenizer.eos_token_id)}
        self._local: dict[Kind, bool] = {}
        self.ask = self.render([ASK], self._tools)
        opened = self.ask != self.render([ASK], self._tools, generation_prompt=False)
        # Mistral's templates have none, and need none: what is said follows at once.
        if not opened and self._after_ask(SAY).partition(SAY.content)[0].strip():
            raise InputError(
                "the chat template has no generation prompt (add_generation_prompt changes nothing)",
                field="chat_template",
                hint="use a template that opens the assistant's turn when add_generation_prompt is true",
            )
        self.lead, self._close, stop = self._find_close()
        self.stops = {self._text(stop): stop, **self._other_stops()}

    def render(self, messages: Sequence[Message], tools: Tools = (), *, generation_prompt: bool = True) -> str:
        """The whole text that the template writes, with the words of others hidden (`words`). Raises `InputError` with
        the template's own complaint."""
        try:
            chats = [message.to_chat() for message in messages]
            hidden = [chat if chat["role"] == "assistant" else self.words.hide(chat) for chat in chats]
            declared = self.words.hide(list(tools))
            return rendered(self._tokenizer, hidden, declared, generation_prompt=generation_prompt)
        except Exception as error:  # the boundary to foreign code: a template may raise anything
            raise InputError(
                f"the chat template cannot render these messages ({type(error).__name__}: {error})",
                field="messages",
                hint=f"their roles are: {' '.join(message.role for message in messages)}",
            ) from error

    # the tokens of a text that stands after another one

    def said(self, message: Message) -> Said:
        """What the policy would have said. Raises `InputError` where the template leaves tool calls out."""
        text = self._after_ask(message)
        if message.tool_calls and not self._renders_calls:
            raise left_out("tool calls", "tool_calls")
        if text.endswith(self._close):
            return Said(text.removesuffix(self._close), next(iter(self.stops)))
        end, stop = max((text.rfind(stop), stop) for stop in self.stops)
        if end < 0:
            raise InputError("the chat template does not end this assistant turn", field="messages")
        return Said(text[:end], stop)

    def head(self, run: Sequence[Message], tools: Tools) -> str:
        """The text before the first assistant turn."""
        if not run:
            raise InputError("the conversation starts with the assistant", field="messages", hint="begin with a task")
        text = self.render(run, tools)
        if tools and text == self.render(run):
            raise left_out("the tools", "tools")
        self._check_complete(text, run, tools)
        return text

    def follow(self, part: Round) -> str:
        """The text between the stop text of a turn and the next turn, for a local template."""
        turn = part.turn if part.tied else SAY
        before = self._until_stop(turn) if part.tied else self.until_probe_stop
        text = self.render([ASK, turn, *part.run], self._tools)
        if not text.startswith(before):
            before = self._thoughtless_start + before.removeprefix(self.ask).partition(self.marks[1])[2].lstrip()
        if not text.startswith(before):
            raise _rewritten(part.index, "once more messages follow")
        self._check_complete(text, [ASK, turn, *part.run], self._tools, part.index - 1)
        return text[len(before) :]

    def is_local(self, messages: Sequence[Message], tools: Tools) -> bool:
        """Whether the template renders conversations of this kind message by message."""
        kind = Kind.of(messages, tools)
        if kind not in self._local:
            self._local[kind] = self._check_local(kind)
        return self._local[kind]

    def cut(self, messages: Sequence[Message], tools: Tools) -> list[str]:
        """[head, follow, follow, ...] of a whole render, for any template whose rendering of this conversation
        grows at its end only. Raises `InputError` naming the message that is rendered differently later."""
        run, rounds = split(messages)
        self.head(run, tools)
        whole = self.render(messages, tools)
        self._check_complete(whole, messages, tools)
        givens: list[str] = []
        start, seen = 0, 0
        for part in rounds:
            prompt = self.render(messages[: part.index], tools)
            if not whole.startswith(prompt):
                raise self._blame(whole, prompt, messages[: part.index], tools, seen)
            said = self.said(part.turn)
            givens.append(whole[start : len(prompt)])
            start, seen = len(prompt) + len(said.text) + len(said.stop), part.index
            if whole[len(prompt) : start] != said.text + said.stop:
                raise _rewritten(part.index, "once more messages surround it")
        return [*givens, whole[start:]]

    def _blame(self, whole: str, prompt: str, before: Sequence[Message], tools: Tools, seen: int) -> InputError:
        """The error when the prompt of turn `len(before)` is not a prefix of the whole text; `seen` is the turn
        before."""
        same = next((at for at, (a, b) in enumerate(zip(whole, prompt, strict=False)) if a != b), len(whole))
        if same >= len(self.render(before, tools, generation_prompt=False)):
            return _rewritten(len(before), "than its generation prompt begins it")
        return _rewritten(seen, f"once message {len(before)} follows")

    def _check_complete(self, text: str, messages: Sequence[Message], tools: Tools, offset: int = 0) -> None:
        check_complete(lambda others: self.render(others, tools), messages, (shown(text), text), offset)

    # what the template is like

    def _after_ask(self, message: Message) -> str:
        text = self.render([ASK, message], self._tools, generation_prompt=False)
        if not text.startswith(self.ask):
            raise _rewritten(1, "than its generation prompt begins it")
        return text.removeprefix(self.ask)

    def _until_stop(self, turn: Message) -> str:
        said = self.said(turn)
        return self.ask + said.text + said.stop

    @functools.cached_property
    def until_probe_stop(self) -> str:
        return self._until_stop(SAY)

    @functools.cached_property
    def thought(self) -> tuple[str, str] | None:
        """What stands before and after a turn's reasoning, which a template takes from `reasoning_content`; None where
        it has no place for one."""
        thinking = replace(SAY, reasoning="Hm, which?")
        try:
            before, found, rest = self._after_ask(thinking).partition(thinking.reasoning)
        except InputError:
            return None
        after, said, _ = rest.partition(SAY.content)
        return (before.strip(), after.strip()) if found and said and after.strip() else None

    @functools.cached_property
    def marks(self) -> tuple[str, str]:
        """What begins a sampled thought ("" where the prompt has begun it) and what ends it, also where the template
        has no place for one: a model may think all the same."""
        return self.thought or ("" if self.ask.rstrip().endswith("<think>") else "<think>", "</think>")

    @functools.cached_property
    def begun(self) -> bool:
        """Whether the generation prompt has begun a thought."""
        closed = self.marks[1]
        return self.ask.rstrip().endswith(closed.replace("/", "", 1)) or closed in self._after_ask(SAY)

    @functools.cached_property
    def _thoughtless_start(self) -> str:
        """The opening of a turn without the thought that the generation prompt has begun."""
        opening, opened, rest = self.ask.rpartition(self._opened)
        return opening if opened and not rest.strip() else self.ask

    @property
    def _opened(self) -> str:
        return self.marks[0] or self.marks[1].replace("/", "", 1)

    def _alike(self, text: str, whole: str) -> bool:
        """Whether a conversation in pieces is the template's own rendering, but for thoughts that it drops."""
        if text == whole:
            return True
        thought = re.compile(rf"{re.escape(self._opened)}.*?{re.escape(self.marks[1])}\s*", re.DOTALL)
        return thought.sub("", text) == thought.sub("", whole)

    @functools.cached_property
    def _renders_calls(self) -> bool:
        return self._after_ask(CALL) != self._after_ask(replace(CALL, tool_calls=()))

    def _find_close(self) -> tuple[str, str, int]:
        """White space before the content of an assistant turn; all that the template writes from its stop token on;
        and that token: the first special one after the content, or the first one where none is special."""
        lead, content, close = self._after_ask(SAY).rpartition(SAY.content)
        ids = self.words.encode(close, after=self.ask + lead + content)
        stop = next((id for id in ids if id in self._special), ids[0] if ids else None)
        if not content or stop is None or self._text(stop) not in close:
            raise InputError(
                "the chat template does not end an assistant turn",
                field="chat_template",
                hint="let it write a stop token (such as the end-of-sequence token) after the assistant's content",
            )
        mark = close[close.index(self._text(stop)) :].strip()
        if stop not in self._ends and mark != self._text(stop).strip():  # "<" of "<|im_end|>" would end a turn
            raise InputError(
                f"the tokenizer has no token {mark[:40]!r}, with which the chat template ends an assistant turn",
                field="chat_template",
                hint="use the tokenizer that belongs to the template, or add this as a special token",
            )
        return "" if lead.strip() else lead, close[close.index(self._text(stop)) :], stop

    def _other_stops(self) -> dict[str, int]:
        """The special token that ends a turn with tool calls, where it is another one."""
        try:
            text = self._after_ask(CALL)
        except InputError:  # no tool calls in this template: reported where one has to be rendered
            return {}
        last = [id for id in self.words.encode(text, after=self.ask) if id in self._special][-1:]
        return {} if text.endswith(self._close) else {self._text(id): id for id in last}

    def _check_local(self, kind: Kind) -> bool:
        messages, tools = kind.conversation()
        run, rounds = split(messages)
        try:
            text = self.head(run, tools)
            for part in rounds:
                if not self._alike(text, self.render(messages[: part.index], tools)):
                    return False
                said = self.said(part.turn)
                text += said.text + said.stop + self.follow(part)
            return self._alike(text, self.render(messages, tools))
        except InputError:  # cannot be rendered in this shape: whole renders decide, and name the message
            return False

    def _text(self, id: int) -> str:
        return cast(str, self._tokenizer.decode([id], clean_up_tokenization_spaces=False))


def _rewritten(index: int, when: str) -> InputError:
    return InputError(
        f"the chat template rewrites history: it renders message {index} differently {when}",
        field="messages",
        hint="edit chat_template.jinja so that a message looks alike wherever it stands (e.g. keep earlier thinking)",
    )
