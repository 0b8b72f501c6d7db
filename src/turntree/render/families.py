"""Model families whose chat form a message-local template cannot express: the renderers of the package `renderers`.

That package writes messages as token ids, reads sampled ids and bridges to the next turn for some thirty families.
`FamilyRenderer` puts one of its renderers behind `core.protocols.Renderer`, as `segments` does with a template (see
`turns`). `choice` finds the family of a model folder.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any, cast

from turntree.core.errors import ConfigError, InputError, first_line
from turntree.core.foreign import needs, package
from turntree.core.messages import Message, ToolCall, whole_characters
from turntree.render.probes import ASK, CALL, RESULT, SAY, TOOL
from turntree.render.tool_calls import can_be_logged
from turntree.render.turns import Ids, Tools, TurnByTurn, check_complete, check_read, key_of, split, without_thoughts
from turntree.render.words import Words

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_THINKING = replace(SAY, reasoning="Hm, left.")
_OPEN_THOUGHT = "<think>\n"
_TOOLS = "You may call these functions:"


@dataclass(frozen=True)
class Family:
    """How to build one renderer of the package. `options` fix what would depend on the date or drop thoughts;
    `model_types` are those of config.json; `marks` are tokens that every vocabulary of the family has. `alone`: no
    other family has these marks, so they decide even where the folder's template differs in details."""

    marks: tuple[str, ...]
    model_types: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    alone: bool = False


_CHATML = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</think>")
_GLM = ("[gMASK]", "<|observation|>", "<tool_call>", "<arg_key>")
_DEEPSEEK = ("<｜User｜>", "<｜tool▁calls▁begin｜>")
_KIMI = ("<|im_middle|>", "<|tool_calls_section_begin|>")
_LAGUNA = ("<assistant>", "</assistant>", "<tool_call>", "〈|EOS|〉")
FAMILIES = {
    "qwen3": Family(_CHATML, ("qwen3", "qwen3_moe")),
    "qwen3.5": Family(_CHATML, ("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")),
    "qwen3.6": Family(_CHATML),
    "qwen3.8": Family(_CHATML),
    "qwen3-vl": Family(_CHATML, ("qwen3_vl", "qwen3_vl_moe")),
    "prime-qwen3": Family(_CHATML),
    "nemotron-3": Family(_CHATML, ("nemotron_h",)),
    "nemotron-3-ultra": Family(_CHATML),
    "nemotron-3.5": Family(_CHATML),
    "glm-4.5": Family(_GLM, ("glm4_moe",)),
    "glm-5": Family(_GLM, ("glm4_moe_lite", "glm_moe_dsa")),
    "glm-5.1": Family(_GLM),
    "glm-5.3": Family(_GLM),
    "gpt-oss": Family(
        ("<|channel|>", "<|call|>", "<|return|>"),
        ("gpt_oss",),
        {"auto_drop_analysis": False, "conversation_start_date": "2025-01-01"},
        alone=True,
    ),
    "deepseek-v3": Family(_DEEPSEEK, ("deepseek_v3",), alone=True),
    "deepseek-r1": Family(_DEEPSEEK, alone=True),
    "deepseek-v4": Family(("<｜User｜>", "｜DSML｜"), ("deepseek_v4",)),
    "llama-3": Family(("<|start_header_id|>", "<|eom_id|>"), ("llama",), {"date_string": "01 Jan 2025"}),
    "gemma4": Family(("<|turn>", "<|tool_call>", "<|channel>"), ("gemma4", "gemma4_text")),
    "kimi-k2": Family(_KIMI, ("kimi_k2",)),
    "kimi-k2.5": Family(_KIMI, ("kimi_k25",)),
    "minimax-m2": Family(("]~b]", "<minimax:tool_call>"), ("minimax_m2",)),
    "laguna-xs.2": Family(_LAGUNA, ("laguna",)),
    "laguna-m.1": Family(_LAGUNA),
    "laguna-xs-2.1": Family(_LAGUNA),
    "laguna-s-2.1": Family(_LAGUNA),
    "inkling": Family(("<|message_model|>", "<|content_model_end_sampling|>"), ("inkling",)),
    "hy3": Family(("<｜hy_Assistant:opensource｜>",), ("hy_v3", "hunyuan_v3")),
}


