"""Verifiers come through the one door: registered names, functions and objects of one's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from turntree.core import parts
from turntree.core.config import Part
from turntree.core.errors import ConfigError, InputError
from turntree.core.messages import Message
from turntree.core.protocols import TurnState
from turntree.rollout.local import judge_turns
from turntree.stages.verifier import open_verifier

STATE = TurnState("t", 0, (Message("user", "hi"),), Message("assistant", "hello"))

RULES = """
CLOSED = []

def judge(state, action, *, least: float = 0.5):
    return least

class Judge:
    name = "mine"
    def judge(self, state, action):
        raise KeyError("lost")
    def close(self):
        CLOSED.append(1)

class Together:
    # a model on a GPU
    def judge(self, state, action):
        raise AssertionError("asked one by one")
    def judge_all(self, pairs, seed):
        if len(pairs) > 2:
            raise MemoryError("too many")
        return [0.25, None][: len(pairs)] if seed else [1.0]

judge_of_three = 3
"""


@pytest.fixture
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_rules_here.py").write_text(RULES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("my_rules_here", None)
    return tmp_path


def test_the_shipped_ones_are_registered_with_typed_options() -> None:
    assert {"household", "tool_call", "strict", "executed"} <= set(parts.names("verifiers"))
    with open_verifier(Part("tool_call", {"messages": "any"})) as verifier:
        assert verifier.name == "tool_call/1+messages=any"
    for wrong in ({"case": True}, {"messages": 1}, {"messages": "some"}):
        with pytest.raises(ConfigError, match="verifier"), open_verifier(Part("tool_call", wrong)):
            pass


def test_a_function_is_named_by_its_code_and_its_options(rules: Path) -> None:
    with open_verifier(Part("my_rules_here:judge")) as verifier:
        assert verifier.judge(STATE, STATE.demonstration).reward == 0.5
        half = verifier.name
    with open_verifier(Part("my_rules_here:judge", {"least": 1})) as verifier:
        assert verifier.judge(STATE, STATE.demonstration).reward == 1.0
    assert half.startswith("my_rules_here:judge@") and half != verifier.name


def test_what_an_object_of_ones_own_raises_is_no_reward_and_it_is_closed(rules: Path) -> None:
    with open_verifier(Part("my_rules_here:Judge")) as verifier:
        verdict = verifier.judge(STATE, STATE.demonstration)
    assert verdict.reward is None and "raised KeyError" in verdict.reason
    assert sys.modules["my_rules_here"].CLOSED == [1]


def test_what_is_no_function_is_refused(rules: Path) -> None:
    with pytest.raises(InputError, match="is int, not a function"), open_verifier(Part("my_rules_here:judge_of_three")):
        pass


def test_an_object_that_judges_many_at_once_is_asked_for_many_at_once(rules: Path) -> None:
    """Its `judge` was asked one by one, and its `judge_all` never."""
    pair = (STATE, STATE.demonstration)
    with open_verifier(Part("my_rules_here:Together")) as verifier:
        told, unsure = judge_turns(verifier, [pair, pair], seed=7)
        assert (told.reward, unsure.reward, unsure.reason) == (0.25, None, "the verifier could not tell")
        for pairs, problem in (([pair] * 3, "MemoryError: too many"), ([pair, pair], "1 verdicts for 2 actions")):
            failed = judge_turns(verifier, pairs, seed=int(len(pairs) > 2))
            assert [one.reward for one in failed] == [None] * len(pairs)
            assert all(problem in one.reason for one in failed)
