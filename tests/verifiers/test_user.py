"""A user's function: its crashes are no punishment, its mistakes are one clear line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from turntree.core.errors import InputError
from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import TurnState
from turntree.core.verdict import Verdict
from turntree.verifiers.user import UserVerifier, load_verifier

STATE = TurnState("t", 0, (Message("user", "hi"),), Message("assistant", "hello"))
ACTION = Message("assistant", "", (ToolCall("f", {}),))


@pytest.fixture
def module(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Writes a module into a folder of its own; what it imports is forgotten after the test."""
    before, path = set(sys.modules), list(sys.path)
    count = 0

    def write(source: str) -> str:
        nonlocal count
        count += 1
        name = f"rules_{tmp_path.name}_{count}"
        (tmp_path / f"{name}.py").write_text(source)
        return name

    yield write
    sys.path[:] = path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def judged(answer: object) -> Verdict:
    return UserVerifier("mine:judge@0", lambda state, action: answer).judge(STATE, ACTION)


class TestAnswers:
    @pytest.mark.parametrize(("answer", "reward"), [(True, 1.0), (False, 0.0), (1, 1.0), (0.25, 0.25)])
    def test_a_number_or_a_truth_value_is_the_reward(self, answer: object, reward: float) -> None:
        assert judged(answer) == Verdict(reward, "mine:judge", "f")

    def test_none_is_no_reward(self) -> None:
        assert judged(None) == Verdict(None, "the verifier could not tell", "f")

    def test_a_verdict_is_kept_with_its_kind_or_the_kind_of_the_action(self) -> None:
        assert judged(Verdict(0.5, "half", "take")) == Verdict(0.5, "half", "take")
        assert judged(Verdict(None, "no idea")) == Verdict(None, "no idea", "f")

    @pytest.mark.parametrize("answer", [1.5, -0.1, float("nan"), float("inf"), "1", [1.0], Verdict(2.0, "too much")])
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


class TestLoading:
    def test_a_function_is_found_in_the_folder_and_named_with_a_digest(
        self, module: Callable[[str], str], tmp_path: Path
    ) -> None:
        name = module("def judge(state, action):\n    return action.content == state.demonstration.content\n")
        verifier = load_verifier(f"{name}:judge", tmp_path)
        assert verifier.judge(STATE, STATE.demonstration).reward == 1.0
        assert verifier.judge(STATE, ACTION).reward == 0.0
        assert verifier.name.startswith(f"{name}:judge@")
        assert len(verifier.name.partition("@")[2]) == 8

    def test_an_edited_rule_has_another_name(self, module: Callable[[str], str], tmp_path: Path) -> None:
        names = [module(f"def judge(state, action):\n    return {value}\n") for value in (0, 1)]
        digests = {load_verifier(f"{name}:judge", tmp_path).name.partition("@")[2] for name in names}
        assert len(digests) == 2

    def test_a_lazy_import_of_a_neighbour_works_later(self, module: Callable[[str], str], tmp_path: Path) -> None:
        neighbour = module("ANSWER = 0.5\n")
        name = module(f"def judge(state, action):\n    import {neighbour}\n    return {neighbour}.ANSWER\n")
        assert load_verifier(f"{name}:judge", tmp_path).judge(STATE, ACTION).reward == 0.5

    @pytest.mark.parametrize("specification", ["", "rules", "rules:", ":judge"])
    def test_the_specification_names_module_and_function(self, specification: str) -> None:
        with pytest.raises(InputError, match="write module:function, as in my_rules:judge"):
            load_verifier(specification)

    @pytest.mark.parametrize(
        ("source", "function", "message"),
        [
            ("judge = 3", "judge", "is int, not a function"),
            ("", "judge", "has no 'judge'; check the name after the colon"),
            ("import no_such_package_anywhere", "judge", "needs 'no_such_package_anywhere', which is not installed"),
            ("1 / 0", "judge", "raised ZeroDivisionError: division by zero; the module must import without errors"),
            ("def judge(:", "judge", "raised SyntaxError"),
            ("from turntree import nothing_like_it", "judge", "raised ImportError: cannot import name"),
        ],
    )
    def test_a_module_that_does_not_serve_is_one_clear_line(
        self, module: Callable[[str], str], tmp_path: Path, source: str, function: str, message: str
    ) -> None:
        with pytest.raises(InputError) as caught:
            load_verifier(f"{module(source)}:{function}", tmp_path)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_a_missing_module_says_where_it_was_looked_for(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"no module 'no_such_rules' .not in .* and not installed.;"):
            load_verifier("no_such_rules:judge", tmp_path)
        with pytest.raises(InputError, match=r"no module 'no_such_rules' .not installed.;"):
            load_verifier("no_such_rules:judge")

    def test_a_module_hidden_by_an_installed_one_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "json.py").write_text("def judge(state, action):\n    return 1\n")
        with pytest.raises(InputError, match=r"is hidden by .* of the same name; give your module another name"):
            load_verifier("json:judge", tmp_path)

    def test_a_folder_that_does_not_exist_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="is not a folder"):
            load_verifier("rules:judge", tmp_path / "none")
