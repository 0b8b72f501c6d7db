"""Schema-normalising comparison of tool calls: the demonstrated call, written in any equivalent way.

It fails closed. An action scores 0 if it violates the declared schema, calls an undeclared tool, makes one call too
many or answers with text instead of a call. A demonstration that violates its own schema, or an invalid schema, gives
no reward.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from turntree.core.errors import ConfigError
from turntree.core.messages import Message, action_kind
from turntree.core.protocols import TurnState, TurnVerifier
from turntree.core.verdict import Verdict
from turntree.verify.arguments import Remembered, SchemaUnusable, rules_of
from turntree.verify.strict import canonical_json


class Unjudgeable(Exception):
    """The demonstration itself cannot be compared with."""


@dataclass(frozen=True, kw_only=True)
class ToolCallMatch(TurnVerifier):
    """1 iff the action makes the demonstrated calls: the same tools with arguments that mean the same, one to one.

    "Mean the same" is an equivalence (see `arguments`), so that a one-to-one matching exists exactly when both sides
    hold the same calls equally often; the order of parallel calls does not matter. Text beside calls is ignored.
    Without any declared tool (the source did not record them) arguments must be equal as JSON.
    """

    messages: Literal["exact", "any"] = "exact"
    """Of turns that demonstrate a message without calls: "exact" wants its text; "any" accepts every text that is not
    blank, which pays for empty talk, so it is not the default."""
    _expected: Remembered[Counter[tuple[str, str]]] = field(
        default_factory=lambda: Remembered(), init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.messages not in ("exact", "any"):
            raise ConfigError(f"is {self.messages!r}", field="messages", hint="use 'exact' or 'any'")

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "tool_call/1" if self.messages == "exact" else f"tool_call/1+messages={self.messages}"

    def judge(self, state: TurnState, action: Message) -> Verdict:
        kind = action_kind(action)
        try:
            if not state.demonstration.tool_calls:
                return self._judge_message(state.demonstration, action, kind)
            return self._judge_calls(state, action, kind)
        except Unjudgeable as problem:
            return Verdict(None, f"unjudgeable demonstration: {problem}", kind)

    def _judge_message(self, expected: Message, action: Message, kind: str) -> Verdict:
        if not expected.content.strip():
            raise Unjudgeable("it is empty")
        if action.tool_calls:
            return Verdict(0.0, "a call instead of a message", kind)
        if not action.content.strip():
            return Verdict(0.0, "an empty message", kind)
        if self.messages == "any":
            return Verdict(1.0, "a message", kind)
        same = action.content.strip() == expected.content.strip()
        return Verdict(1.0, "the same text", kind) if same else Verdict(0.0, "other text", kind)

    def _judge_calls(self, state: TurnState, action: Message, kind: str) -> Verdict:
        tools = declared(state.tools)
        try:
            expected = self._expected.of(state, lambda: self._canonicals(state.demonstration, tools))
        except (SchemaUnusable, ValueError, RecursionError) as error:
            raise Unjudgeable(str(error)) from error
        if not action.tool_calls:
            return Verdict(0.0, "a message instead of a call", kind)
        if len(action.tool_calls) != expected.total():
            return Verdict(0.0, "more calls" if len(action.tool_calls) > expected.total() else "fewer calls", kind)
        names = Counter(call.name for call in state.demonstration.tool_calls)
        if Counter(call.name for call in action.tool_calls) != names:
            return Verdict(0.0, "another tool", kind)
        try:
            found = self._canonicals(action, tools)
        except SchemaUnusable as error:  # shown by this value only, as an alternative of the schema was tried
            return Verdict(None, f"unjudgeable action: {error}", kind)
        except (ValueError, RecursionError) as error:
            return Verdict(0.0, f"invalid arguments: {error}", kind)
        return Verdict(1.0, "the same calls", kind) if found == expected else Verdict(0.0, "other arguments", kind)

    def _canonicals(self, message: Message, tools: dict[str, dict[str, Any]]) -> Counter[tuple[str, str]]:
        """Raises ValueError for a call that breaks its declaration, `SchemaUnusable` for an invalid declaration."""
        found: Counter[tuple[str, str]] = Counter()
        for call in message.tool_calls:
            if not tools:
                found[call.name, canonical_json(call.arguments)] += 1
                continue
            if call.name not in tools:
                raise ValueError(f"{call.name!r} is not declared")
            rules = rules_of(tools[call.name]["function"].get("parameters"))
            if (problem := rules.problem(call.arguments)) is not None:
                raise ValueError(f"{call.name!r}: {problem}")
            found[call.name, canonical_json(rules.normal(call.arguments))] += 1
        return found


def declared(tools: tuple[dict[str, Any], ...]) -> dict[str, dict[str, Any]]:
    """The declared tools by name. Raises `Unjudgeable` where one has no name, or two share one."""
    by_name: dict[str, dict[str, Any]] = {}
    for tool in tools:
        function: Any = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Unjudgeable("its state declares a tool without a name")
        if by_name.setdefault(function["name"], tool) != tool:
            raise Unjudgeable(f"its state declares {function['name']!r} in two ways")
    return by_name
