"""The strict reward pays for the demonstrated action and for nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from turntree.core.config import Part
from turntree.core.messages import Message, ToolCall, action_kind
from turntree.core.protocols import TurnState
from turntree.stages.score import ScoreConfig, score
from turntree.verify.strict import StrictMatch


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


PAYS = """
def pays(state, action):
    return 1.0
"""


@pytest.mark.parametrize("name", ["strict", "tool_call", "recommended", "paper", "my_pays:pays"])
@pytest.mark.parametrize("tools", ["", '[{"type": "function", "function": {"name": "pay", "parameters": {}}}]'])
def test_calls_whose_arguments_could_not_be_read_are_never_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, tools: str
) -> None:
    """Not even to themselves: pay(Eve, 9999) would be paid for pay(Ann, 5)."""
    monkeypatch.chdir(tmp_path)
    Path("my_pays.py").write_text(PAYS)
    monkeypatch.delitem(sys.modules, "my_pays", raising=False)
    broken, empty, eve = ('{"to": "Ann"', "{}", '{"to": "Eve"}')
    pairs = [(broken, broken), (broken, empty), (broken, eve), ('{"to": "Ann"}', broken)]
    for file, side in (("gold", 0), ("tried", 1)):
        calls = [{"tool_calls": [{"function": {"name": "pay", "arguments": pair[side]}}]} for pair in pairs]
        Path(file).write_text("\n".join(map(json.dumps, calls)))
    Path("tools").write_text(tools)
    given = "tools" if tools else ""
    found = score(ScoreConfig(verifier=Part(name), gold="gold", candidate="tried", tools=given))["verdicts"]
    for verdict in found[:3]:
        assert verdict["reward"] is None
        assert verdict["reason"] == "unjudgeable demonstration: its arguments are not JSON"
    assert name == "my_pays:pays" or found[3]["reward"] in (0.0, None)
