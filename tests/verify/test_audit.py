"""The audit finds a verifier that refuses gold, one that pays for anything and one that crashes."""

from __future__ import annotations

from typing import Any

import pytest

from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import TurnState
from turntree.core.verdict import Verdict
from turntree.verify import rewrites
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
    }


def test_a_sound_verifier_accepts_gold_and_nothing_broken() -> None:
    audit = audit_verifier(ToolCallMatch(), [CALL, TEXT])
    assert audit.gold_holds
    assert (audit.verifier, audit.states, audit.gold.accepted) == ("tool_call/1", 2, 2)
    assert {name: (tally.refused, tally.judged) for name, tally in audit.mutations.items()} == {
        name: ((2, 2) if name == "empty_message" else (1, 1)) for name in MUTATIONS
    }


WRITTEN = {
    "swe": "Let me run a.py.\n```\ncd b && python a.py -v\n```",
    "terminal": "grep TODO src/a.py | sort",
    "search": "Thought: Milhouse it is.\nAction: Search[Milhouse]",
    "auto": "<function=bash>\n<parameter=command>\nls b && cat a.py\n</parameter>\n</function>",
}


class PaysForAnything(Recommended):
    def judge(self, state: TurnState, action: Message) -> Verdict:
        return Verdict(1.0, "paid")


@pytest.mark.parametrize("domain", WRITTEN)
def test_an_action_that_is_text_is_rewritten_where_it_acts(domain: Any) -> None:
    """Words around it are no part of it: more of them break nothing, and they stay as they are."""
    state = TurnState("t", 0, (), Message("assistant", WRITTEN[domain]))
    told = [state], MUTATIONS | rewrites.MUTATIONS, rewrites.EQUIVALENT
    audit = audit_verifier(Recommended(domain=domain), *told)
    assert audit.holds
    broken = {one.copy: one.action.content for one in audit_verifier(PaysForAnything(domain=domain), *told).paid}
    assert broken.keys() == {name for name, tally in audit.mutations.items() if tally.judged}
    ways = {"mutated_value"} if domain == "search" else {"mutated_value", "wrong_path", "wrong_order", "destroyed"}
    assert broken.keys() == {"empty_message", "premature_message", *ways}
    words, line, _ = WRITTEN[domain].partition("\n")
    for way in ways:
        assert broken[way] != WRITTEN[domain] and broken[way].startswith(words if line else "")
    exact = audit_verifier(StrictMatch(), *told)
    assert {name for name, tally in exact.mutations.items() if tally.judged} == {"empty_message", "other_message"}


def test_a_command_that_is_text_is_accepted_in_other_spellings() -> None:
    state = TurnState("t", 0, (), Message("assistant", "Let me see.\n```\nsort -nr src/a.py\n```"))
    audit = audit_verifier(Recommended(domain="swe"), [state], {}, rewrites.EQUIVALENT)
    assert {name for name, tally in audit.rewrites.items() if tally.accepted} == {"spaced", "flag_order"}
    assert audit.holds and audit.strict_refused == 2


def test_a_number_in_tags_is_rewritten_too() -> None:
    """It crashed the audit."""
    shown = "<function=get_order>\n<parameter=order>7</parameter>\n</function>"
    audit = audit_verifier(Recommended(), [TurnState("t", 0, (), Message("assistant", shown))], rewrites.MUTATIONS)
    assert audit.holds and audit.mutations["mutated_value"].refused == 1


def test_a_verifier_that_pays_for_anything_is_seen() -> None:
    audit = audit_verifier(user(True), [CALL])
    assert audit.gold_holds
    assert audit.mutations["empty_arguments"].acceptance == 1.0
    assert audit.mutations["other_message"].acceptance is None


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
