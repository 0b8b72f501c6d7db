"""The audit finds a verifier that refuses gold, one that pays for anything and one that crashes."""

from __future__ import annotations

from typing import Any

import pytest

from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import TurnState
from turntree.core.verdict import Verdict
from turntree.verify.audit import MUTATIONS, audit_verifier
from turntree.verify.recommended import Recommended
from turntree.verify.strict import StrictMatch
from turntree.verify.tool_call import ToolCallMatch
from turntree.verify.user import UserVerifier

TOOLS = tuple({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg")
CALL = TurnState("t", 0, (), Message("assistant", "", (ToolCall("f", {"a": 1, "b": 2}, "c"),)), TOOLS)
TEXT = TurnState("t", 1, (), Message("assistant", "hello"), TOOLS)


def user(answer: object) -> UserVerifier:
    return UserVerifier("mine:judge@0", lambda state, action: answer)


def test_the_mutations_break_what_they_say() -> None:
    broken = {name: (mutate(CALL), mutate(TEXT)) for name, mutate in MUTATIONS.items()}
    assert broken == {
        "empty_message": (Message("assistant"), Message("assistant")),
        "other_message": (None, Message("assistant", "Do not: hello")),
        "premature_message": (Message("assistant", "The task is done."), None),
        "dropped_argument": (Message("assistant", "", (ToolCall("f", {"b": 2}, "c"),)), None),
        "empty_arguments": (Message("assistant", "", (ToolCall("f", {}, "c"),)), None),
        "other_tool": (Message("assistant", "", (ToolCall("g", {"a": 1, "b": 2}, "c"),)), None),
        "repeated_call": (Message("assistant", "", CALL.demonstration.tool_calls * 2), None),
        "changed_value": (Message("assistant", "", (ToolCall("f", {"a": 1, "b": 3}, "c"),)), None),
        "surplus_call": (
            Message("assistant", "", (*CALL.demonstration.tool_calls, ToolCall("f", {"a": 1, "b": 3}, "c"))),
            None,
        ),
        "destroyed": (None, None),
    }


def test_a_sound_verifier_accepts_gold_and_nothing_broken() -> None:
    audit = audit_verifier(ToolCallMatch(), [CALL, TEXT])
    assert audit.gold_holds
    assert (audit.verifier, audit.states, audit.gold.accepted) == ("tool_call/1", 2, 2)
    assert {name: (tally.refused, tally.judged) for name, tally in audit.mutations.items()} == {
        name: {"empty_message": (2, 2), "destroyed": (0, 0)}.get(name, (1, 1)) for name in MUTATIONS
    }


@pytest.mark.parametrize(
    ("domain", "text"),
    [
        ("swe", "Let me run a.py.\n```\ncd b && python a.py -v\n```"),
        ("terminal", "grep TODO src/a.py | sort"),
        ("search", "Thought: Milhouse it is.\nAction: Search[Milhouse]"),
        ("auto", "<function=bash>\n<parameter=command>\nls b && cat a.py\n</parameter>\n</function>"),
    ],
)
def test_more_words_around_an_action_that_is_text_break_nothing(domain: Any, text: str) -> None:
    state = TurnState("t", 0, (), Message("assistant", text))
    audit = audit_verifier(Recommended(domain=domain), [state])
    assert audit.holds
    assert {name for name, tally in audit.mutations.items() if tally.judged} == {"empty_message", "premature_message"}
    exact = audit_verifier(StrictMatch(), [state])
    assert {name for name, tally in exact.mutations.items() if tally.judged} == {"empty_message", "other_message"}


def test_a_changed_value_is_one_that_acts_and_a_destroyed_command_removes_everything() -> None:
    call = ToolCall("bash", {"command": "ls", "description": "look"}, "c")
    state = TurnState("t", 0, (), Message("assistant", "", (call,)))
    changed, destroyed = (MUTATIONS[name](state) for name in ("changed_value", "destroyed"))
    assert changed is not None and changed.tool_calls[0].arguments == {"command": "lsx", "description": "look"}
    assert destroyed is not None and destroyed.tool_calls[0].arguments["command"] == "ls; rm -rf /*\n"
    assert audit_verifier(Recommended(), [state]).holds


def test_a_verifier_that_pays_for_anything_is_seen() -> None:
    audit = audit_verifier(user(True), [CALL])
    assert audit.gold_holds
    assert audit.mutations["empty_arguments"].to_json()["acceptance"] == 1.0
    assert audit.mutations["other_message"].to_json()["acceptance"] is None


def test_a_verifier_that_refuses_gold_is_seen() -> None:
    assert not audit_verifier(user(0.5), [CALL]).gold_holds
    assert audit_verifier(user(0.5), [CALL]).gold.partial == 1
    assert not audit_verifier(user(False), [CALL]).gold_holds


def test_a_verifier_that_cannot_tell_holds_nothing_and_says_why() -> None:
    audit = audit_verifier(user(Verdict(None, "no network")), [CALL, TEXT])
    assert not audit.gold_holds
    assert audit.gold.reasons == {"no network": 2}
    assert audit.to_json()["gold"] == {
        "accepted": 0, "partial": 0, "refused": 0, "unjudged": 2, "judged": 0, "acceptance": None,
        "reasons": {"no network": 2},
    }  # fmt: skip
