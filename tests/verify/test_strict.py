"""The strict reward pays for the demonstrated action and for nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from turntree.core.config import Part
from turntree.core.messages import Message, ToolCall, action_kind
from turntree.core.protocols import TurnState
from turntree.verify.audit import audit_verifier
from turntree.verify.strict import MALFORMED, StrictMatch
from turntree.verify.user import UserVerifier, build_verifier


def act(*calls: ToolCall, text: str = "") -> Message:
    return Message("assistant", text, calls)


def reward(demonstration: Message, action: Message) -> float | None:
    return StrictMatch().judge(TurnState("t", 0, (), demonstration), action).reward


class TestText:
    def test_the_same_text_up_to_white_space_at_the_ends(self) -> None:
        assert reward(act(text="go to desk 1"), act(text=" go to desk 1\n")) == 1.0

    @pytest.mark.parametrize("text", ["", "go to  desk 1", "Go to desk 1", "go to desk 10"])
    def test_any_other_text_is_refused(self, text: str) -> None:
        assert reward(act(text="go to desk 1"), act(text=text)) == 0.0

    def test_text_beside_calls_counts(self) -> None:
        assert reward(act(ToolCall("f", {}), text="now"), act(ToolCall("f", {}))) == 0.0


class TestCalls:
    def test_key_order_and_ids_do_not_count(self) -> None:
        assert reward(act(ToolCall("f", {"a": 1, "b": 2}, "1")), act(ToolCall("f", {"b": 2, "a": 1}, "2"))) == 1.0

    @pytest.mark.parametrize(
        "calls",
        [
            (),
            (ToolCall("f", {"a": 1.0}), ToolCall("g", {})),
            (ToolCall("f", {"a": True}), ToolCall("g", {})),
            (ToolCall("g", {}), ToolCall("f", {"a": 1})),
            (ToolCall("f", {"a": 1}),),
            (ToolCall("f", {"a": 1}), ToolCall("g", {}), ToolCall("g", {})),
        ],
    )
    def test_any_other_calls_are_refused(self, calls: tuple[ToolCall, ...]) -> None:
        assert reward(act(ToolCall("f", {"a": 1}), ToolCall("g", {})), act(*calls)) == 0.0


def test_the_kind_of_an_action_is_its_tools() -> None:
    assert action_kind(act(text="hello")) == "message"
    assert action_kind(act(ToolCall("g", {}), ToolCall("f", {}), ToolCall("g", {}))) == "f+g"


@pytest.mark.parametrize("name", ["strict", "tool_call", "recommended", "paper"])
@pytest.mark.parametrize("tools", [(), ({"type": "function", "function": {"name": "pay", "parameters": {}}},)])
def test_calls_whose_arguments_could_not_be_read_are_never_equal(name: str, tools: tuple[Any, ...]) -> None:
    """Not even to themselves: pay(Eve, 9999) would be paid for pay(Ann, 5). The audit counts them as not judged."""
    said = act(ToolCall("pay", {MALFORMED: '{"to": "Ann"'}))
    state, verifier = TurnState("t", 0, (), said, tools), build_verifier(Part(name))
    for action in (said, act(ToolCall("pay", {})), act(ToolCall("pay", {"to": "Eve"}))):
        assert verifier.judge(state, action).reward is None
    assert verifier.judge(TurnState("t", 1, (), act(ToolCall("pay", {"to": "Ann"})), tools), said).reward in (0.0, None)
    found = audit_verifier(UserVerifier("pays@0", lambda state, action: 1.0), [state])
    assert (found.gold.judged, found.gold.unjudged) == (0, 1)
    assert not any(tally.judged for tally in found.mutations.values())
