"""The verifier `paper`: the local rewards that the PivotRL paper states for its four domains (appendix A.2).

- swe: "matches tool-call names only".
- terminal: "output-schema validation, normalized string similarity, and equivalence-based LLM-as-judge scoring".
- conversation: functional comparison of the calls; of messages the released code wants that there is one.
- search: the same kind of browsing step. The paper gives no rule; the query must share words with the demonstrated one.

The paper gives no threshold: `similarity` is that of the released configurations. `then` names the judge; without one
a terminal command that is not similar enough is worth 0, and so is a query.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal, get_args

from rapidfuzz.distance import Indel

from turntree.core.errors import ConfigError
from turntree.core.messages import Message, ToolCall, action_kind, answer_text
from turntree.core.protocols import TurnState
from turntree.core.verdict import Verdict
from turntree.verify.kinds import COMMAND, QUERY, URL, command_text, kind_of, of_any
from turntree.verify.recommended import invalid, query, url
from turntree.verify.texts import TERMINUS, calls_in, form_of
from turntree.verify.tool_call import ToolCallMatch
from turntree.verify.user import Chained

Domain = Literal["auto", "conversation", "swe", "terminal", "search"]
_THRESHOLDS = {"terminal": 0.9, "search": 0.3}


@dataclass(eq=False, kw_only=True)
class Paper(Chained):
    """The verifier of the paper's domain."""

    domain: Domain = "auto"  # pyright: ignore[reportIncompatibleVariableOverride]
    """With "auto" the demonstration decides: terminal for shell commands and Terminus answers, search for search tools,
    swe for editors and readers, conversation for everything else. Where an editor is declared or was used before, all
    turns are of a swe trace."""
    similarity: float | None = None
    """In place of the domain's threshold."""
    messages: Literal["any", "exact", "judge"] = "any"
    """What a message is worth that is not the demonstrated one ("any": 1 unless it is blank; "judge": what `then`
    says)."""

    def __post_init__(self) -> None:
        if self.domain not in get_args(Domain):
            raise ConfigError(f"is {self.domain!r}", field="domain", hint=f"use one of {', '.join(get_args(Domain))}")
        if self.messages == "judge" and self.then is None:
            raise ConfigError("needs a judge", field="messages", hint="name it: --set verifier.then.name=judge")
        self._calls = ToolCallMatch(messages="any" if self.messages == "any" else "exact")
        options = [f"domain={self.domain}"] if self.domain != "auto" else []
        options += [f"similarity={self.similarity:g}"] if self.similarity is not None else []
        options += [f"messages={self.messages}"] if self.messages != "any" else []
        self.chain(["paper/4", *options])

    def judge(self, state: TurnState, action: Message) -> Verdict:
        kind = action_kind(action)
        form = form_of(state, self.domain)
        shown, tried = (calls_in(one, form) for one in (state.demonstration, action))
        if shown is None and form is not None:
            return Verdict(None, "unjudgeable demonstration: its action cannot be read", kind)
        if shown is None:
            verdict = self._calls.judge(state, action)
            is_open = self.messages == "judge" and verdict.reward == 0 and answer_text(action) and not action.tool_calls
            return self._then.judge(state, action) if is_open and self._then is not None else verdict
        domain = self.domain if self.domain != "auto" else _domain_of(state, shown)
        if tried is None or bool(action.tool_calls) != bool(state.demonstration.tool_calls):
            return Verdict(0.0, "a message instead of a call", kind)
        if domain == "conversation":
            gold = replace(state, demonstration=replace(state.demonstration, tool_calls=shown))
            return self._calls.judge(gold, replace(action, tool_calls=tried))
        name = _first_word if domain == "swe" and not action.tool_calls else attrgetter("name")
        names = [Counter(map(name, calls)) for calls in (shown, tried)]
        if names[0] != names[1]:
            return Verdict(0.0, "another tool", kind)
        if domain == "swe":
            return Verdict(1.0, "the same tool", kind)
        return self._alike(state, action, shown, tried, domain)

    def _alike(
        self, state: TurnState, action: Message, shown: tuple[ToolCall, ...], tried: tuple[ToolCall, ...], domain: str
    ) -> Verdict:
        kind = action_kind(action)
        if domain == "terminal" and _done(shown) and not _done(tried):
            return Verdict(0.0, "does not claim to be done", kind)
        problem = invalid(tried, state.tools)
        if problem is not None:
            return Verdict(0.0, problem, kind)
        texts = [[_text(call) for call in calls] for calls in (shown, tried)]
        if texts[0].count(None) != texts[1].count(None):
            return Verdict(0.0, "a call without its command or query", kind)
        if None in texts[0]:  # compared as calls
            gold, own = (tuple(call for call in calls if _text(call) is None) for calls in (shown, tried))
            expected = replace(state, demonstration=replace(state.demonstration, tool_calls=gold))
            verdict = self._calls.judge(expected, replace(action, tool_calls=own))
            if verdict.reward == 0.0 and self._then is not None:
                return self._then.judge(state, action)
            if verdict.reward != 1.0:
                return verdict
        one, other = ("\n".join(text or "" for text in side) for side in texts)
        measured = _words(one, other) if domain == "search" else Indel.normalized_similarity(one, other)
        least = _THRESHOLDS[domain] if self.similarity is None else self.similarity
        if measured >= least:
            return Verdict(1.0, f"similarity {measured:.3f}", kind)
        if self._then is not None:
            return self._then.judge(state, action)
        return Verdict(0.0, f"similarity {measured:.3f}", kind)


def _domain_of(state: TurnState, calls: tuple[ToolCall, ...]) -> str:
    used = (call for message in state.history if message.role == "assistant" for call in message.tool_calls)
    if any(kind_of(call) == "edit" for call in used) or any(_edits(tool) for tool in state.tools):
        return "swe"
    kinds = {"shell" if call.name == TERMINUS else kind_of(call) for call in calls}
    if kinds & {"search", "open"}:
        return "search"
    if kinds & {"edit", "read"}:
        return "swe"
    return "terminal" if "shell" in kinds else "conversation"


def _edits(tool: dict[str, Any]) -> bool:
    """Whether a declared tool edits files, which takes a path."""
    function: Any = tool.get("function", {})
    asked: dict[str, Any] = dict.fromkeys((function.get("parameters") or {}).get("properties") or (), "")
    return kind_of(ToolCall(str(function.get("name", "")), asked)) == "edit"


def _first_word(call: ToolCall) -> str:
    """Of a SWE-agent that writes its commands each is a tool: `open`, `python`, `submit`."""
    words = str(call.arguments.get("command", "")).split() if call.name == "bash" else []
    return words[0] if words else call.name


def _done(calls: tuple[ToolCall, ...]) -> bool:
    return any(call.arguments.get("done") is True for call in calls if call.name == TERMINUS)


def _text(call: ToolCall) -> str | None:
    """What of a call is compared as text; None where it has none of the arguments that say it."""
    if call.name == TERMINUS:
        return call.arguments["keys"].strip()
    found = of_any(call.arguments, COMMAND)
    if found is not None:
        command = command_text(found[1])
        return None if command is None else command.strip()
    asked, place = of_any(call.arguments, QUERY), of_any(call.arguments, URL)
    if asked is not None:
        return query(str(asked[1]))
    return None if place is None else url(str(place[1]))


def _words(one: str, other: str) -> float:
    """Common words over all words (Jaccard, by bags); 1 for equal texts."""
    bags = [Counter(text.split()) for text in (one, other)]
    union = (bags[0] | bags[1]).total()
    return (bags[0] & bags[1]).total() / union if union else 1.0
