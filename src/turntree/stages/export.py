"""`turntree export pivots`: selected states with their verifier, in the format of another trainer.

A format is a part (`core.parts`, kind `pivot_formats`): a function `(bundle, out, *, options)` that writes files into
the new folder `out` and returns what the user must know, as JSON values.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turntree.core import parts
from turntree.core.config import Part
from turntree.core.errors import InputError
from turntree.core.messages import Message
from turntree.core.protocols import TurnState
from turntree.render.tool_calls import ToolFormat, detect_format, parse_message
from turntree.render.turns import calls_of
from turntree.rollout.local import CutTurns, cut_turns_of, rule_name
from turntree.run.files import replacing_folder
from turntree.stages.candidates import SelectedState, read_selected
from turntree.stages.verifier import chosen_verifier, open_verifier

TOOLS = "\n\n# Tools\n\nYou may call these functions, declared as JSON:\n"
# how most models spell control tokens, where none is named
_SPELLED = re.compile(r"<[|｜][^\s<>]+[|｜]>|</?s>|<(bos|eos|start_of_turn|end_of_turn)>|\[/?INST\]")


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """`turntree export pivots`."""

    pivots: str
    """The pivots file of `turntree select`."""
    pivot_format: Part
    """nemo-gym, trl, verl, skyrl, or module:function of your own."""
    traces: str | None = None
    """Path of the traces, if not the one in the pivots file."""
    verifier: Part | None = None
    """Default: the verifier of the profile; name custom code again."""
    model: str = ""
    """The policy's folder or name: prompts are then exactly those of its chat template, tools included."""


@dataclass(frozen=True, kw_only=True)
class ExportedPivot:
    """One pivot. `group` is that of its trace, which shares a split. `prompt` are chat messages for a trainer that
    passes no tools to the chat template; `text` is the same prompt rendered, None without a model. `pass_rate` is the
    reward mean of the profile, `weight` how often `train pivot` would draw it, relative to the others."""

    state: TurnState
    group: str
    kind: str
    role: str
    pass_rate: float | None
    reward_var: float | None
    prompt: list[dict[str, Any]]
    text: str | None
    weight: float


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """What a format writes. `verifier`, `tool_format` and `cut_turns` are the settings of the reward function;
    `stop_ids` end a turn of the policy (empty without a model). `profiled` is the verifier of the pass rates, as the
    profile names it. `dropped` counts the pivots left out, `spelled` the prompts whose words spell a control token;
    `notes` say what is not exact."""

    pivots: Sequence[ExportedPivot]
    verifier: Part
    tool_format: ToolFormat
    stop_ids: Sequence[int] = ()
    dropped: Counter[str] = field(default_factory=Counter[str])
    notes: Sequence[str] = ()
    cut_turns: CutTurns = "fail"
    profiled: str = ""
    spelled: int = 0

    def reward_settings(self) -> dict[str, Any]:
        named = {"verifier": self.verifier.name, "options": self.verifier.options}
        return {**named, "tool_format": self.tool_format, "cut_turns": self.cut_turns}


def run_export(config: ExportConfig, out: Path) -> dict[str, Any]:
    """Write the folder `out`; returns counts and notes. Pivots whose demonstration the verifier does not accept are
    left out and counted: no answer at such a state could ever be right. Raises `InputError` where `out` is there."""
    writer = parts.build("pivot_formats", config.pivot_format)
    if out.exists():
        raise InputError("is there already", path=out, hint="choose another --out, or delete it")
    bundle = bundle_of(config)
    with replacing_folder(out.resolve()) as folder:
        told = writer(bundle, folder)
    return {
        "path": str(out),
        "pivots": len(bundle.pivots),
        "dropped": dict(sorted(bundle.dropped.items())),
        "verifier": bundle.verifier.name,
        "control_tokens_in_words": bundle.spelled,
        **told,
        "notes": [*bundle.notes, *told.get("notes", ())],
    }


def bundle_of(config: ExportConfig) -> Bundle:
    """The pivots that a format writes. Raises `InputError` where nothing is left."""
    header, selected = read_selected(config.pivots, config.traces)
    verifier = chosen_verifier(config.verifier, header, config.pivots)
    kept, dropped, rule = _judged(selected, verifier, header["verifier"])
    if not kept:
        counted = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))
        raise InputError(f"holds no pivot to export ({counted})", path=config.pivots, hint="name another --verifier")
    write = _writer(config.model)
    pivots = [
        ExportedPivot(
            state=one.state,
            group=one.group,
            kind=one.row["kind"],
            role=one.row["role"],
            pass_rate=one.row["reward_mean"],
            reward_var=one.row["reward_var"],
            prompt=write.prompt(one.state),
            text=write.text(one.state),
            weight=one.row["weight"],
        )
        for one in kept
    ]
    notes, spelled = list(write.notes), sum(write.spells(one) for one in pivots)
    if spelled:
        notes.append(
            f"{spelled} prompts spell control tokens in the words of users, tools or the system: they stand there as "
            "written, and the other trainer may read them as the tokens"
        )
    if not config.model and any(one.state.tools for one in pivots):
        notes.append("rows without a field for tools list them in the system message: --model renders them as they are")
    if rule != header["verifier"]:  # another verifier, an older version of it, or one with an environment
        notes.append(f"pass rates are under {header['verifier']!r}, not {rule!r}: turntree rescore judges again")
    if unread := sum(not write.reads(one.state) for one in kept):
        notes.append(
            f"{unread} demonstrated turns are not read back from the text that the policy writes: the exported reward "
            "refuses them where the trainer does not read the calls itself"
        )
    if len({pivot.weight for pivot in pivots}) > 1:
        notes.append(
            "pivots have a weight (the balance over kinds of action, `select --weight`), in the column `weight`: "
            "trainers draw uniformly unless they are told to use it (as torch's WeightedRandomSampler does)"
        )
    return Bundle(
        pivots=pivots,
        verifier=verifier,
        tool_format=write.tool_format,
        stop_ids=write.stop_ids,
        dropped=dropped,
        notes=notes,
        cut_turns=cut_turns_of(header["verifier"]),
        profiled=header["verifier"],
        spelled=spelled,
    )


