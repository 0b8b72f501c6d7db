"""Copies of a demonstration for the audit: broken ones with another effect, and equivalent ones.

Each is None where it does not apply. Nothing is drawn at random.
"""

from __future__ import annotations

import dataclasses
import json
import posixpath
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any, cast

from turntree.core.messages import Message, ToolCall, answer_text
from turntree.core.protocols import TurnState
from turntree.verify.kinds import COMMAND, PATH, idle_of, kind_of, of_any
from turntree.verify.recommended import folder_in
from turntree.verify.shell.commands import COMMANDS
from turntree.verify.shell.script import Script
from turntree.verify.texts import terminus_in

Rewrite = Callable[[TurnState], Message | None]
_FILE = re.compile(r"^(?!-)[\w./-]*[\w-]+\.[A-Za-z]\w*$")
_SIMPLE = re.compile(r"^[\w./ =:,+-]+$")  # a command without anything that the shell reads


@dataclasses.dataclass(frozen=True)
class _Place:
    """A text inside a demonstration, and the demonstration with another one there."""

    text: str
    put: Callable[[str], Message]


def _first(state: TurnState, change: Callable[[ToolCall], ToolCall | None]) -> Message | None:
    """The demonstration with its first call changed."""
    calls = state.demonstration.tool_calls
    changed = change(calls[0]) if calls else None
    return None if changed is None else dataclasses.replace(state.demonstration, tool_calls=(changed, *calls[1:]))


def _with(call: ToolCall, name: str, value: Any) -> ToolCall:
    return dataclasses.replace(call, arguments={**call.arguments, name: value})


def _argument(state: TurnState, name: str) -> _Place:
    call = state.demonstration.tool_calls[0]
    return _Place(call.arguments[name], lambda text: cast(Message, _first(state, lambda one: _with(one, name, text))))


def _command(state: TurnState) -> _Place | None:
    """The shell command of a demonstration: of its first call, or the keystrokes of a Terminus answer."""
    if state.demonstration.tool_calls:
        call = state.demonstration.tool_calls[0]
        found = of_any(call.arguments, COMMAND) if kind_of(call) == "shell" else None
        return _argument(state, found[0]) if found is not None and isinstance(found[1], str) else None
    text = answer_text(state.demonstration)
    if terminus_in(text) is None or not text.startswith("{"):
        return None
    row = json.loads(text)
    if not row["commands"]:
        return None

    def put(keys: str) -> Message:
        first, *rest = row["commands"]
        changed = {**row, "commands": [{**first, "keystrokes": keys}, *rest]}
        return Message("assistant", json.dumps(changed))

    return _Place(row["commands"][0]["keystrokes"], put)


def _file(state: TurnState) -> _Place | None:
    """The path of a first call that edits or reads a file."""
    calls = state.demonstration.tool_calls
    if not calls or kind_of(calls[0]) not in ("edit", "read"):
        return None
    found = of_any(calls[0].arguments, PATH)
    return _argument(state, found[0]) if found is not None and isinstance(found[1], str) else None


def idle(call: ToolCall, state: TurnState) -> frozenset[str]:
    """The arguments that do not act, by the declaration of the tool."""
    functions = [cast("dict[str, Any]", tool.get("function") or {}) for tool in state.tools]
    schema = next((one.get("parameters") for one in functions if one.get("name") == call.name), None)
    return idle_of(call, kind_of(call), schema)


def acting(call: ToolCall, state: TurnState) -> list[str]:
    """The arguments that act, by name."""
    return sorted(call.arguments.keys() - idle(call, state))


# copies that do another thing


def mutated_value(state: TurnState) -> Message | None:
    """The last acting text or number of the first call is another one."""

    def change(call: ToolCall) -> ToolCall | None:
        for name in reversed(acting(call, state)):
            value = call.arguments[name]
            if isinstance(value, str) and value.strip():
                return _with(call, name, f"{value.rstrip()}x")
            if isinstance(value, int | float) and not isinstance(value, bool):
                return _with(call, name, value + 1)
        return None

    return _first(state, change)


def wrong_path(state: TurnState) -> Message | None:
    """Another file of the same folder."""
    place = _file(state)
    if place is not None:
        folder, name = posixpath.split(place.text.rstrip("/"))
        return place.put(posixpath.join(folder, f"other_{name}"))
    place = _command(state)
    if place is None:
        return None
    words = place.text.split(" ")
    for k, word in enumerate(words):
        if _FILE.match(word.strip()):
            folder, name = posixpath.split(word)
            return place.put(" ".join([*words[:k], posixpath.join(folder, f"other_{name}"), *words[k + 1 :]]))
    return None


def wrong_order(state: TurnState) -> Message | None:
    """Steps of a command, or items of a list, the other way round."""
    place = _command(state)
    if place is not None and "'" not in place.text and '"' not in place.text and "<<" not in place.text:
        for joint in (" && ", " | "):
            one, found, other = place.text.rstrip("\n").partition(joint)
            if found and one.strip() != other.strip() and joint not in other:
                return place.put(f"{other}{joint}{one}" + ("\n" if place.text.endswith("\n") else ""))

    def change(call: ToolCall) -> ToolCall | None:
        for name in acting(call, state):
            value = call.arguments[name]
            if isinstance(value, list) and value != value[::-1]:
                return _with(call, name, cast("list[Any]", value)[::-1])
        return None

    return _first(state, change)