@needs("renderers", "renderers")
def family(
    tokenizer: PreTrainedTokenizerBase,
    argument: str | None = None,
    *,
    enable_thinking: bool | None = None,
    reasoning_effort: str | None = None,
    **more: Any,
) -> FamilyRenderer:
    """The renderer `family:NAME`: that of the package for the model family NAME, whatever the folder says.

    The options are those of the package's configuration for the family (`more`: any other of them, from Python only).
    Raises `ConfigError` for an unknown family or option, and `InputError` where the package or a token that the family
    needs is missing.

    Args:
        enable_thinking: Whether a turn begins with a thought (default: that of the family).
        reasoning_effort: Reasoning effort: low, medium, high (default: that of the family).
    """
    named = {"enable_thinking": enable_thinking, "reasoning_effort": reasoning_effort}
    options = {key: value for key, value in named.items() if value is not None} | more
    if argument not in FAMILIES:
        known = ", ".join(FAMILIES)
        said = f"{argument!r} is not a model family" if argument else "'family' names no model family"
        raise ConfigError(said, field="renderer", hint=f"family:NAME with one of {known}")
    settings = {"thinking_retention": "all", **FAMILIES[argument].options, **options}
    form = f"{' '.join(FAMILIES[argument].marks)} <think> {tokenizer.chat_template}"
    words = Words(tokenizer, form)
    source = _source(words, argument, settings)
    version = metadata.version("renderers")  # decides the tokens
    described = f"family:{argument} {json.dumps(settings, sort_keys=True)} renderers {version}"
    return FamilyRenderer(words, argument, source, described)


def has_option(name: str, option: str) -> bool:
    return option in _config(name).model_fields


def _config(name: str) -> Any:
    """The package's configuration class of a family."""
    configs = vars(package("renderers.configs", "renderers", "renderer"))
    kinds = [kind for kind in configs.values() if hasattr(kind, "model_fields")]
    return next(kind for kind in kinds if getattr(kind.model_fields.get("name"), "default", None) == name)


def _source(tokenizer: Words, name: str, given: dict[str, Any]) -> Any:
    """A renderer of the package. It does not get the tokenizer's name, which it would use to choose a form."""
    base, config = package("renderers.base", "renderers", "renderer"), _config(name)
    unknown = sorted(set(given) - set(config.model_fields))
    if unknown:
        hint = f"the family has {', '.join(sorted(set(config.model_fields) - {'name'}))}"
        raise ConfigError(f"{name} has no option {unknown[0]!r}", field=f"renderer.{unknown[0]}", hint=hint)
    try:
        settings = config(**given)
        return base.create_renderer(tokenizer, settings)
    except Exception as error:  # the boundary to foreign code
        problem = f"the tokenizer cannot be that of {name} ({first_line(error)})"
        raise InputError(problem, field="renderer", hint="choose another family, or none") from error


