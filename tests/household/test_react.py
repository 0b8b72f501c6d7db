"""ALFWorld as Selective Rollout plays it (appendix F): thoughts, actions, and the released code's list of actions."""

from __future__ import annotations

import pytest

from household_players import generate_games
from turntree.core import parts
from turntree.core.config import Part
from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import TurnState
from turntree.decide.gates.signals import prefix_edit_distance_mean
from turntree.env.tasks import open_tasks
from turntree.logs.groups import action_text
from turntree.render.tool_calls import parse_message
from turntree_worlds.household.demonstrator import teacher
from turntree_worlds.household.distance import shortest_plan
from turntree_worlds.household.environment import REACT, HouseholdEnvironment, state_at
from turntree_worlds.household.verifier import HouseholdVerifier
from turntree_worlds.household.world import NOTHING_HAPPENS

GAME = next(iter(generate_games(3, 1))).parse()


def said(command: str, thought: str = "so") -> str:
    return f"Thought: {thought}\nAction: {command}"


def test_the_prompt_has_the_form_the_actions_and_an_example_that_is_played_in_it() -> None:
    system, task = HouseholdEnvironment(GAME, prompt="react").reset()
    assert (system.role, system.content) == ("system", REACT)
    assert task == Message("user", GAME.intro)
    assert REACT.count("\nThought: ") == REACT.count("\nAction: ") >= 5
    assert HouseholdEnvironment(GAME).reset() == (task,)


def test_thoughts_play_nothing_and_a_game_is_won_by_its_actions() -> None:
    for read in (lambda text: parse_message(text, "react"), lambda text: Message("assistant", text)):
        environment = HouseholdEnvironment(GAME, prompt="react")
        environment.reset()
        plan = shortest_plan(GAME.reset())
        answers = [environment.step(read(said(command))) for command in plan]
        assert [answer.done for answer in answers] == [False] * (len(plan) - 1) + [True]
        assert all(answer.messages[0].role == "tool" for answer in answers)


def test_what_does_not_match_the_grammar_is_a_step_without_an_effect() -> None:
    environment = HouseholdEnvironment(GAME, prompt="react")
    environment.reset()
    before = environment.state()
    for text in ("go to nowhere 9", said("fly"), "Thought: nothing", "", shortest_plan(GAME.reset())[0]):
        answer = environment.step(Message("assistant", text))
        assert (answer.messages[0].content, answer.metrics["invalid"]) == (NOTHING_HAPPENS, 1.0)
    other = Message("assistant", "", (ToolCall("search", {"query": "x"}),))
    assert environment.step(other).messages[0].content == NOTHING_HAPPENS
    assert environment.state() == before


def test_the_released_form_lists_the_admissible_actions_after_every_step_and_in_forks() -> None:
    environment = HouseholdEnvironment(GAME, prompt="react_admissible")
    (_, task) = environment.reset()
    for told in (task, environment.fork().step(parse_message(said("look"), "react")).messages[0]):
        assert told.content.endswith(f"Admissible actions: {', '.join(GAME.reset().admissible())}")


def test_a_gate_compares_the_actions_and_not_the_thoughts() -> None:
    from group_progress import progress

    turns = [[action_text(parse_message(said("look", thought), "react"))] for thought in ("a", "b")]
    assert prefix_edit_distance_mean(progress(*turns), 1) == 0.0


def test_the_prompt_is_one_key_of_the_environment() -> None:
    environment = parts.resolve("environments", Part("household", {"prompt": "react"}))
    with open_tasks(environment, {"test": 1}) as opened:
        assert opened.of("test")[0].reset()[0].content == REACT


@pytest.mark.parametrize("prompt", ["react", "react_admissible"])
def test_teacher_verifier_and_replay_read_a_turn_as_the_prompt_does(prompt: str) -> None:
    environment = HouseholdEnvironment(GAME, prompt=prompt)
    (_, task) = environment.reset()
    source = {"name": "household", "task_id": GAME.id, "prompt": prompt}
    bare, first = Message("assistant", "look"), Message("assistant", said("look"))
    history = [task, bare, *environment.step(bare).messages, first, *environment.step(first).messages]
    label = teacher(environment, history)
    assert isinstance(label, Message)
    state = TurnState("t", 2, tuple(history), label, (), environment=source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("turntree_worlds.household.environment.build_game", lambda _: GAME)
        assert state_at(state).key() == environment.state(), "the history is replayed as it was played"
        judged = HouseholdVerifier()
        assert judged.judge(state, label).reward == 1.0
        command = Message("assistant", label.content.removeprefix("Action: "))
        assert judged.judge(state, command).reward == 0.0, "what the environment answers with nothing earns nothing"
    assert environment.step(label).metrics["invalid"] == 0.0