def surplus_call(state: TurnState) -> Message | None:
    """The demonstrated calls, and one more of the first tool with other arguments."""
    changed = mutated_value(state)
    if changed is None:
        return None
    calls = state.demonstration.tool_calls
    return dataclasses.replace(state.demonstration, tool_calls=(*calls, changed.tool_calls[0]))


def other_claim(state: TurnState) -> Message | None:
    """A Terminus answer that claims to be done where the demonstration does not, or the other way round."""
    text = answer_text(state.demonstration)
    found = terminus_in(text) if not state.demonstration.tool_calls and text.startswith("{") else None
    if found is None:
        return None
    row = json.loads(text)
    flag = "is_task_complete" if "state_analysis" in row else "task_complete"
    return Message("assistant", json.dumps({**row, flag: not found["done"]}))


def destroyed(state: TurnState) -> Message | None:
    """The demonstrated command, and then one that removes everything."""
    place = _command(state)
    return None if place is None else place.put(place.text.rstrip("\n") + "; rm -rf /*\n")


# copies that do the same


def spaced(state: TurnState) -> Message | None:
    """A line end behind the command, and one more space between its words where there is nothing quoted."""
    place = _command(state)
    if place is None or not place.text.strip() or not Script.of(place.text).parsed:
        return None
    simple = _SIMPLE.match(place.text.strip()) is not None
    text = place.text.strip("\n").replace(" ", "  ") if simple else place.text.rstrip("\n")
    return place.put(text + "\n") if text + "\n" != place.text else None


def key_order(state: TurnState) -> Message | None:
    """Arguments the other way round."""
    return _first(
        state,
        lambda call: (
            dataclasses.replace(call, arguments=dict(reversed(call.arguments.items())))
            if len(call.arguments) > 1
            else None
        ),
    )


def defaults_said(state: TurnState) -> Message | None:
    """Every declared default that the first call leaves out."""
    declared: dict[str, Any] = {tool.get("function", {}).get("name"): tool.get("function", {}) for tool in state.tools}

    def change(call: ToolCall) -> ToolCall | None:
        properties = (declared.get(call.name, {}).get("parameters") or {}).get("properties") or {}
        left = {
            key: value["default"]
            for key, value in properties.items()
            if isinstance(value, dict) and "default" in value and key not in call.arguments
        }
        return dataclasses.replace(call, arguments={**call.arguments, **left}) if left else None

    return _first(state, change)


def talk(state: TurnState) -> Message | None:
    """Another free text where the tool of the first call has one that does not act."""

    def change(call: ToolCall) -> ToolCall | None:
        said = {"description", "explanation", "justification", "thought", "security_risk"} & idle(call, state)
        name = next((name for name in sorted(said & call.arguments.keys())), None)
        value = None if name is None else call.arguments[name]
        return _with(call, name, f"{value} (said otherwise)") if name and isinstance(value, str) and value else None

    return _first(state, change)


def other_spelling_of_path(state: TurnState) -> Message | None:
    """The absolute path for a relative one in the folder where the agent is, and the other way round."""
    folder = folder_in(state.history)
    if folder is None or not folder.startswith("/"):
        return None
    place = _file(state)
    if place is not None:
        other = _spelled(place.text, folder)
        return None if other is None else place.put(other)
    place = _command(state)
    words = place.text.split(" ") if place is not None and _SIMPLE.match(place.text.strip()) else []
    command = COMMANDS.get(words[0]) if words else None
    if place is None or command is None or not command.paths or command.subcommands:
        return None
    last = words[-1].rstrip("\n")
    other = _spelled(last, folder) if _FILE.match(last) and len(words) > 1 and not words[-2].startswith("-") else None
    return None if other is None or last.startswith("-") else place.put(" ".join([*words[:-1], other]) + "\n")


def _spelled(path: str, folder: str) -> str | None:
    if ".." in path.split("/") or path.startswith("~") or not path:
        return None
    if not path.startswith("/"):
        return posixpath.join(folder, path.removeprefix("./"))
    inside = path.removeprefix(folder.rstrip("/") + "/")
    return inside if inside != path and inside else None


def flag_order(state: TurnState) -> Message | None:
    """Options of a known command in another order, or apart (`-la` as `-a -l`)."""
    place = _command(state)
    words = shlex.split(place.text) if place is not None and _SIMPLE.match(place.text.strip()) else []
    command = COMMANDS.get(words[0]) if words else None
    if place is None or command is None or command.subcommands:
        return None
    for k, word in enumerate(words[1:], 1):
        letters = word[1:] if word.startswith("-") and not word.startswith("--") else ""
        if len(set(letters)) > 1 and all(
            c in command.flags and not any(c in one for one in command.groups) for c in letters
        ):
            apart = [f"-{letter}" for letter in reversed(letters)]
            return place.put(" ".join([*words[:k], *apart, *words[k + 1 :]]) + "\n")
    return None


MUTATIONS: Mapping[str, Rewrite] = {
    rewrite.__name__: rewrite
    for rewrite in (mutated_value, wrong_path, wrong_order, surplus_call, other_claim, destroyed)
}
EQUIVALENT: Mapping[str, Rewrite] = {
    rewrite.__name__: rewrite
    for rewrite in (spaced, key_order, defaults_said, talk, other_spelling_of_path, flag_order)
}
