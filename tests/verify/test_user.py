"""A user's function: its crashes are no punishment, its mistakes are one clear line."""

from __future__ import annotations

import numpy as np
import pytest

from turntree.core.errors import InputError
from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import TurnState
from turntree.core.verdict import Verdict
from turntree.verify.user import UserVerifier

STATE = TurnState("t", 0, (Message("user", "hi"),), Message("assistant", "hello"))
ACTION = Message("assistant", "", (ToolCall("f", {}),))


def judged(answer: object) -> Verdict:
    return UserVerifier("mine:judge@0", lambda state, action: answer).judge(STATE, ACTION)


class TestAnswers:
    @pytest.mark.parametrize(
        ("answer", "reward"),
        [(True, 1.0), (False, 0.0), (1, 1.0), (0.25, 0.25), (np.bool_(True), 1.0), (np.float32(0.25), 0.25)],
    )
    def test_a_number_or_a_truth_value_is_the_reward(self, answer: object, reward: float) -> None:
        assert judged(answer) == Verdict(reward, "mine:judge", "f")

    def test_none_is_no_reward(self) -> None:
        assert judged(None) == Verdict(None, "the verifier could not tell", "f")

    def test_a_verdict_is_kept_with_its_kind_or_the_kind_of_the_action(self) -> None:
        assert judged(Verdict(0.5, "half", "take")) == Verdict(0.5, "half", "take")
        assert judged(Verdict(None, "no idea")) == Verdict(None, "no idea", "f")
        whole = Verdict(0.5, "half", "take", success=True, parts={"style": 0.5})
        assert judged(whole) == whole

    @pytest.mark.parametrize(
        "answer", [1.5, -0.1, float("nan"), float("inf"), "1", [1.0], np.array([1, 0]), Verdict(2.0, "too much")]
    )
    def test_what_is_no_reward_stops_the_run(self, answer: object) -> None:
        with pytest.raises(InputError, match="field 'mine:judge@0': returned"):
            judged(answer)

    def test_a_crash_is_an_action_that_was_not_judged(self) -> None:
        def crash(state: TurnState, action: Message) -> float:
            raise KeyError("no\nsuch thing")

        verdict = UserVerifier("mine:crash@0", crash).judge(STATE, ACTION)
        assert verdict.reward is None
        assert verdict.reason == r"the verifier raised KeyError: 'no\nsuch thing'"

    def test_an_interrupt_is_no_crash(self) -> None:
        def interrupted(state: TurnState, action: Message) -> float:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            UserVerifier("mine:wait@0", interrupted).judge(STATE, ACTION)
