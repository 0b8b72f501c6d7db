"""Audit of a verifier: demonstrations (gold) must score 1, and accepted broken copies of them are counted.

Run it before profiling: a verifier that refuses demonstrations makes every turn look hard, and one that accepts emptied
or repeated calls will be exploited by the policy (both happened in published set-ups). Equivalent rewrites of gold
(`rewrites`) measure the opposite fault: equivalent actions that are refused.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import TurnState, TurnVerifier
from turntree.core.verdict import Verdict
from turntree.verify.kinds import idle_of, kind_of
from turntree.verify.strict import StrictMatch, unreadable
from turntree.verify.texts import TERMINUS

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
class Offender:
    """A wrong verdict."""

    state: str
    copy: str  # "gold", or the name of the mutation or rewrite
    reward: float
    reason: str
    demonstration: Message
    action: Message

    def to_json(self) -> dict[str, Any]:
        row = {"state": self.state, "copy": self.copy, "reward": self.reward, "reason": self.reason}
        return row | {"demonstration": self.demonstration.to_chat(), "action": self.action.to_chat()}


@dataclass(frozen=True)
class VerifierAudit:
    """`gold`: demonstrations judged against themselves; `mutations`: name of the mutation -> verdict counts;
    `rewrites`: the same for equivalent copies. `strict_refused` counts those rewrites that the verifier accepts and
    exact matching does not. `paid` and `refused` are the first wrong verdicts of every kind."""

    verifier: str
    states: int
    gold: Tally
    mutations: Mapping[str, Tally]
    rewrites: Mapping[str, Tally] = field(default_factory=dict[str, Tally])
    strict_refused: int = 0
    paid: tuple[Offender, ...] = ()
    refused: tuple[Offender, ...] = ()

    @property
    def gold_holds(self) -> bool:
        """Whether every demonstration that could be judged scores 1, and at least one could."""
        return self.gold.judged > 0 and self.gold.accepted == self.gold.judged

    @property
    def holds(self) -> bool:
        """Whether gold is worth 1, no broken copy anything, and every rewrite that was judged 1."""
        broken = any(tally.accepted or tally.partial for tally in self.mutations.values())
        return self.gold_holds and not broken and not any(t.refused or t.partial for t in self.rewrites.values())

    @property
    def miss_rate(self) -> float | None:
        """Of the rewrites that the verifier accepts, the share that exact matching refuses (PivotRL, section 2)."""
        accepted = sum(tally.accepted for tally in self.rewrites.values())
        return self.strict_refused / accepted if accepted else None

    def to_json(self) -> dict[str, Any]:
        def row(tally: Tally) -> dict[str, Any]:
            counts = vars(tally) | {"judged": tally.judged, "acceptance": tally.acceptance}
            return counts | {"reasons": dict(tally.reasons)}

        return {
            "verifier": self.verifier,
            "states": self.states,
            "gold": row(self.gold),
            "mutations": {name: row(tally) for name, tally in self.mutations.items()},
            "rewrites": {name: row(tally) for name, tally in self.rewrites.items()},
            "strict_miss_rate": self.miss_rate,
            "holds": self.holds,
            "paid": [offender.to_json() for offender in self.paid],
            "refused": [offender.to_json() for offender in self.refused],
        }


def audit_verifier(
    verifier: TurnVerifier,
    states: Iterable[TurnState],
    mutations: Mapping[str, Mutation] | None = None,
    rewrites: Mapping[str, Mutation] | None = None,
    *,
    worst: int = 5,
) -> VerifierAudit:
    """Judge every demonstration, its mutations (default: `MUTATIONS`) and its equivalent `rewrites` (default: none).
    Keeps up to `worst` wrong verdicts of every kind. Deterministic, no sampling. An action that is text is rewritten as
    the call that the verifier takes it for (`reads`)."""
    mutations, rewrites = MUTATIONS if mutations is None else mutations, rewrites or {}
    gold, broken = Tally(), {name: Tally() for name in mutations}
    same, strict, strict_refused, count = {name: Tally() for name in rewrites}, StrictMatch(), 0, 0
    kept: dict[str, list[Offender]] = {}
    reads = verifier.reads

    def judged(state: TurnState, name: str, action: Message, tally: Tally, right: float) -> float | None:
        verdict = unreadable(state, action) or verifier.judge(state, action)
        tally.add(verdict)
        found = kept.setdefault(name, [])
        if verdict.reward is not None and verdict.reward != right and len(found) < worst:
            found.append(Offender(state.id, name, verdict.reward, verdict.reason, state.demonstration, action))
        return verdict.reward

    for state in states:
        count += 1
        if judged(state, "gold", state.demonstration, gold, 1.0) is None:
            continue  # its copies cannot be judged either
        written = _written(state, reads)
        for name, mutate in mutations.items():
            action = _rewritten(state, mutate, written, reads)
            if action is not None:
                judged(state, name, action, broken[name], 0.0)
        for name, rewrite in rewrites.items():
            action = _rewritten(state, rewrite, written, reads)
            if action is not None and judged(state, name, action, same[name], 1.0) == 1.0:
                strict_refused += strict.judge(state, action).reward == 0.0
    paid = tuple(one for name in mutations for one in kept.get(name, ()))
    refused = tuple(one for name in ("gold", *rewrites) for one in kept.get(name, ()))
    return VerifierAudit(verifier.name, count, gold, broken, same, strict_refused, paid, refused)


Reader = Callable[[Message, TurnState], Sequence[ToolCall] | None]


def _written(state: TurnState, reads: Reader) -> ToolCall | None:
    """The call that the text of the demonstration is taken for. (A Terminus answer is rewritten as JSON.)"""
    if state.demonstration.tool_calls:
        return None
    calls = reads(state.demonstration, state)
    return calls[0] if calls and len(calls) == 1 and calls[0].name != TERMINUS else None


def _rewritten(state: TurnState, rewrite: Mutation, call: ToolCall | None, reads: Reader) -> Message | None:
    """The copy. Of a `call` that is written, the text with another argument in its place; None where that does not say
    the changed call."""
    if call is None:
        return rewrite(state)
    shown = state.demonstration
    copy = rewrite(dataclasses.replace(state, demonstration=dataclasses.replace(shown, tool_calls=(call,))))
    if copy is None or not copy.tool_calls:
        return copy
    wanted = list(map(_plain, copy.tool_calls))
    changed = [name for name, value in _plain(call)[1].items() if wanted[0][1].get(name) != value]
    if len(changed) != 1 or changed[0] not in wanted[0][1]:
        return None
    old, new = (_spelled(arguments[changed[0]]) for _, arguments in (_plain(call), wanted[0]))
    head, found, tail = shown.content.rpartition(old) if old else ("", "", "")  # the action comes last
    text = dataclasses.replace(shown, content=head + new + tail) if found else shown
    return text if list(map(_plain, reads(text, state) or ())) == wanted else None


def _spelled(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _plain(call: ToolCall) -> tuple[str, dict[str, Any]]:
    """Its name and arguments without space around them: where a text has line ends, a call may have none."""
    return call.name, {k: v.strip() if isinstance(v, str) else v for k, v in call.arguments.items()}


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
    calls = state.demonstration.tool_calls
    if not calls or not calls[0].arguments:
        return None
    idle = idle_of(calls[0], kind_of(calls[0]))
    first = min(calls[0].arguments, key=lambda name: (name in idle, name))
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