def _judged(
    selected: Sequence[SelectedState], verifier: Part, profiled: str
) -> tuple[list[SelectedState], Counter[str], str]:
    """Those whose demonstration is right, why others are not, and the rule's name beside `profiled`."""
    kept: list[SelectedState] = []
    dropped = Counter[str]()
    with open_verifier(verifier) as rule:
        for one in selected:
            reward = rule.judge(one.state, one.state.demonstration).reward
            if reward == 1:
                kept.append(one)
            else:
                dropped["demonstration_not_judged" if reward is None else "demonstration_refused"] += 1
        return kept, dropped, rule_name(rule, cut_turns_of(profiled))


# prompts


@dataclass(frozen=True)
class _Writer:
    """Turns a state into the messages and the text of its prompt."""

    prompt: Callable[[TurnState], list[dict[str, Any]]]
    text: Callable[[TurnState], str | None]
    hide: Callable[[str], str]
    """Changes a text that spells a control token."""
    reads: Callable[[TurnState], bool]
    """Whether the demonstrated calls are read in what the policy would write, with its special tokens or without."""
    tool_format: ToolFormat = "hermes"
    stop_ids: tuple[int, ...] = ()
    notes: Mapping[str, None] = field(default_factory=dict[str, None])  # each once

    def spells(self, pivot: ExportedPivot) -> bool:
        state = pivot.state
        words = [message.content for message in state.history if message.role != "assistant"]
        return any(self.hide(text) != text for text in (*words, json.dumps(state.tools, ensure_ascii=False)))


def _writer(model: str) -> _Writer:
    if not model:
        return _Writer(tools_as_text, lambda _: None, lambda text: _SPELLED.sub("", text), lambda _: True)
    from turntree.render import segments
    from turntree.render.words import Words
    from turntree.stages.policy import load_renderer

    tokenizer, renderer = load_renderer(model)
    if not tokenizer.chat_template:
        raise InputError("has no chat template", path=model, hint="leave --model out: tools are written as text then")
    notes: dict[str, None] = {}

    def rendered(messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> str:
        return segments.rendered(tokenizer, messages, tools)

    def prompt(state: TurnState) -> list[dict[str, Any]]:
        plain = [message.to_chat() for message in state.history]
        found = tools_as_rendered(plain, state.tools, rendered) if state.tools else plain
        if found is None:
            told = "the chat template shows tools outside the system message: they are written as text instead"
            notes.setdefault(told)
        return tools_as_text(state) if found is None else found

    def text(state: TurnState) -> str:
        whole = rendered([message.to_chat() for message in state.history], state.tools)
        ids = list(renderer.prompt(state.history, state.tools))
        for one in (whole, whole.removeprefix(str(tokenizer.bos_token))):  # a tokenizer may add the first token itself
            if tokenizer(one)["input_ids"] == ids:
                return one
        notes.setdefault("some prompts are not the tokens that were profiled: the template or the tokenizer differs")
        return whole

    tool_format = detect_format(str(tokenizer.chat_template))

    def reads(state: TurnState) -> bool:
        ids = [token for token in renderer.completion(state.demonstration) if token not in renderer.stop_ids]
        said = (str(tokenizer.decode(ids, skip_special_tokens=skipped)) for skipped in (False, True))
        meant = calls_of(state.demonstration)
        return all(calls_of(parse_message(text, tool_format)) == meant for text in said)

    ends = tuple(sorted(renderer.stop_ids))
    hide = Words(tokenizer, str(tokenizer.chat_template)).hide
    return _Writer(prompt, text, hide, reads, tool_format, ends, notes)


def tools_as_text(state: TurnState) -> list[dict[str, Any]]:
    """The history with the tools declared in its system message."""
    messages = [message.to_chat() for message in state.history]
    if not state.tools:
        return messages
    declared = TOOLS + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in state.tools)
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": messages[0]["content"] + declared}, *messages[1:]]
    return [Message("system", declared.strip()).to_chat(), *messages]


def tools_as_rendered(
    messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]], rendered: Callable[..., str]
) -> list[dict[str, Any]] | None:
    """Messages that give, without tools, the same text as `messages` with `tools`; None where the template has none.

    Most templates write tools into the system message. So what stands there with tools becomes its content.
    """
    mark = "\u2063turntree\u2063"
    rest = messages[1:] if messages and messages[0]["role"] == "system" else messages
    before, _, after = rendered([{"role": "system", "content": mark}, *rest]).partition(mark)
    whole = rendered(messages, tools)
    if not (whole.startswith(before) and whole.endswith(after)):
        return None
    system = {"role": "system", "content": whole[len(before) : len(whole) - len(after)]}
    found = [system, *rest]
    return found if rendered(found) == whole else None
