"""The verifier `recommended`: does the action do what the demonstrated one does? It fails closed.

A call is judged by what acts in it: arguments under their declared schema, shell commands by their parsed words,
reading by the lines, searches by the query. Reward 1 needs every demonstrated call once and no other. Certain refusals
(another tool, an extra call, broken arguments, a claim to be done where the demonstration acts, another destructive
command) stay 0. Undecided cases (other words of a message, another command of the same tool) are 0 too, unless `then`
names a verifier that decides them. Where an environment is named and the trace says which task it is of, such calls are
played in copies and their effects are compared (`executed`).
"""

from __future__ import annotations

import posixpath
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from turntree.core.config import Part
from turntree.core.errors import ConfigError
from turntree.core.messages import Message, ToolCall, action_kind, answer_text
from turntree.core.protocols import TurnState, TurnVerifier
from turntree.core.verdict import Verdict
from turntree.verify.arguments import Remembered, SchemaUnusable, rules_of
from turntree.verify.kinds import (
    COMMAND,
    FOLDER,
    IDLE,
    PATH,
    QUERY,
    RANGE,
    URL,
    Kind,
    asks_in_words,
    command_text,
    idle_of,
    interpreter,
    kind_of,
    lines_of,
    of_any,
    types,
)
from turntree.verify.matching import perfect_matching
from turntree.verify.shell.commands import path
from turntree.verify.shell.script import Script
from turntree.verify.strict import canonical_json
from turntree.verify.texts import TERMINUS, Form, calls_in, form_of, plain, same_text
from turntree.verify.tool_call import Unjudgeable, declared
from turntree.verify.user import Chained, build_verifier

Open = Literal["", "played", "any"]  # what may decide: nothing more, only the effects, or any other verifier
Domain = Literal["auto", "swe", "terminal", "search"]
_USUAL = ("auto", "exact")  # options that the name does not say
_WIDER = 4  # how many times the demonstrated lines a reading call may ask for
_FOLDER = re.compile(
    r"\[Current working directory: ([^\]\n]+)\]|\(Current directory: ([^)\n]+)\)|<cwd>([^<\n]+)</cwd>"
    r"|\w@[\w.-]+:(?:([^\s#$]{0,4096})[#$]\s*\Z|[^\s#$]{0,4096}[#$])"  # a prompt, which tells it at the end only
)
_MOVES = re.compile(  # in a command: may lead elsewhere
    r"(?<![\w./-])(cd|pushd|popd|source|eval|exec)(?![\w./-])|(?:^|[;&|({\n\"'])\s*\.\s+\S"
)
_FOR_A_PROGRAM = re.compile(r"^\s", re.MULTILINE)
_OPERATORS = frozenset({"OR", "AND", "NOT"})  # of search engines, in capitals only


class Reading(NamedTuple):
    """A call, read. `key` is equal for calls that do the same; `acts` is False where it surely changes nothing, so that
    its place among the others does not matter."""

    call: ToolCall  # with normalised arguments
    kind: Kind
    key: Any
    acts: bool
    destroys: frozenset[Any]


@dataclass(frozen=True)
class _Gold:
    """A prepared demonstration, for judging many actions. `calls` is None for a message; `form` is that of a text that
    acts."""

    form: Form | None
    calls: tuple[Reading, ...] | None
    folder: str | None


