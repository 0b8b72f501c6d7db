"""Audit of a verifier: demonstrations (gold) must score 1, and accepted broken copies of them are counted.

Run it before profiling: a verifier that refuses demonstrations makes every turn look hard, and one that accepts emptied
or repeated calls will be exploited by the policy (both happened in published set-ups).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import TurnState, TurnVerifier
from turntree.core.verdict import Verdict
from turntree.verify.kinds import COMMAND, command_text, idle_of, kind_of, of_any

Mutation = Callable[[TurnState], Message | None]
"""A broken copy of the demonstration, or None where it does not apply. Nothing is drawn at random."""


_OFFENDERS = 5  # kept of every kind


@dataclass
class Tally:
    """Verdicts on one kind of action: `judged = accepted + partial + refused`; `unjudged` ones have no reward."""

    accepted: int = 0  # reward 1
    partial: int = 0  # between
    refused: int = 0  # reward 0
    unjudged: int = 0
    reasons: Counter[str] = field(default_factory=Counter[str])  # why unjudged

    @property
    def judged(self) -> int:
        return self.accepted + self.partial + self.refused

    def add(self, verdict: Verdict) -> None:
        if verdict.reward is None:
            self.unjudged += 1
            self.reasons[verdict.reason] += 1
        elif verdict.reward == 1:
            self.accepted += 1
        elif verdict.reward == 0:
            self.refused += 1
        else:
            self.partial += 1

    def to_json(self) -> dict[str, Any]:
        acceptance = self.accepted / self.judged if self.judged else None
        return vars(self) | {"judged": self.judged, "acceptance": acceptance, "reasons": dict(self.reasons)}


@dataclass
class VerifierAudit:
    """`gold`: demonstrations judged against themselves; `mutations`: name of the mutation -> verdict counts.
    `offenders`: the first wrong verdicts of every kind ("gold", or the name of the mutation), as JSON."""

    verifier: str
    gold: Tally
    mutations: Mapping[str, Tally]
    states: int = 0
    offenders: dict[str, list[dict[str, Any]]] = field(default_factory=dict[str, list[dict[str, Any]]])

    @property
    def gold_holds(self) -> bool:
        """Whether every demonstration that could be judged scores 1, and at least one could."""
        return self.gold.judged > 0 and self.gold.accepted == self.gold.judged

    @property
    def holds(self) -> bool:
        """Whether gold is worth 1, and no broken copy anything."""
        return self.gold_holds and not any(tally.accepted or tally.partial for tally in self.mutations.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "verifier": self.verifier,
            "states": self.states,
            "gold": self.gold.to_json(),
            "mutations": {name: tally.to_json() for name, tally in self.mutations.items()},
            "holds": self.holds,
            "paid": [row for name in self.mutations for row in self.offenders.get(name, [])],
            "refused": self.offenders.get("gold", []),
        }


def audit_verifier(verifier: TurnVerifier, states: Iterable[TurnState]) -> VerifierAudit:
    """Judge every demonstration and its `MUTATIONS`."""
    audit = VerifierAudit(verifier.name, Tally(), {name: Tally() for name in MUTATIONS})

    def judge(state: TurnState, name: str, action: Message, tally: Tally, right: float) -> float | None:
        verdict = verifier.judge(state, action)
        tally.add(verdict)
        wrong = audit.offenders.setdefault(name, [])
        if verdict.reward is not None and verdict.reward != right and len(wrong) < _OFFENDERS:
            row = {"state": state.id, "copy": name, "reward": verdict.reward, "reason": verdict.reason}
            wrong.append(row | {"demonstration": state.demonstration.to_chat(), "action": action.to_chat()})
        return verdict.reward

    for state in states:
        audit.states += 1
        if judge(state, "gold", state.demonstration, audit.gold, 1.0) is None:
            continue  # its copies cannot be judged either
        calls = verifier.reads(state.demonstration, state)
        for name, mutate in MUTATIONS.items():
            action = _copy(state, mutate, tuple(calls or ()))
            if action is not None:
                judge(state, name, action, audit.mutations[name], 0.0)
    return audit


def _copy(state: TurnState, mutate: Mutation, calls: tuple[ToolCall, ...]) -> Message | None:
    """The broken copy. Of a text that acts (the verifier reads `calls` in it) there are only messages: the words around
    its action are no part of it, and it is not written anew."""
    if state.demonstration.tool_calls or not calls:
        return mutate(state)
    acting = dataclasses.replace(state.demonstration, tool_calls=calls)
    copy = mutate(dataclasses.replace(state, demonstration=acting))
    return None if copy is None or copy.tool_calls else copy


# broken copies


def empty_message(_: TurnState) -> Message | None:
    return Message("assistant")


def other_message(state: TurnState) -> Message | None:
    """The demonstrated message with words added: only a rule that reads the text refuses it."""
    if state.demonstration.tool_calls:
        return None
    return dataclasses.replace(state.demonstration, content=f"Do not: {state.demonstration.content}")


def premature_message(state: TurnState) -> Message | None:
    """Claims to be done where the demonstration acts."""
    return Message("assistant", "The task is done.") if state.demonstration.tool_calls else None


def dropped_argument(state: TurnState) -> Message | None:
    """The first call without its first acting argument (equivalent where that was the declared default)."""
    call = _first_call(state)
    if call is None:
        return None
    first, *_ = _acting(call, state) or sorted(call.arguments)
    return _with_arguments(state, {key: value for key, value in call.arguments.items() if key != first})


def empty_arguments(state: TurnState) -> Message | None:
    return None if _first_call(state) is None else _with_arguments(state, {})


def changed_value(state: TurnState) -> Message | None:
    """The last acting text or number of the first call is another one."""
    call = _first_call(state)
    if call is None:
        return None
    for name in reversed(_acting(call, state)):
        value: Any = call.arguments[name]
        if isinstance(value, str) and value.strip():
            return _with_arguments(state, {**call.arguments, name: f"{value.rstrip()}x"})
        if isinstance(value, int | float) and not isinstance(value, bool):
            return _with_arguments(state, {**call.arguments, name: value + 1})
    return None


def destroyed(state: TurnState) -> Message | None:
    """The demonstrated command, and then one that removes everything."""
    call = _first_call(state)
    command = None if call is None or kind_of(call) != "shell" else of_any(call.arguments, COMMAND)
    text = None if command is None else command_text(command[1])
    if call is None or command is None or text is None:
        return None
    return _with_arguments(state, {**call.arguments, command[0]: text.rstrip("\n") + "; rm -rf /*\n"})


def other_tool(state: TurnState) -> Message | None:
    """The first call's arguments given to another declared tool, or to one that does not exist."""
    calls = state.demonstration.tool_calls
    if not calls:
        return None
    names = sorted(str(tool.get("function", {}).get("name")) for tool in state.tools)
    name = next((name for name in names if name != calls[0].name), f"{calls[0].name}_2")
    return dataclasses.replace(state.demonstration, tool_calls=(dataclasses.replace(calls[0], name=name), *calls[1:]))


