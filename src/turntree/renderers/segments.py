"""A chat template cut into the texts between assistant turns and the assistant turns themselves.

A conversation R0 A1 R1 A2 R2 ... (A: assistant turns, R: runs of other messages, maybe empty) is rendered as

    head(R0) said(A1) follow(A1, R1) said(A2) follow(A2, R2) ...

where head and follow end with the generation prompt and said ends with the stop text. Every said(A) is a function of
A alone: this is what the policy would have sampled. Where the template is *message-local* (checked on probe
conversations) the other pieces are functions of their own messages, too, and cost one small render each; where it is
not, whole conversations are rendered and cut. A template that renders an earlier message differently once later ones
arrive cannot be cut: sampled tokens are never rewritten, so it is refused, naming the message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from turntree.core.errors import InputError
from turntree.core.messages import Message, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[dict[str, Any]]

_ASK = Message("user", "Which way?")
_SAY = Message("assistant", "Go left.")
_CALL = Message("assistant", "", (ToolCall("look", {"at": "map"}, id="call00001"),))
_RESULT = Message("tool", "A map.", tool_call_id="call00001", name="look")
_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a thing.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}
_KEEP_HISTORY = (
    "use a chat template that renders a message alike wherever it stands "
    "(e.g. edit chat_template.jinja of the policy so that earlier turns keep their thinking)"
)


@dataclass(frozen=True)
class Said:
    """The text of an assistant turn up to its stop text, and that stop text."""

    text: str
    stop: str


@dataclass(frozen=True)
class Features:
    """What a conversation uses that templates like to treat specially; locality is checked for each combination."""

    system: bool
    tools: bool
    calls: bool
    thinking: bool

    @classmethod
    def of(cls, messages: Sequence[Message], tools: Tools) -> Features:
        return cls(
            system=any(message.role == "system" for message in messages),
            tools=bool(tools),
            calls=any(message.tool_calls or message.role == "tool" for message in messages),
            thinking=any("</think>" in message.content for message in messages if message.role == "assistant"),
        )

    def probe(self) -> tuple[list[Message], list[dict[str, Any]]]:
        """A conversation with exactly these features, each early and late."""
        thought = "<think>\nLeft, then.\n</think>\n\n" if self.thinking else ""
        say = replace(_SAY, content=thought + _SAY.content)
        turns = [_ASK, say, replace(_ASK, content="And now?")]
        if self.calls:
            turns += [replace(_CALL, content=thought), _RESULT, replace(say, content=thought + "A map, then.")]
            turns += [replace(_ASK, content="Look twice."), _CALL, _RESULT, _CALL, _RESULT]
        else:
            turns += [replace(say, content=thought + "Stop here."), replace(_ASK, content="And then?")]
        return [Message("system", "Be brief."), *turns] if self.system else turns, [_TOOL] if self.tools else []


class SegmentedTemplate:
    """The texts of one tokenizer's chat template. Raises `InputError` for a template that cannot be sampled from."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._ask = self.render([_ASK], generation_prompt=True)
        if self._ask == self.render([_ASK], generation_prompt=False):
            raise InputError(
                "the chat template has no generation prompt (add_generation_prompt changes nothing)",
                field="chat_template",
                hint="use a template that opens the assistant's turn when add_generation_prompt is true",
            )
        self.stop, self._close = self._find_close()
        self.stops = (self.stop, *self._other_stops())
        self._local: dict[Features, bool] = {}
        self._asked_and_said = self._ask + _SAY.content

    def render(self, messages: Sequence[Message], tools: Tools = (), *, generation_prompt: bool) -> str:
        """The whole text that the template writes."""
        try:
            return self._tokenizer.apply_chat_template(
                [message.to_chat() for message in messages],
                tools=list(tools) or None,
                add_generation_prompt=generation_prompt,
                tokenize=False,
            )
        except Exception as error:  # the boundary to foreign code: a template may raise anything
            problem = f"the chat template cannot render these messages ({type(error).__name__}: {error})"
            roles = " ".join(message.role for message in messages)
            raise InputError(problem, field="messages", hint=f"their roles are: {roles}") from error

    # pieces

    def said(self, message: Message) -> Said:
        """What the policy would have said. Raises `InputError` when the template leaves tool calls out."""
        text = self._after_ask(message)
        if message.tool_calls and text == self._after_ask(replace(message, tool_calls=())):
            raise InputError("the chat template leaves out tool calls", field="tool_calls", hint="use another template")
        if text.endswith(self._close):
            return Said(text.removesuffix(self._close), self.stop)
        end, stop = max((text.rfind(stop), stop) for stop in self.stops)
        if end < 0:
            raise InputError("the chat template does not end this assistant turn", field="messages")
        return Said(text[:end], stop)

    def givens(self, messages: Sequence[Message], tools: Tools = ()) -> list[str]:
        """head(R0), follow(A1, R1), ...: the texts that are given to the policy, one more than assistant turns."""
        if not self.is_local(messages, tools):
            return self._cut(messages, tools)
        return [self.head(messages[: (_turns(messages) or [len(messages)])[0]], tools), *self.follows(messages)]

    def is_local(self, messages: Sequence[Message], tools: Tools) -> bool:
        """Whether the template renders conversations of this kind message by message (see the module's docstring)."""
        features = Features.of(messages, tools)
        if features not in self._local:
            self._local[features] = self._check_local(features)
        return self._local[features]

    def head(self, run: Sequence[Message], tools: Tools) -> str:
        return self.render(run, tools, generation_prompt=True)

    def follows(self, messages: Sequence[Message]) -> list[str]:
        """follow(A, R) of every assistant turn of a conversation under a local template."""
        turns = _turns(messages)
        ends = [*turns, len(messages)][1:]
        return [self.follow(messages[t], messages[t + 1 : end], t) for t, end in zip(turns, ends, strict=False)]

    def follow(self, turn: Message, run: Sequence[Message], index: int = 0) -> str:
        """The text between the stop text of `turn` (message number `index`) and the next turn, local template."""
        tied = turn.tool_calls or any(message.role == "tool" for message in run)  # results may refer to their calls
        context = turn if tied else _SAY
        said = self.said(context) if tied else Said(_SAY.content, self.stop)
        before = self._ask + said.text + said.stop
        text = self.render([_ASK, context, *run], generation_prompt=True)
        if not text.startswith(before):
            raise _rewritten(index)
        if run and text == self.render([_ASK, context], generation_prompt=True):
            raise InputError(
                f"the chat template leaves out message {index + 1} ({run[0].role})",
                field="messages",
                hint="use a template that renders it",
            )
        return text[len(before) :]

    # checks

    def _after_ask(self, message: Message) -> str:
        text = self.render([_ASK, message], generation_prompt=False)
        if not text.startswith(self._ask):
            raise _rewritten(1, "with its generation prompt")
        return text.removeprefix(self._ask)

    def _find_close(self) -> tuple[str, str]:
        """The stop text, and all that the template writes after the content of an assistant turn."""
        text = self._after_ask(_SAY)
        if not text.startswith(_SAY.content):
            raise _rewritten(1, "with its generation prompt")
        close = text.removeprefix(_SAY.content)
        tokens = self._tokenizer.convert_ids_to_tokens(self._tokenizer.encode(close, add_special_tokens=False))
        if not tokens:
            raise InputError(
                "the chat template does not end an assistant turn",
                field="chat_template",
                hint="let it write a stop token (such as the end-of-sequence token) after the assistant's content",
            )
        special = [token for token in tokens if token in self._special]
        if special:
            return special[0], close[close.index(special[0]) :]
        first = self._tokenizer.encode(close, add_special_tokens=False)[:1]
        return self._tokenizer.decode(first), close

    def _other_stops(self) -> tuple[str, ...]:
        """Special tokens that end a turn with tool calls, where they differ."""
        try:
            text = self._after_ask(_CALL)
        except InputError:  # no tool calls in this template: reported where one is rendered
            return ()
        tokens = self._tokenizer.convert_ids_to_tokens(self._tokenizer.encode(text, add_special_tokens=False))
        last = [token for token in tokens if token in self._special][-1:]
        return tuple(token for token in last if token != self.stop and not text.endswith(self._close))

    def _check_local(self, features: Features) -> bool:
        messages, tools = features.probe()
        try:
            givens = [self.head(messages[: _turns(messages)[0]], tools), *self.follows(messages)]
            text = givens[0]
            for turn, given in zip(_turns(messages), givens[1:], strict=True):
                if text != self.render(messages[:turn], tools, generation_prompt=True):
                    return False
                said = self.said(messages[turn])
                text += said.text + said.stop + given
            return text == self.render(messages, tools, generation_prompt=True)
        except InputError:  # not renderable in this shape: whole renders decide, and name the message
            return False

    def _cut(self, messages: Sequence[Message], tools: Tools) -> list[str]:
        """The given texts of a whole render, checked at every assistant turn."""
        whole = self.render(messages, tools, generation_prompt=True)
        givens: list[str] = []
        start, seen = 0, 0
        for turn in _turns(messages):
            prompt = self.render(messages[:turn], tools, generation_prompt=True)
            if not whole.startswith(prompt):
                raise _rewritten(seen if len(commonprefix([whole, prompt])) >= start else 0)
            said = self.said(messages[turn])
            givens.append(whole[start : len(prompt)])
            start, seen = len(prompt) + len(said.text) + len(said.stop), turn
            if whole[len(prompt) : start] != said.text + said.stop:
                raise _rewritten(turn)
        return [*givens, whole[start:]]


def _turns(messages: Sequence[Message]) -> list[int]:
    return [index for index, message in enumerate(messages) if message.role == "assistant"]


def _rewritten(index: int, when: str = "once more messages follow") -> InputError:
    return InputError(
        f"the chat template renders message {index} differently {when}: history would be rewritten",
        field="messages",
        hint=_KEEP_HISTORY,
    )
