"""Choice of the renderer for a model, by the contents of its folder and the output of its template, never by a name."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turntree.core.errors import InputError
from turntree.core.messages import Message
from turntree.core.protocols import Renderer
from turntree.render.families import FAMILIES, FamilyRenderer, family, has_option
from turntree.render.probes import ASK, BRIEF, CALL, RESULT, SAY, SECOND_RESULT, TOOL, TWO_CALLS
from turntree.render.segments import rendered
from turntree.render.template import ChatRenderer
from turntree.render.tool_calls import ToolFormat
from turntree.render.turns import Tools
from turntree.run.jsonl import placed, read_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE = "template"
_ADAPTER = "adapter_config.json"

_MOST_DIFFERENCES = 2
_HEADS = {
    "a question": ([ASK], False),
    "a system message": ([BRIEF, ASK], False),
    "tools": ([BRIEF, ASK], True),
}
_LOOP = "a tool loop"
_TURNS = {
    _LOOP: ([BRIEF, ASK, CALL, RESULT], True),
    "a talk": ([ASK, SAY, ASK], False),
    "two calls in a turn": ([BRIEF, ASK, replace(TWO_CALLS, content="I look."), RESULT, SECOND_RESULT], True),
    "a thought before a call": ([BRIEF, ASK, replace(CALL, reasoning="A map, then."), RESULT], True),
}
_PROBES = _HEADS | _TURNS


@dataclass(frozen=True)
class Choice:
    """`name` is `template` or `family:NAME`, as `--renderer` takes it; `options` are those that the choice found."""

    name: str
    why: str
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    def build(self, tokenizer: PreTrainedTokenizerBase) -> Renderer:
        kind, _, argument = self.name.partition(":")
        if kind == "family":
            return family(tokenizer, argument, **self.options)
        if not tokenizer.chat_template:
            hint = "use an instruction-tuned policy, or add a chat_template.jinja to the folder"
            raise InputError(f"the tokenizer has no chat template ({self.why})", hint=hint)
        return ChatRenderer(tokenizer)


def renderer_of(
    tokenizer: PreTrainedTokenizerBase, folder: Path | None = None, *, tool_format: ToolFormat | None = None
) -> Renderer:
    """The renderer `auto`: the one that `choose` finds, or the model's template where `tool_format` is given. Raises
    `InputError` where no renderer fits the model.

    Args:
        tool_format: How the policy writes tool calls: hermes, json, pythonic, tags, react, none (default: as its chat
            template does).
    """
    if tool_format is not None:
        return ChatRenderer(tokenizer, tool_format=tool_format)
    with placed(path=folder):
        return choose(tokenizer, folder).build(tokenizer)


def choose(tokenizer: PreTrainedTokenizerBase, folder: Path | None = None) -> Choice:
    """A family is chosen if its tokens are in the vocabulary and it renders test conversations as the folder's own
    template does; without a template, by the model type in config.json. Otherwise the template renderer is used, which
    reports its own limits."""
    vocabulary = tokenizer.get_vocab()
    model_type = _model_type(folder)
    names = [name for name, of in FAMILIES.items() if all(mark in vocabulary for mark in of.marks)]
    names.sort(key=lambda name: model_type not in FAMILIES[name].model_types)
    if not names:
        return Choice(TEMPLATE, "no family of the package `renderers` has these special tokens")
    if not tokenizer.chat_template:
        return _without_template(names, model_type)
    try:
        has_option(names[0], "name")
    except InputError as missing:
        return Choice(TEMPLATE, f"the families {', '.join(names)} were not tried: {missing}")
    return _fits(tokenizer, names)


def _fits(tokenizer: PreTrainedTokenizerBase, names: list[str]) -> Choice:
    """The first family that writes as the template does, else the nearest that is near enough, else the template."""
    wanted = {key: written(tokenizer, messages, [TOOL] if tools else ()) for key, (messages, tools) in _PROBES.items()}
    fits: list[tuple[list[str], str, dict[str, Any]]] = []
    for name, options, renderer in _candidates(tokenizer, names):
        different = [key for key, text in wanted.items() if not _alike(renderer, key, text)]
        if not different:
            why = f"{len(_PROBES)} made-up conversations look as the folder's template writes them"
            return Choice(f"family:{name}", why, options)
        fits.append((different, name, options))
    fits.sort(key=lambda fit: len(fit[0]))
    for different, name, options in fits:
        if _near_enough(name, different):
            why = f"its prompts look as the folder's template writes them; different: {', '.join(different)}"
            return Choice(f"family:{name}", why, options)
    if not fits:
        return Choice(TEMPLATE, f"the tokens of {', '.join(names)} are there, but none of these can be built")
    different, name, _ = fits[0]
    return Choice(TEMPLATE, f"the nearest family, {name}, writes otherwise: {', '.join(different)}")


def _near_enough(name: str, different: list[str]) -> bool:
    """The prompt must equal the template's exactly. Later turns may differ in equivalent details; where the special
    tokens belong to this family only, its own rendering of later turns is preferred."""
    if FAMILIES[name].alone:
        return next(iter(_HEADS)) not in different
    if any(key in _HEADS for key in different):
        return False
    return _LOOP not in different and len(different) <= _MOST_DIFFERENCES


def _candidates(
    tokenizer: PreTrainedTokenizerBase, names: list[str]
) -> Iterator[tuple[str, dict[str, Any], FamilyRenderer]]:
    for name in names:
        given: list[dict[str, Any]] = [{}]
        if has_option(name, "enable_thinking"):
            given += [{"enable_thinking": True}, {"enable_thinking": False}]
        for options in given:
            with contextlib.suppress(InputError):
                yield name, options, family(tokenizer, name, **options)


def _alike(renderer: FamilyRenderer, key: str, wanted: str | None) -> bool:
    """Whether the family renders this probe as the template does. A probe that either cannot render does not count as a
    difference: the template renderer could not serve it either, and the family raises an error on use."""
    messages, tools = _PROBES[key]
    try:
        return wanted is None or renderer.written(messages, [TOOL] if tools else []) == wanted
    except InputError:
        return key not in _HEADS


def written(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Tools = ()) -> str | None:
    """A conversation by the folder's own template, with a fixed date and the opening of the next turn; None where it
    cannot be written or there is no template. Some templates want arguments as JSON text."""
    if not tokenizer.chat_template:
        return None
    for as_text in (False, True):
        chats = [message.to_chat() for message in messages]
        for call in (call for chat in chats for call in chat.get("tool_calls", ()) if as_text):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        try:
            return rendered(tokenizer, chats, list(tools))
        except InputError:
            raise
        except Exception:  # the boundary to foreign code: a template may raise anything
            continue
    return None


def _without_template(names: list[str], model_type: str | None) -> Choice:
    first = names[0]
    if model_type in FAMILIES[first].model_types:
        return Choice(f"family:{first}", f"the folder has no chat template and model type {model_type!r}")
    if FAMILIES[first].alone:
        return Choice(f"family:{first}", "the folder has no chat template, and its special tokens are of this family")
    return Choice(TEMPLATE, f"the folder has no chat template; the tokens of {', '.join(names)} are there: name one")


def _model_type(folder: Path | None) -> str | None:
    """That of config.json; an adapter's folder has none and names its base, a folder or a model in the Hub's cache."""
    from transformers.utils.hub import cached_file

    if folder is None:
        return None
    try:
        if (folder / _ADAPTER).is_file():
            base: str | Path = str(read_config(folder / _ADAPTER).get("base_model_name_or_path"))
            name, _, revision = base.partition("@")
            if not Path(base).is_dir():
                file = cached_file(name, "config.json", revision=revision or None, local_files_only=True)
                base = Path(file or base).parent
            folder = Path(base)
        kind = read_config(folder / "config.json").get("model_type")
    except (OSError, ValueError, InputError):
        return None
    return kind if isinstance(kind, str) else None