def repeated_call(state: TurnState) -> Message | None:
    """The demonstrated calls with the first one made twice."""
    calls = state.demonstration.tool_calls
    return dataclasses.replace(state.demonstration, tool_calls=(*calls, calls[0])) if calls else None


def surplus_call(state: TurnState) -> Message | None:
    """The demonstrated calls, and one more of the first tool with other arguments."""
    changed = changed_value(state)
    calls = () if changed is None else (*state.demonstration.tool_calls, changed.tool_calls[0])
    return dataclasses.replace(state.demonstration, tool_calls=calls) if calls else None


def _first_call(state: TurnState) -> ToolCall | None:
    """The first call, where it has arguments."""
    calls = state.demonstration.tool_calls
    return calls[0] if calls and calls[0].arguments else None


def _acting(call: ToolCall, state: TurnState) -> list[str]:
    """The arguments that act, by name."""
    functions: list[Any] = [tool.get("function") or {} for tool in state.tools]
    schema = next((each.get("parameters") for each in functions if each.get("name") == call.name), None)
    return sorted(call.arguments.keys() - idle_of(call, kind_of(call), schema))


def _with_arguments(state: TurnState, arguments: dict[str, Any]) -> Message:
    first, *rest = state.demonstration.tool_calls
    return dataclasses.replace(state.demonstration, tool_calls=(dataclasses.replace(first, arguments=arguments), *rest))


MUTATIONS: Mapping[str, Mutation] = {
    mutate.__name__: mutate
    for mutate in (
        *(empty_message, other_message, premature_message, dropped_argument, empty_arguments),
        *(other_tool, repeated_call, changed_value, surplus_call, destroyed),
    )
}
