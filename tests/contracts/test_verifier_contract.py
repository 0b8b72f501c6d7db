"""What every `TurnVerifier` promises, whatever it judges.

A new verifier joins by adding a `Case` to `CASES`: how to make it, and turns that its demonstrations can judge.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import TurnState, TurnVerifier
from turntree.verify.audit import MUTATIONS, audit_verifier
from turntree.verify.paper import Paper
from turntree.verify.recommended import Recommended
from turntree.verify.strict import StrictMatch
from turntree.verify.tool_call import ToolCallMatch
from turntree.verify.user import UserVerifier
from turntree_worlds.household.distance import shortest_plan
from turntree_worlds.household.environment import HouseholdEnvironment, generated
from turntree_worlds.household.verifier import HouseholdVerifier


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], TurnVerifier]
    turns: Callable[[], list[TurnState]]


def tool_turns() -> list[TurnState]:
    """A call, two parallel calls and a closing message of one short conversation."""
    parameters = {"type": "object", "properties": {"q": {"type": "string"}, "n": {"type": "integer", "default": 3}}}
    declared = {"name": "search", "parameters": {**parameters, "required": ["q"]}}
    tools = ({"type": "function", "function": declared}, {"type": "function", "function": {"name": "stop"}})
    first = Message("assistant", "", (ToolCall("search", {"q": "pen"}, "1"),))
    both = Message("assistant", "", (ToolCall("search", {"q": "cup", "n": 1}, "2"), ToolCall("stop", {}, "3")))
    last = Message("assistant", "It is on the desk.")
    user, found = Message("user", "Where is the pen?"), Message("tool", "on the desk", (), "1")
    history = (user, first, found)
    return [
        TurnState("trace", 0, (user,), first, tools),
        TurnState("trace", 1, history, both, tools),
        TurnState("trace", 2, (*history, both), last, tools),
    ]


def household_turns() -> list[TurnState]:
    """Every turn of the shortest plan of one generated game."""
    game = generated(6, "easy")
    source = {"name": "household", "task_id": game.id}
    environment, turns = HouseholdEnvironment(game), []
    messages = environment.reset()
    for turn, command in enumerate(shortest_plan(game.reset())):
        action = Message("assistant", command)
        turns.append(TurnState("game", turn, messages, action, environment=source))
        messages = (*messages, action, *environment.step(action).messages)
    return turns


def same_text(state: TurnState, action: Message) -> bool:
    return action.content == state.demonstration.content and len(action.tool_calls) == len(
        state.demonstration.tool_calls
    )


CASES = [
    Case("strict", StrictMatch, tool_turns),
    Case("strict on commands", StrictMatch, household_turns),
    Case("tool_call", ToolCallMatch, tool_turns),
    Case("tool_call, any message", lambda: ToolCallMatch(messages="any"), tool_turns),
    Case("recommended", Recommended, tool_turns),
    Case("recommended, any message", lambda: Recommended(messages="any"), tool_turns),
    Case("recommended on commands", Recommended, household_turns),
    Case("paper", lambda: Paper(domain="conversation"), tool_turns),
    Case("household", HouseholdVerifier, household_turns),
    Case("user", lambda: UserVerifier("mine:same_text@0", same_text), household_turns),
]


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def actions(state: TurnState) -> list[Message]:
    mutated = [mutate(state) for mutate in MUTATIONS.values()]
    return [state.demonstration, *(action for action in mutated if action is not None)]


def test_every_demonstration_scores_one(case: Case) -> None:
    turns = case.turns()
    assert [case.make().judge(state, state.demonstration).reward for state in turns] == [1.0] * len(turns)


def test_saying_nothing_scores_nothing(case: Case) -> None:
    verifier = case.make()
    for state in case.turns():
        assert verifier.judge(state, Message("assistant")).reward == 0.0
        assert verifier.judge(state, Message("assistant", " \n")).reward == 0.0


def test_a_verdict_has_a_reward_from_zero_to_one_or_none_a_reason_and_a_kind(case: Case) -> None:
    verifier = case.make()
    for state in case.turns():
        for action in actions(state):
            verdict = verifier.judge(state, action)
            assert verdict.reward is None or 0 <= verdict.reward <= 1
            assert verdict.reason and "\n" not in verdict.reason
            assert verdict.kind


def test_a_verdict_depends_on_state_and_action_only(case: Case) -> None:
    turns = case.turns()
    pairs = [(state, action) for state in turns for action in actions(state)]
    once = case.make()
    forwards = [once.judge(*pair) for pair in pairs]
    backwards = [once.judge(*pair) for pair in reversed(pairs)]
    fresh = [case.make().judge(*pair) for pair in pairs]
    assert forwards == backwards[::-1] == fresh


def test_judging_changes_neither_state_nor_action(case: Case) -> None:
    verifier = case.make()
    for state in case.turns():
        for action in actions(state):
            before: tuple[Any, Any] = copy.deepcopy((state, action))
            verifier.judge(state, action)
            assert (state, action) == before


def test_call_ids_do_not_matter(case: Case) -> None:
    verifier = case.make()
    for state in case.turns():
        calls = tuple(dataclasses.replace(call, id=None) for call in state.demonstration.tool_calls)
        action = dataclasses.replace(state.demonstration, tool_calls=calls)
        assert verifier.judge(state, action).reward == 1.0


def test_the_name_is_that_of_the_rule_and_not_of_the_object(case: Case) -> None:
    assert case.make().name == case.make().name
    assert case.make().name.strip()


def test_no_broken_call_is_paid(case: Case) -> None:
    audit = audit_verifier(case.make(), case.turns())
    assert audit.gold_holds
    for mutation in ("empty_message", "premature_message", "dropped_argument", "empty_arguments", "repeated_call"):
        tally = audit.mutations[mutation]
        assert (tally.accepted, tally.partial, tally.unjudged) == (0, 0, 0), mutation
