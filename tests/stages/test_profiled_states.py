"""Which states of a search are profiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from turntree.core.completion import Sampling
from turntree.core.cost import NO_COST, Cost
from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import TurnState, TurnVerifier
from turntree.core.verdict import Verdict
from turntree.rollout.local import Prompted
from turntree.stages import own_path
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


def visited(words: Sequence[str]) -> list[Prompted]:
    def said(word: str) -> Message:
        return Message("assistant", f"{word} now", tool_calls=(ToolCall(word, {}),))

    states = [TurnState("trace", place, (), said(word)) for place, word in enumerate(words)]
    return [Prompted(state, (1,)) for state in states]


def profiled(
    monkeypatch: pytest.MonkeyPatch, verifier: TurnVerifier, most: int | None, states: Sequence[Prompted]
) -> tuple[list[Prompted], Cost]:
    """What a search profiles, and its cost where the rollouts themselves cost nothing."""
    waves: list[tuple[Prompted, Verdict]] = []

    def wave(prompted: Any, sampler: Any, judge: Any, config: Any, *, demonstrated: Any) -> list[Any]:
        drawn = list(zip(prompted, demonstrated, strict=True))
        waves.extend(drawn)
        return [SimpleNamespace(to_json=dict, cost=verdict.cost) for _, verdict in drawn]

    monkeypatch.setattr(own_path, "profile_wave", wave)
    train = SimpleNamespace(sampling=Sampling(), cut_turns="fail")
    config: Any = SimpleNamespace(own=OwnPathConfig(candidates=most), train=train)
    policy: Any = SimpleNamespace(engine=None, renderer=None)
    rest: Any = SimpleNamespace()
    found = OwnStates(config, rest, policy, verifier, None, rest, Path())
    rows, cost = found._profile(states, seed=0)
    assert len(rows) == len(waves)
    return [item for item, _ in waves], cost


@pytest.mark.parametrize("verifier", [ByWord(), Blind()])
def test_kinds_that_are_rare_on_the_path_are_profiled_as_often_as_others(
    monkeypatch: pytest.MonkeyPatch, verifier: TurnVerifier
) -> None:
    states = visited(["go"] * 90 + ["take"] * 8 + ["put"] * 2)
    drawn, cost = profiled(monkeypatch, verifier, 20, states)
    kinds = Counter(item.state.demonstration.tool_calls[0].name for item in drawn)
    assert kinds == {"go": 10, "take": 8, "put": 2}
    assert cost == (Cost(prefilled_tokens=200) if verifier.compares else NO_COST)


@pytest.mark.parametrize("most", [None, 3, 4])
def test_where_all_states_are_profiled_they_are_in_order_and_judged_once(
    monkeypatch: pytest.MonkeyPatch, most: int | None
) -> None:
    verifier, states = ByWord(), visited(["go", "go", "take"])
    assert profiled(monkeypatch, verifier, most, states) == (states, Cost(prefilled_tokens=6))
    assert verifier.asked == 3