@dataclass(eq=False, kw_only=True)
class Recommended(Chained):
    """1 iff the action does what the demonstrated one does, as far as rules can tell (docs/design/reward.md).

    With an environment, calls that the rules leave open are played in copies; `then` is asked about the rest.
    """

    domain: Domain = "auto"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Where no tools are declared, with "terminal" a text without a call is a shell command, and with "swe" the last
    block of a text is one, as a SWE-agent has it. The others differ in nothing."""
    messages: Literal["exact", "any", "unjudged"] = "exact"
    """What a message is worth that is not the demonstrated one but for case and spacing: "exact" 0, "any" 1 (unless it
    is blank), "unjudged" none."""
    kinds: dict[str, str] | None = None
    """Of what kind a tool is, by its name (shell, edit, read, search, open, finish, think, other)."""
    idle: dict[str, tuple[str, ...]] | None = None
    """Which arguments of a tool do not act, by its name."""

    def __post_init__(self) -> None:
        known = set(IDLE)
        for tool, kind in (self.kinds or {}).items():
            if kind not in known:
                raise ConfigError(f"is {kind!r}", field=f"kinds.{tool}", hint=f"use one of {', '.join(sorted(known))}")
        self._kinds: Mapping[str, Kind] = dict(self.kinds or {})  # pyright: ignore[reportAttributeAccessIssue]
        self._idle = {tool: frozenset(names) for tool, names in (self.idle or {}).items()}
        self._gold: Remembered[_Gold] = Remembered()
        given = {name: getattr(self, name) for name in ("domain", "messages", "kinds", "idle")}
        options = [f"{key}={canonical_json(value)}" for key, value in given.items() if value not in (None, {}, *_USUAL)]
        self._played: TurnVerifier | None = None
        if self.environment is not None and (self.then is None or self.then.name != "executed"):
            self._played = build_verifier(Part("executed"), self.environment)
            options.append(f"effects={self._played.name}")
        self._one = threading.Lock()  # an environment is played by one thread
        self.chain(["recommended/8", *options])

    def close(self) -> None:
        super().close()
        if self._played is not None:
            self._played.close()

    def judge(self, state: TurnState, action: Message) -> Verdict:
        kind = action_kind(action)
        try:
            gold = self._gold.of(state, lambda: self._read_gold(state))
        except (SchemaUnusable, Unjudgeable, ValueError, RecursionError) as error:
            return Verdict(None, f"unjudgeable demonstration: {_line(error)}", kind)
        try:
            reward, reason, undecided = self._compared(state, gold, action)
        except SchemaUnusable as error:
            return Verdict(None, f"unjudgeable action: {_line(error)}", kind)
        except (ValueError, RecursionError) as error:
            return Verdict(0.0, f"invalid arguments: {_line(error)}", kind)
        if undecided and self._played is not None and action.tool_calls and state.environment is not None:
            with self._one:
                effect = self._played.judge(state, action)
            if effect.reward is not None or self._then is None:
                return effect
        if undecided == "any" and self._then is not None:
            return self._then.judge(state, action)
        return Verdict(reward, reason, kind)

    # comparing

    def _compared(self, state: TurnState, gold: _Gold, action: Message) -> tuple[float | None, str, Open]:
        """Reward, reason, and what may decide where rules leave it open."""
        if gold.calls is None:
            return self._message(state.demonstration, action)
        calls = calls_in(action, gold.form)
        if calls is None or bool(action.tool_calls) != bool(state.demonstration.tool_calls):  # a call that is only text
            return 0.0, "a message instead of a call" if action.content.strip() else "an empty message", ""
        if len(calls) != len(gold.calls):
            return 0.0, "more calls" if len(calls) > len(gold.calls) else "fewer calls", ""
        if sorted(call.name for call in calls) != sorted(shown.call.name for shown in gold.calls):
            return 0.0, "another tool", ""
        found = [self._read(call, state.tools, gold.folder) for call in calls]
        problem = invalid(calls, state.tools)
        if self._matched(gold, found):
            return (1.0, "does the same", "") if problem is None else (0.0, problem, "")
        destroyed = _destroyed(gold.calls), _destroyed(found)
        if _claims(gold.calls) != _claims(found):
            return 0.0, "another claim to be done", ""
        if destroyed[0] != destroyed[1]:  # one that destroys is never equal to one that does not, whatever it leaves
            return 0.0, "another destructive command", "played" if all(destroyed) and problem is None else ""
        return (0.0, "other arguments", "any") if problem is None else (0.0, problem, "")

    def _message(self, shown: Message, action: Message) -> tuple[float | None, str, Open]:
        if action.tool_calls:
            return 0.0, "a call instead of a message", ""
        text = answer_text(action)
        if not text:
            return 0.0, "an empty message", ""
        if same_text(text, answer_text(shown)):
            return 1.0, "the same text", ""
        if self.messages == "any":
            return 1.0, "a message", ""
        return (None, "other text, not judged", "any") if self.messages == "unjudged" else (0.0, "other text", "any")

    def _matched(self, gold: _Gold, found: Sequence[Reading]) -> bool:
        """Whether every demonstrated call is made once; calls that act keep their order, and what is read before one of
        them is not read after it."""
        assert gold.calls is not None
        if len(found) == 1:
            return self._same(gold, gold.calls[0], found[0])
        sides = [_stretches(side) for side in (gold.calls, found)]
        if len(sides[0]) != len(sides[1]):
            return False
        return all(perfect_matching(a, b, lambda x, y: self._same(gold, x, y)) for a, b in zip(*sides, strict=True))

    def _same(self, gold: _Gold, shown: Reading, tried: Reading) -> bool:
        if shown.key == tried.key:
            return True
        alike = shown.call.name == tried.call.name and shown.kind == tried.kind == "read"
        return alike and self._shows_it(shown, tried, gold.folder)

    def _shows_it(self, shown: Reading, tried: Reading, folder: str | None) -> bool:
        """Whether the tried call reads at least the lines that the demonstrated one reads, and not many more."""
        rests = [(one.call.name, self._fields(one.call, one.kind, folder, leave=RANGE)) for one in (shown, tried)]
        wanted, asked = lines_of(shown.call.arguments), lines_of(tried.call.arguments)
        if rests[0] != rests[1] or wanted is None or asked is None or wanted[1] is None or asked[1] is None:
            return False
        covers = min(1, wanted[0]) <= asked[0] <= wanted[0] and asked[1] >= wanted[1]
        return covers and asked[1] - asked[0] + 1 <= _WIDER * (wanted[1] - wanted[0] + 1)

    # reading

    def _read_gold(self, state: TurnState) -> _Gold:
        shown = state.demonstration
        form = form_of(state, self.domain)
        calls = calls_in(shown, form)
        if calls is None:
            if not answer_text(shown):
                raise Unjudgeable("it is empty")
            if form is not None:
                raise Unjudgeable("its action cannot be read")
            return _Gold(None, None, None)
        folder = folder_in(state.history) or None
        read = tuple(self._read(call, state.tools, folder) for call in calls)
        problem = invalid(calls, state.tools)
        if problem is not None:
            raise Unjudgeable(problem)
        return _Gold(form, read, folder)

    def _read(self, call: ToolCall, tools: tuple[dict[str, Any], ...], folder: str | None) -> Reading:
        """Raises `SchemaUnusable` for an invalid declaration, ValueError for a call that cannot be read."""
        known = declared(tools)
        if known and call.name in known:
            schema = known[call.name]["function"].get("parameters")
            arguments = rules_of(schema).normal(call.arguments)
        else:
            schema = None
            arguments = call.arguments if known else _by_value(call.arguments)
        call = ToolCall(call.name, arguments)
        kind = "shell" if call.name == TERMINUS else kind_of(call, self._kinds)
        if kind == "other":
            idle = self._idle.get(call.name)
            acting = {k: v for k, v in arguments.items() if k not in idle} if idle else arguments
            return Reading(call, kind, (call.name, canonical_json(acting)), False, frozenset())
        if kind == "shell":
            return self._shell(call, folder)
        key = (call.name, self._fields(call, kind, folder, schema=schema))
        return Reading(call, kind, key, kind == "edit", frozenset())

    def _shell(self, call: ToolCall, folder: str | None) -> Reading:
        arguments = call.arguments
        if call.name == TERMINUS:
            keys, marked = str(arguments["keys"]), str(arguments["marked"])
            script = Script.of(keys, folder)
            typed = _typed(keys, script) if keys == marked else ("text", marked)
            key = (call.name, *typed, arguments["done"], arguments["form"])
            return Reading(call, "shell", key, True, script.destroys)
        command = of_any(arguments, COMMAND)
        text = None if command is None else command_text(command[1])
        where = of_any(arguments, FOLDER)
        start = where[1] if where is not None and isinstance(where[1], str) else folder
        script = Script.of(text or "", start)
        leave = frozenset({command[0] if command is not None and text is not None else ""})
        rest = self._fields(call, "shell", folder, leave=leave)
        if text is not None and types(call):
            typed = _typed(text, script)
            reads = script.only_reads and typed == (script.meaning, "sent")
            return Reading(call, "shell", (call.name, *typed, rest), not reads, script.destroys)
        empty = text is None or not text.strip()
        key = (call.name, None if empty else script.meaning, rest, command and interpreter(command[1]))
        return Reading(call, "shell", key, not script.only_reads, script.destroys)

    def _fields(
        self,
        call: ToolCall,
        kind: Kind,
        folder: str | None,
        *,
        leave: frozenset[str] = frozenset(),
        schema: dict[str, Any] | None = None,
    ) -> tuple[Any, ...]:
        """The acting arguments in a fixed form, without those of `leave`. `schema`: of a declared tool."""
        idle = self._idle.get(call.name, idle_of(call, kind, schema))
        found: list[tuple[str, Any]] = []
        if kind == "think":  # any thought will do, none will not
            found.append(("thinks", any(str(call.arguments.get(name, "")).strip() for name in idle)))
        for name, value in sorted(call.arguments.items()):
            if name in leave or name in idle:
                continue
            if name in FOLDER and isinstance(value, str):
                value = path(value, folder, is_folder=True)
                start = folder and path(folder, None, is_folder=True)
                if start and posixpath.join(start, ".") in (value, posixpath.join(value, ".")):
                    continue
            elif name in PATH and isinstance(value, str) and kind in ("edit", "read"):
                value = path(value, folder)
            elif name in QUERY and kind == "search" and isinstance(value, str):
                value = query(value) if asks_in_words(call, value, schema) else value
            elif name in URL and kind == "open" and isinstance(value, str):
                value = url(value)
            found.append((name, canonical_json(value)))
        return tuple(found)


def invalid(calls: Sequence[ToolCall], tools: tuple[dict[str, Any], ...]) -> str | None:
    """How a call violates its declaration; None where no tools are declared. Raises `SchemaUnusable`."""
    known = declared(tools)
    for call in calls:
        if not known or call.name == TERMINUS:
            continue
        if call.name not in known:
            return f"{call.name!r} is not declared"
        problem = rules_of(known[call.name]["function"].get("parameters")).problem(call.arguments)
        if problem is not None:
            return f"invalid arguments: {call.name!r}: {problem}"
    return None


def folder_in(history: Sequence[Message]) -> str | None:
    """Where the shell is after a history, as far as the harness says it (OpenHands, SWE-agent, Codex, a prompt); ""
    where nothing says it. None where it is not known: it may have moved since, the last prompt names no absolute path,
    or something stands behind that prompt."""
    for message in reversed(history):
        if message.role in ("tool", "user") and (found := _FOLDER.findall(message.content)):
            where = next(filter(None, found[-1]), "").strip()
            return where if where.startswith("/") else None
        commands = [of_any(call.arguments, COMMAND) for call in message.tool_calls]
        texts = [str(command[1]) for command in commands if command is not None]
        if message.role == "assistant" and not commands:
            texts = [answer_text(message)]  # may be a command, in whatever form
        if any(_MOVES.search(text.replace("\\n", "\n")) for text in texts):  # as JSON and lists write a line end
            return None
    return ""


def query(text: str) -> str:
    """A search query without case, spacing and the punctuation that ends words; quotes and operators stay."""
    words = (word if word in _OPERATORS else plain(word).rstrip(".,;!?") for word in text.split())
    return " ".join(word for word in words if word)


def url(text: str) -> str:
    """An address without the parts that a server does not see or distinguish; `#/route` is a page of its own."""
    found = urlsplit(text.strip())
    where = found.path.rstrip("/")
    asked = f"?{found.query}" if found.query else ""
    asked += f"#{found.fragment}" if found.fragment.startswith(("/", "!")) else ""
    return f"{found.scheme.lower()}://{found.netloc.lower()}{where}{asked}" if found.netloc else text.strip()


def _by_value(value: Any) -> Any:
    """JSON numbers by value, where no schema says what they are."""
    if isinstance(value, dict):
        return {key: _by_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_by_value(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _stretches(calls: Sequence[Reading]) -> list[list[Reading]]:
    """Each call that acts alone, and between them those that do not, in any order."""
    found: list[list[Reading]] = [[]]
    for one in calls:
        if one.acts:
            found += [[one], []]
        else:
            found[-1].append(one)
    return found


def _typed(keys: str, script: Script) -> tuple[Any, str]:
    """Keystrokes by what they do, and whether they are sent. A blank or indented line may be for a program that asks or
    for an interpreter, where it counts as it is; so does a line that goes on."""
    ending = "sent" if keys.endswith("\n") else "typed" if keys else "nothing"
    return (("text", keys) if ending == "typed" or _FOR_A_PROGRAM.search(keys) else script.meaning), ending


def _destroyed(calls: Sequence[Reading]) -> set[Any]:
    return {command for one in calls if one.destroys for command in one.destroys}


def _claims(calls: Sequence[Reading]) -> list[Any]:
    """Whether a Terminus answer claims to be done: nothing makes a claim and none equal."""
    return [one.call.arguments.get("done") for one in calls if one.call.name == TERMINUS]


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
