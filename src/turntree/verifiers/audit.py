"""Does a verifier hold what it must before it pays for anything? Gold scores 1; broken copies of gold are counted.

Run it before profiling: a verifier that refuses its own demonstrations makes every turn look hard, and one that
accepts emptied or multiplied calls will be found out by the policy (both happened in published set-ups).
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

Mutation = Callable[[TurnState], Message | None]
"""A broken copy of the demonstration, or None where it does not apply."""


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

    @property
    def acceptance(self) -> float | None:
        """Accepted among judged; None where nothing was judged."""
        return self.accepted / self.judged if self.judged else None

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


@dataclass(frozen=True)
class VerifierAudit:
    """`gold`: demonstrations judged against themselves; `mutations`: name of the mutation -> what became of it."""

    verifier: str
    states: int
    gold: Tally
    mutations: Mapping[str, Tally]

    @property
    def gold_holds(self) -> bool:
        """Whether every demonstration that could be judged scores 1, and at least one could."""
        return self.gold.judged > 0 and self.gold.accepted == self.gold.judged

    def to_json(self) -> dict[str, Any]:
        def row(tally: Tally) -> dict[str, Any]:
            return vars(tally) | {"reasons": dict(tally.reasons), "acceptance": tally.acceptance}

        return {
            "verifier": self.verifier,
            "states": self.states,
            "gold": row(self.gold),
            "mutations": {name: row(tally) for name, tally in self.mutations.items()},
        }


def audit_verifier(
    verifier: TurnVerifier, states: Iterable[TurnState], mutations: Mapping[str, Mutation] | None = None
) -> VerifierAudit:
    """Judge every demonstration and its mutations (default: `MUTATIONS`). Deterministic, no sampling."""
    mutations = MUTATIONS if mutations is None else mutations
    gold, tallies, count = Tally(), {name: Tally() for name in mutations}, 0
    for state in states:
        count += 1
        gold.add(verifier.judge(state, state.demonstration))
        for name, mutate in mutations.items():
            action = mutate(state)
            if action is not None:
                tallies[name].add(verifier.judge(state, action))
    return VerifierAudit(verifier.name, count, gold, tallies)


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
    """The first call without its first argument (equivalent where that argument was the declared default)."""
    calls = state.demonstration.tool_calls
    if not calls or not calls[0].arguments:
        return None
    first = min(calls[0].arguments)
    arguments = {key: value for key, value in calls[0].arguments.items() if key != first}
    return _with_first_call(state, dataclasses.replace(calls[0], arguments=arguments))


def empty_arguments(state: TurnState) -> Message | None:
    calls = state.demonstration.tool_calls
    if not calls or not calls[0].arguments:
        return None
    return _with_first_call(state, dataclasses.replace(calls[0], arguments={}))


def other_tool(state: TurnState) -> Message | None:
    """The first call's arguments given to another declared tool, or to one that does not exist."""
    calls = state.demonstration.tool_calls
    if not calls:
        return None
    names = sorted(str(tool.get("function", {}).get("name")) for tool in state.tools)
    name = next((name for name in names if name != calls[0].name), f"{calls[0].name}_2")
    return _with_first_call(state, dataclasses.replace(calls[0], name=name))


def repeated_call(state: TurnState) -> Message | None:
    """The demonstrated calls with the first one made twice."""
    calls = state.demonstration.tool_calls
    return dataclasses.replace(state.demonstration, tool_calls=(*calls, calls[0])) if calls else None


def _with_first_call(state: TurnState, call: ToolCall) -> Message:
    return dataclasses.replace(state.demonstration, tool_calls=(call, *state.demonstration.tool_calls[1:]))


MUTATIONS: Mapping[str, Mutation] = {
    mutate.__name__: mutate
    for mutate in (
        empty_message,
        other_message,
        premature_message,
        dropped_argument,
        empty_arguments,
        other_tool,
        repeated_call,
    )
}