class FamilyRenderer(TurnByTurn):
    """`core.protocols.Renderer` over a renderer of the package; keeps the law of `template.ChatRenderer`.

    `thinks`: the family has a place for reasoning, elsewhere it is left out. `tools_as_text`: it has no place for
    tools, so they are written into the system message. `described`: all that decides the tokens beside the tokenizer.
    Raises `InputError` for messages that the family cannot write or would not read again.
    """

    def __init__(self, tokenizer: Words, name: str, source: Any, described: str) -> None:
        super().__init__()
        self.name, self.described = name, described
        self._tokenizer, self._source = tokenizer, source
        self.stop_ids = frozenset(cast("list[int]", source.get_stop_token_ids()))
        # The package opens gpt-oss's first channel for the policy; the model's template leaves the choice to it.
        self._opened = self._encode("<|channel|>analysis<|message|>") if name == "gpt-oss" else ()
        self._unread = self._encode("<|start|>assistant") if name == "gpt-oss" else ()
        self._ask = self._opening([ASK], ())
        self.tools_as_text = self._opening([ASK], [TOOL]) == self._ask
        self.thinks, self._marks = True, ("", "")  # nothing is taken for an open thought yet
        self.thinks = self._can_think()
        self._marks = self._find_marks()
        self.completion(SAY)  # raises here for a family that cannot be sampled turn by turn

    def _givens(self, messages: Sequence[Message], tools: Tools, first: int = 0) -> list[Ids]:
        run, rounds = split(messages)
        if not run:
            raise InputError("the conversation starts with the assistant", field="messages", hint="begin with a task")
        follows = [self._follow(part.turn, part.run) for part in rounds[max(first - 1, 0) :]]
        if first:
            return follows
        key = ("head", tuple(map(key_of, run)), json.dumps(list(tools)) if tools else "")
        return [self._segment(key, lambda: self._head(run, tools)), *follows]

    def _closing(self, message: Message) -> Ids:
        """A thought that was cut ends before its turn does."""
        inside = self.thinks and message.reasoning and not (message.tool_calls or message.content)
        end = self._encode(self._marks[1]) if inside else ()
        return (*end, self.completion(self._bare(message))[-1])

    def _words(self) -> tuple[Any, tuple[str, str]]:
        return self._tokenizer, self._marks if self.thinks else ("", "")

    def parse(self, token_ids: Sequence[int], tools: Tools = ()) -> Message:
        """`tools` decide between "true" and true where the family writes arguments without quotes."""
        text = self._decode([id for id in token_ids if id not in self.stop_ids])
        found = self._read([*self._unread, *token_ids], tools)
        opened, closed = self._marks
        begun = text.lstrip().startswith(opened)
        if closed not in text and (found.reasoning_content or begun):
            # The package ends an open thought at a call. What is only thought of must not be executed.
            return Message("assistant", "", reasoning=text.lstrip().removeprefix(opened).strip())
        said = text.partition(closed)[2] if closed and begun else text
        thought, reasoning = text.removesuffix(said), found.reasoning_content or ""
        if thought and found.tool_calls and self._read(self._encode(thought)).tool_calls:
            # GLM's and DeepSeek-V4's readers do so in a thought that ends later, too: what was said is read alone.
            reasoning = thought.lstrip().removeprefix(opened).removesuffix(closed).strip()
            found = self._read(self._encode(opened + closed + said), tools)
        calls = [_call(call, tools) for call in found.tool_calls]
        if not calls:
            return Message("assistant", found.content, reasoning=reasoning)
        heard, end = without_thoughts(said, opened, closed), self._call_end
        whole = heard == said or len(self._read(self._encode(heard), tools).tool_calls) == len(calls)
        if not whole or (end and said.count(end) > len(calls)) or None in calls:
            # half of a turn's calls must not be executed, and none of a later thought
            return Message("assistant", said.strip("\n") if reasoning else text, reasoning=reasoning)
        after = said.rpartition(end)[2].strip() if end else ""  # most readers drop it
        content = found.content if after in found.content else "\n".join(filter(None, (found.content, after)))
        return Message("assistant", content, tuple(cast("list[ToolCall]", calls)), reasoning=reasoning)

    @functools.cached_property
    def _call_end(self) -> str:
        """The mark behind a turn's last call; empty for a form that has none."""
        try:
            said, called = (
                self._decode([i for i in self._spoken(turn) if i not in self.stop_ids]) for turn in (SAY, CALL)
            )
        except InputError:
            return ""
        marks = re.findall(r"<[^<>]+>(?=\s*\Z)", called)
        return marks[0] if marks and marks[0] not in said else ""  # of inkling every message ends so

    def _read(self, ids: Sequence[int], tools: Tools = ()) -> Any:
        return self._source.parse_response(list(ids), tools=_plain(tools) or None, prompt_ids=list(self._ask))

    def _head(self, run: Sequence[Message], tools: Tools) -> Ids:
        messages = run
        if tools and self.tools_as_text:
            brief, rest = (messages[0], messages[1:]) if messages[0].role == "system" else (None, messages)
            said = "\n".join([_TOOLS, *(json.dumps(tool, ensure_ascii=False) for tool in tools)])
            said = said if brief is None else f"{brief.content}\n\n{said}"
            messages, tools = [Message("system", said), *rest], ()
        ids = self._opening(messages, tools)
        check_complete(lambda others: self._opening(others, tools), messages, (self._decode(ids), ids))
        return ids

    def written(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        """The text of a conversation and the opening of the next turn, in the family's own form."""
        return self._decode(self._opening(messages, tools))

    # segments

    def _bare(self, turn: Message) -> Message:
        """A turn as what follows it sees it: what answers a call depends on its name and id, so a policy's odd
        arguments refuse nothing."""
        bare = tuple(replace(call, arguments={}) for call in turn.tool_calls)
        return Message("assistant", tool_calls=bare) if bare else SAY

    def _follow(self, turn: Message, run: Sequence[Message]) -> Ids:
        """The tokens after a turn when a run of messages arrives: a function of these alone."""
        turn = self._bare(turn)
        key = ("follow", key_of(turn), tuple(map(key_of, run)))
        return self._segment(key, lambda: self._after(turn, run))

    def _after(self, turn: Message, run: Sequence[Message]) -> Ids:
        """What the family writes behind the turn, or else the package's bridge, where the family writes the turn
        otherwise once messages follow."""
        said = self.completion(turn)
        before = [*self._ask, *said]
        try:
            whole = self._tokenizer.decode_hidden(self._opening([ASK, turn, *run]))
        except InputError:  # only the bridge writes these messages
            whole = ""
        text = self._tokenizer.decode_hidden(before)
        if whole.startswith(text):
            return self._encode(whole[len(text) :])
        bridged = self._source.bridge_to_next_turn(list(self._ask), list(said), self._chats([turn, *run])[1:])
        if bridged is not None and bridged.token_ids[: len(before)] == before:
            return self._unopened(tuple(bridged.token_ids[len(before) :]))
        text = self._tokenizer.decode_hidden(before[:-1])  # without the stop token where that opens another's turn
        if whole.startswith(text):
            return self._encode(whole[len(text) :])
        if not run:
            return self._ask[len(self._render([ASK])) :]
        roles = " ".join(message.role for message in run)
        hint = f"after a turn {'with' if turn.tool_calls else 'without'} calls"
        raise InputError(f"{self.name} cannot go on with messages of roles {roles}", field="messages", hint=hint)

    def _say(self, message: Message) -> Ids:
        if not self.thinks:
            message = replace(message, reasoning="")
        ids = self._spoken(message)
        ends = [place for place, id in enumerate(ids) if id in self.stop_ids]
        if not ends:
            ids = (*ids, self._marker(bool(message.tool_calls)))
        elif self._decode(ids[ends[0] + 1 :]).strip():
            said = self._decode(ids[ends[0] + 1 :])[:40]
            problem = (
                f"{self.name} writes a stop token inside of this turn, before {said!r}: no policy goes on after it"
            )
            raise InputError(problem, field="tool_calls" if len(message.tool_calls) > 1 else "content")
        else:
            ids = ids[: ends[0] + 1]
        check_read(message, self.parse(ids, _declared(message)))
        return ids

    def _spoken(self, message: Message) -> Ids:
        """The part after the generation prompt: by tokens where these are a prefix, else by text. (A prompt that ends
        with a line end has taken half of a token of an empty thought, which has two of them between its marks.)"""
        ids = self._render([ASK, message])
        if ids[: len(self._ask)] == self._ask:
            return ids[len(self._ask) :]
        whole, prompt = self._decode(ids), self._decode(self._ask)
        if not whole.startswith(prompt) and not message.reasoning:
            thought = replace(message, reasoning=_THINKING.reasoning)  # the prompt has opened a thought: say none
            whole = self._decode(self._render([ASK, thought])).replace(_THINKING.reasoning, "", 1)
        if not whole.startswith(prompt) and prompt.endswith(_OPEN_THOUGHT):  # R1 never writes what was thought
            answer = whole.removeprefix(prompt.removesuffix(_OPEN_THOUGHT))
            whole = f"{prompt}{message.reasoning}\n</think>\n\n{answer}"
        if not whole.startswith(prompt):
            problem = f"{self.name} cannot render this turn after its generation prompt {prompt[-40:]!r}"
            raise InputError(problem, field="messages", hint="turn thinking on or off as the messages have it")
        return self._encode(whole[len(prompt) :])

    def _marker(self, calls: bool) -> int:
        """The stop token of a family whose turns end with the opening of the next one (GLM)."""
        turn, answer = (CALL, RESULT) if calls else (SAY, ASK)
        before, after = self._render([ASK, turn]), self._render([ASK, turn, answer])
        same = next((at for at, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
        marker = next((id for id in after[same:] if id in self.stop_ids), None)
        if marker is None:
            raise InputError(f"{self.name} does not end an assistant turn", field="messages")
        return marker

    def _can_think(self) -> bool:
        try:
            return _THINKING.reasoning in self._decode(self.completion(_THINKING))
        except InputError:
            return False

    def _find_marks(self) -> tuple[str, str]:
        """What begins a sampled thought ("" where the prompt has begun it) and what ends it."""
        if not self.thinks:
            return "" if self._decode(self._ask).rstrip().endswith("<think>") else "<think>", "</think>"
        before, _, after = self._decode(self.completion(_THINKING)).partition(_THINKING.reasoning)
        return before.strip(), after[: after.index(">") + 1].strip()

    # the package

    def _opening(self, messages: Sequence[Message], tools: Tools = ()) -> Ids:
        return self._unopened(self._render(messages, tools, generation_prompt=True))

    def _unopened(self, ids: Ids) -> Ids:
        return ids[: -len(self._opened)] if self._opened and ids[-len(self._opened) :] == self._opened else ids

    def _render(self, messages: Sequence[Message], tools: Tools = (), *, generation_prompt: bool = False) -> Ids:
        try:
            ids = self._source.render_ids(
                self._chats(messages), tools=self._hide(list(tools)) or None, add_generation_prompt=generation_prompt
            )
        except Exception as error:  # the boundary to foreign code
            roles = " ".join(message.role for message in messages)
            problem = f"{self.name} cannot write these messages ({first_line(error)})"
            raise InputError(problem, field="messages", hint=f"their roles are: {roles}") from error
        return tuple(ids)

    def _chats(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        chats = _chats(messages)
        if self.name.startswith("kimi"):
            _number_calls(chats)
        return [chat if chat["role"] == "assistant" else self._hide(chat) for chat in chats]

    def _hide(self, value: Any) -> Any:
        """gpt-oss's own encoder keeps words apart itself."""
        return value if self.name == "gpt-oss" else self._tokenizer.hide(value)

    def _encode(self, text: str) -> Ids:
        return tuple(self._tokenizer.encode(text))

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)


def _chats(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """As the package takes them. A result names its function where a call before it does (gpt-oss writes it)."""
    names: dict[str | None, str] = {}
    chats: list[dict[str, Any]] = []
    unanswered: list[str] = []
    for message in messages:
        chat = replace(message, content=whole_characters(message.content), cut=False).to_chat()
        if message.tool_calls:
            names |= {call.id: call.name for call in message.tool_calls if call.id is not None}
            unanswered = [call.name for call in message.tool_calls]
        if message.role == "tool":
            by_place = unanswered.pop(0) if unanswered else None
            name = message.name or names.get(message.tool_call_id) or by_place
            chat |= {"name": name} if name else {}
        chats.append(chat)
    return chats


def _number_calls(chats: list[dict[str, Any]]) -> None:
    """Kimi writes no names but ids of the form `functions.NAME:NUMBER`; those of others are renamed. A result without
    an id answers the calls in their order."""
    unanswered: list[tuple[str | None, str]] = []
    for chat in chats:
        if chat["role"] == "assistant":
            unanswered = []
        for number, call in enumerate(chat.get("tool_calls", ())):
            old, name = call.get("id"), call["function"]["name"]
            if not str(old).startswith(f"functions.{name}:"):
                call["id"] = f"functions.{name}:{number}"
            unanswered.append((old, call["id"]))
        if chat["role"] == "tool":
            given = chat.get("tool_call_id")
            place = next((k for k, (old, _) in enumerate(unanswered) if given in (None, old)), None)
            if place is not None:
                chat["tool_call_id"] = unanswered.pop(place)[1]


def _plain(tools: Tools) -> list[dict[str, Any]]:
    """Declarations without the wrapper that chat APIs put around them."""
    return [tool.get("function", tool) for tool in tools]


def _call(found: Any, tools: Tools) -> ToolCall | None:
    """A call that the package read, unless it is broken."""
    if not isinstance(found.name, str):
        return None
    arguments = found.arguments
    if found.status.value == "invalid_json" and isinstance(arguments, dict):
        arguments = _spelled_in_python(arguments, found.name, tools)
    elif found.status.value != "ok":
        return None
    try:
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    if not isinstance(arguments, dict) or not can_be_logged(arguments):
        return None
    return ToolCall(found.name, arguments, found.id)


def _spelled_in_python(arguments: dict[str, Any], name: str, tools: Tools) -> dict[str, Any] | None:
    """Qwen3.5's template writes True, False and None where its parser reads JSON only, and the package takes a text for
    broken where its type is one of a list."""
    parameters = next((tool.get("parameters") for tool in _plain(tools) if tool.get("name") == name), None)
    declared: dict[str, Any] = (parameters or {}).get("properties") or {}
    read = dict(arguments)
    for key, value in arguments.items():
        if not isinstance(value, str):
            continue
        kinds = _kinds(declared.get(key)) or {"string"}
        if value in _PYTHON and _TYPES.get(type(_PYTHON[value]), "null") in kinds:
            read[key] = _PYTHON[value]
        elif "string" not in kinds:
            return None
    return read


def _kinds(schema: Any) -> set[str]:
    """The types that a declaration names."""
    if not isinstance(schema, dict):  # none, or `true`
        return set()
    given: Any = schema.get("type", [])
    kinds = {given} if isinstance(given, str) else {*given}
    kinds |= {_TYPES.get(type(value), "null") for value in schema.get("enum", ())}
    return kinds.union(*(_kinds(each) for form in ("anyOf", "oneOf") for each in schema.get(form, ())))


_PYTHON = {"True": True, "False": False, "None": None}
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def _declared(message: Message) -> list[dict[str, Any]]:
    """Tools for which these calls are right."""
    found: dict[str, dict[str, Any]] = {}
    for call in message.tool_calls:
        types = {key: {"type": _TYPES.get(type(value), "null")} for key, value in call.arguments.items()}
        found.setdefault(call.name, {}).update(types)
    return [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": types}}}
        for name, types in found.items()
    ]
