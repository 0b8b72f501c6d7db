"""What the reward functions of all frameworks share: a state as one text column, and a verifier that is built once.

A framework hands its reward function the columns of a row and the text that was sampled. The column `state` holds
everything that a verifier may look at, as JSON text, because columns with a schema would add null arguments to tool
calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast, get_args

from turntree.core.config import Part
from turntree.core.errors import ConfigError, InputError
from turntree.core.messages import THOUGHT, Message
from turntree.core.protocols import TurnState, TurnVerifier
from turntree.core.verdict import Verdict
from turntree.render.tool_calls import ToolFormat, parse_message
from turntree.run.files import write_text

if TYPE_CHECKING:
    from turntree.rollout.local import CutTurns

_BEGUN = "<think>"


def pack_state(state: TurnState) -> str:
    """The state as JSON text; the inverse of `unpack_state`."""
    chat = {"history": [message.to_chat() for message in state.history], "demonstration": state.demonstration.to_chat()}
    return json.dumps({**dataclasses.asdict(state), **chat}, ensure_ascii=False)


def unpack_state(text: str) -> TurnState:
    """Raises `InputError` for text that `pack_state` did not write."""
    try:
        row: dict[str, Any] = json.loads(text)
        row["history"] = tuple(Message.from_chat(message) for message in row["history"])
        row["demonstration"] = Message.from_chat(row["demonstration"])
        row["tools"] = tuple(row["tools"])
        return TurnState(**row)
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"is not a state of exported pivots ({error})", field="state", hint="export again") from error


class Settings(TypedDict, total=False):
    """What a reward function passes on to its `Judge`."""

    options: Mapping[str, Any] | None
    tool_format: ToolFormat
    cut_turns: CutTurns


class Judge:
    """The verifier `verifier` for texts. It is built at the first verdict, so that every worker process of a framework
    has its own. Safe to call from many threads.

    `tool_format` is how the policy writes tool calls (`render.tool_calls`).
    """

    def __init__(
        self,
        verifier: str,
        *,
        options: Mapping[str, Any] | None = None,
        tool_format: ToolFormat = "hermes",
        cut_turns: CutTurns = "fail",
    ) -> None:
        if tool_format not in get_args(ToolFormat):
            hint = f"use one of {', '.join(get_args(ToolFormat))}"
            raise ConfigError(f"is {tool_format!r}", field="tool_format", hint=hint)
        self._part = Part(verifier, dict(options or {}))
        self._tool_format: ToolFormat = tool_format
        self._cut_turns: CutTurns = cut_turns
        self._lock = threading.Lock()
        self._open = contextlib.ExitStack()
        self._verifier: TurnVerifier | None = None

    def action(self, said: Any, *, cut: bool = False) -> Message:
        """The assistant message in what a framework sampled: text, a chat message, or a list of them (the first).

        A thought that is still in the text is reasoning, as a renderer has it: no verifier may take it for an action.
        The prompt may have begun it. One that does not end leaves nothing said."""
        if isinstance(said, list):
            said = cast("list[Any]", said)[0] if said else ""
        given = Message("assistant", said) if isinstance(said, str) else Message.from_chat(said)
        read = given if given.tool_calls else parse_message(given.content, self._tool_format)
        thought, text = "", given.content.lstrip()
        if text.startswith(_BEGUN) or THOUGHT in read.content:  # not in a call's argument: that ends no thought
            thought, ended, text = text.removeprefix(_BEGUN).partition(THOUGHT)
            text = text.lstrip("\n")
            known = given.tool_calls and ended
            read = dataclasses.replace(given, content=text) if known else parse_message(text, self._tool_format)
        return dataclasses.replace(read, cut=cut, reasoning=thought.strip("\n") or given.reasoning)

    def __call__(self, pairs: Sequence[tuple[str, Message]]) -> list[Verdict]:
        """The verdicts on actions at packed states, in order."""
        # not with the module: an audit, which recognises every partner's log, judges nothing
        from turntree.rollout.local import judge_turns
        from turntree.stages.verifier import open_verifier

        states = {packed: unpack_state(packed) for packed in {packed for packed, _ in pairs}}
        with self._lock:  # most verifiers keep processes or caches that one thread at a time may use
            if self._verifier is None:
                self._verifier = self._open.enter_context(open_verifier(self._part))
            return judge_turns(self._verifier, [(states[p], a) for p, a in pairs], cut_turns=self._cut_turns)


def required(verdict: Verdict, unjudged: float | None) -> float:
    """The reward for a framework that knows no missing one: `unjudged` stands in for it. Raises `InputError` without
    it, because an action that was not judged is not a failed one."""
    if verdict.reward is not None:
        return verdict.reward
    if unjudged is None:
        hint = "give the reward function unjudged=NUMBER to train on, or repair the verifier"
        raise InputError(f"an action was not judged ({verdict.reason})", field="reward", hint=hint)
    return unjudged


def write_reward(out: Path, says: str, names: Sequence[str], settings: Mapping[str, Any]) -> None:
    """Write `reward.py`: `names` are (the factory's module, the factory, the name that the framework looks for)."""
    module, factory, name = names
    given = ", ".join(f"{key}={value!r}" for key, value in settings.items())
    write_text(out / "reward.py", f'"""{says}"""\n\nfrom {module} import {factory}\n\n{name} = {factory}({given})\n')
