"""Chat messages in tokens, through the tokenizer's own chat template, one segment at a time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from turntree.core.errors import InputError
from turntree.core.messages import Message
from turntree.render.probes import ASK, CALL, SAY, TOOL
from turntree.render.segments import SegmentedTemplate
from turntree.render.tool_calls import IN_TEXT, ToolFormat, detect_format, in_text, parse_message, settled
from turntree.render.turns import Ids, Round, Tools, TurnByTurn, check_read, key_of, split, without_thoughts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_THOUGHT = "\ue000"  # stands for a thought while calls are looked for: a letter of no script


class ChatRenderer(TurnByTurn):
    """`core.protocols.Renderer` over `tokenizer.apply_chat_template`.

    Segments (see `segments`) are tokenised one by one and concatenated, so that the tokens of a demonstrated history
    are those that sampling it turn by turn would have produced:

        prompt(m[:k]) + completion(m[k]) + extend(m[:k+1], m[k+1:k+2]) == prompt(m[:k+2])   for an assistant's m[k]

    `described` names all that decides the tokens beside the tokenizer and its template. Of several templates in a
    folder, conversations with tools are written by `tool_use`, as Transformers does. Raises `InputError` for a template
    that cannot be sampled turn by turn, and for messages that it leaves out, would later rewrite, or would not be read
    as they were said.

    Args:
        tool_format: How the policy writes tool calls: hermes, json, pythonic, tags, react, none (default: as its chat
            template does).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, tool_format: ToolFormat | None = None) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        several = isinstance(tokenizer.chat_template, dict) and "tool_use" in tokenizer.chat_template
        self._template = SegmentedTemplate(tokenizer)
        self._tooled = SegmentedTemplate(tokenizer, [TOOL]) if several else self._template
        self.thinks = self._template.thought is not None
        found = detect_format(str(tokenizer.chat_template))
        self._tool_format: ToolFormat = tool_format or found
        self._text_only = tool_format in ("none", *IN_TEXT)
        self._text_format: ToolFormat | None = self._tool_format if self._tool_format in IN_TEXT else None
        self.described = "template" if self._tool_format == found else f"template {self._tool_format}"
        eos = cast("int | None", tokenizer.eos_token_id)
        stops = {*self._template.stops.values(), *self._tooled.stops.values()}
        # those that the template writes, and the end of the sequence
        self.stop_ids = frozenset(stops) | ({eos} if eos is not None else frozenset())
        self._check()

    def _check(self) -> None:
        """Raise `InputError` where the tokens would not be those of the template's own rendering."""
        plain, tooled = self._template, self._tooled
        if tooled is not plain and (plain.said(SAY), plain.thought) != (tooled.said(SAY), tooled.thought):
            raise InputError(
                "the chat templates `default` and `tool_use` write an assistant turn differently",
                field="chat_template",
                hint="keep one of them",
            )
        if plain.words.spaced:
            ids = (*self.prompt([ASK]), *self.completion(SAY))
            if list(ids) != plain.words.encode(plain.until_probe_stop):
                raise InputError(
                    "the tokenizer joins the end of a prompt and the start of a turn into one token",
                    field="tokenizer",
                    hint="let the template's generation prompt end with a special token or a line break",
                )

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> Ids:
        ids = super().prompt(messages, tools)
        if tools and not self._text_only:
            self.completion(CALL)  # raises here for a form of calls that is not read: every call would stay text
        return ids

    def parse(self, token_ids: Sequence[int], tools: Tools = ()) -> Message:
        return self._read(self._text(token_ids))

    def _text(self, token_ids: Sequence[int]) -> str:
        ids = list(token_ids)
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        return self._template.words.decode(ids, self._template.ask, self._template.lead)

    def begun(self, token_ids: Sequence[int]) -> Message:
        """As `_read`, of what can be read already."""
        text = self._text(token_ids).rstrip("\ufffd")  # half of a character
        (opened, closed), lead, none = self._template.marks, self._template.lead, Message("assistant")
        head = text.lstrip()
        if opened and not head.startswith(opened):
            thought, said = "", text
            if opened.startswith(head) or lead.startswith(text):
                return none
        else:
            thought, ended, said = head.removeprefix(opened).partition(closed)
            said = said.lstrip("\n")
            if not ended or not self.thinks or lead.startswith(said):
                return none
        content = settled(said.removeprefix(lead), self._tool_format)
        return replace(none, content=content, reasoning=thought.strip("\n") if content else "")

    def _words(self) -> tuple[Any, tuple[str, str]]:
        return self._tokenizer, self._template.marks if self.thinks else ("", "")

    def _read(self, text: str) -> Message:
        """The message in a sampled text. What it thought is never a call, and if the thought does not end, it says
        nothing: neither a verifier nor an environment may take a thought for an action."""
        opened, closed = self._template.marks
        thought, ended, said = text.lstrip().removeprefix(opened).partition(closed)
        lead = self._template.lead
        if not text.lstrip().startswith(opened) or not (ended or opened or self._template.begun):
            return self._aloud(text.removeprefix(lead))
        if not ended:
            return Message("assistant", "", reasoning=thought.strip("\n"))
        if self.thinks:
            read = self._aloud(said.lstrip("\n").removeprefix(lead))
            return replace(read, reasoning=thought.strip("\n"))
        read = self._aloud(_THOUGHT + said)  # without a place for thoughts, they are content
        return replace(read, content=text.removesuffix(said).removeprefix(lead) + read.content.removeprefix(_THOUGHT))

    def _aloud(self, said: str) -> Message:
        """What is said; a turn that calls in a later thought, too, is text as a whole."""
        read = parse_message(said, self._tool_format)
        heard = without_thoughts(said, *self._template.marks) if read.tool_calls else said
        same = heard == said or parse_message(heard, self._tool_format).tool_calls == read.tool_calls
        return read if same else Message("assistant", said)

    # segments

    def _givens(self, messages: Sequence[Message], tools: Tools, first: int = 0) -> list[Ids]:
        """They are rendered without reasoning, because a template that drops earlier thoughts would rewrite sampled
        tokens; the sampled thoughts stay."""
        messages = [replace(message, reasoning="") if message.reasoning else message for message in messages]
        if self._text_format is not None:
            messages, tools = [in_text(message, self._text_format) for message in messages], ()
        template = self._tooled if tools else self._template
        run, rounds = split(messages)
        if template.is_local(messages, tools):
            key = ("head", tuple(map(key_of, run)), json.dumps(list(tools)) if tools else "")
            opening = () if first else (self._segment(key, lambda: self._encode(template.head(run, tools))),)
            return [*opening, *(self._follow(part, template) for part in rounds[max(first - 1, 0) :])]
        head, *texts = template.cut(messages, tools)
        opening = () if first else (self._segment(("start", head), lambda: self._encode(head)),)
        texts = texts[max(first - 1, 0) :]
        return [*opening, *(self._segment(("text", text), lambda text=text: self._after_turn(text)) for text in texts)]

    def _follow(self, part: Round, template: SegmentedTemplate) -> Ids:
        turn = key_of(part.turn) if part.tied else None
        key = ("follow", template is self._tooled, turn, tuple(map(key_of, part.run)))
        return self._segment(key, lambda: self._after_turn(template.follow(part)))

    def _after_turn(self, text: str) -> Ids:
        return self._encode(text, after=self._template.until_probe_stop)

    def _say(self, message: Message) -> Ids:
        meant = message if self._text_format is None else in_text(message, self._text_format)
        template = self._tooled if meant.tool_calls else self._template
        said = template.said(meant)
        ids = self._encode(said.text, after=self._template.ask)
        if not self.stop_ids.isdisjoint(ids):
            raise InputError(
                f"the assistant's {message.content[:40]!r} holds a stop token, after which no policy goes on",
                field="content",
                hint="remove the token",
            )
        ids = (*ids, template.stops[said.stop])
        if not message.tool_calls or self._tool_format != "none":
            thinks = self.thinks and bool(message.reasoning)
            closed = self._template.marks[1] if self.thinks else ""
            check_read(message, self.parse(ids), thinks=thinks, closed=closed)
        return ids

    def _closing(self, message: Message) -> Ids:
        stops = self._template.stops
        if message.tool_calls and self._text_format is None and len(stops := self._tooled.stops) > 1:
            return (stops[self._tooled.said(message).stop],)
        return (next(iter(stops.values())),)

    def _encode(self, text: str, after: str = "") -> Ids:
        return tuple(self._template.words.encode(text, after))
