"""Which states of a search are profiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from turntree.core.cost import NO_COST, Cost
from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import TurnState, TurnVerifier
from turntree.core.verdict import Verdict
from turntree.rollout.local import Prompted
from turntree.stages.config import OwnPathConfig
from turntree.stages.own_path import OwnStates


class ByWord(TurnVerifier):
    name, compares = "by word", True
    asked = 0

    def judge(self, state: TurnState, action: Message) -> Verdict:
        self.asked += 1
        return Verdict(1.0, "", action.content.split()[0], cost=Cost(prefilled_tokens=2))


class Blind(TurnVerifier):
    name, compares = "blind", False


def search(verifier: TurnVerifier, most: int | None) -> OwnStates:
    config: Any = SimpleNamespace(own=OwnPathConfig(candidates=most))
    rest: Any = (SimpleNamespace(),) * 2
    return OwnStates(config, *rest, verifier, None, rest[0], Path())


def visited(words: Sequence[str]) -> list[Prompted]:
    def said(word: str) -> Message:
        return Message("assistant", f"{word} now", tool_calls=(ToolCall(word, {}),))

    states = [TurnState("trace", place, (), said(word)) for place, word in enumerate(words)]
    return [Prompted(state, (1,)) for state in states]


@pytest.mark.parametrize("verifier", [ByWord(), Blind()])
def test_kinds_that_are_rare_on_the_path_are_profiled_as_often_as_others(verifier: TurnVerifier) -> None:
    states = visited(["go"] * 90 + ["take"] * 8 + ["put"] * 2)
    drawn, cost = search(verifier, 20)._drawn(states, seed=0)
    kinds = Counter(item.state.demonstration.tool_calls[0].name for item in drawn)
    assert kinds == {"go": 10, "take": 8, "put": 2}
    assert cost == (Cost(prefilled_tokens=200) if verifier.compares else NO_COST)


@pytest.mark.parametrize("most", [None, 3, 4])
def test_where_all_states_are_profiled_no_kind_is_asked_for(most: int | None) -> None:
    verifier, states = ByWord(), visited(["go", "go", "take"])
    assert search(verifier, most)._drawn(states, seed=0) == (states, NO_COST)
    assert verifier.asked == 0
