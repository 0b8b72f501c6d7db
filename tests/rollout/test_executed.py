"""The verifier that plays: an action is worth what it does, whatever it says."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.core.config import Part
from turntree.core.errors import ConfigError, InputError
from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import TurnState
from turntree.env.tasks import environment_record
from turntree.rollout import executed as module
from turntree.rollout.executed import Executed
from turntree.rollout.local import judge_turns

sys.path.append(str(Path(__file__).parent))  # as the current folder is, for a user
import line_game

LINE = Part("line_game:tasks")
MUTE = Part("line_game:tasks", {"mute": True})
WORDS = ("right", "east", "left", "run", "look", "wait", "crash", "")
walks = st.lists(st.sampled_from(("right", "left", "look", "wait")), max_size=4)


def turn(walk, demonstration, part=LINE, task="train-0-1"):
    """The state after `walk` in a trace of the line, which goes on with `demonstration`."""
    (line,) = [one for one in line_game.tasks("train", 2, seed=0, **part.options) if one.task_id == task]
    history = [*line.reset()]
    for word in walk:
        said = Message("assistant", word)
        history += [said, *line.step(said).messages]
    record = environment_record(part, "train", 2, 0, task)
    name = f"{task}:{'-'.join(walk)}:{demonstration}"
    return TurnState(name, len(walk), tuple(history), Message("assistant", demonstration), environment=record)


def told(verdict):
    """Without what it cost."""
    return verdict.reward, verdict.reason, verdict.kind


def judged(state, word, part=LINE, **options):
    return Executed(part, **options).judge(state, Message("assistant", word))


KNOWN: dict[str, Executed] = {}


def verifier_of(part):
    """One verifier for all examples of a property: finding its part takes longer than the judging."""
    if repr(part) not in KNOWN:
        KNOWN[repr(part)] = Executed(part)
    return KNOWN[repr(part)]


# what an action does


@given(walks, st.sampled_from(WORDS))
def test_the_demonstration_itself_is_always_accepted(walk, word):
    state = turn(walk, word)
    assert verifier_of(LINE).judge(state, state.demonstration).reward == 1.0


@pytest.mark.parametrize("part", [LINE, MUTE])
@given(walk=walks)
@settings(deadline=None)
def test_another_text_with_the_same_effect_is_accepted(part, walk):
    assert verifier_of(part).judge(turn(walk, "right", part), Message("assistant", "east")).reward == 1.0


@pytest.mark.parametrize("part", [LINE, MUTE])
@given(walk=walks, word=st.sampled_from(("look", "wait", "")))
@settings(deadline=None)
def test_what_changes_nothing_is_refused_where_the_demonstration_changed_something(part, walk, word):
    assert verifier_of(part).judge(turn(walk, "right", part), Message("assistant", word)).reward == 0.0


def test_equal_answers_are_told_apart_by_the_state():
    assert judged(turn(["right"], "right", MUTE), "left", MUTE).reward == 0.0  # both are answered "ok"


def test_what_an_empty_message_does_too_is_no_effect():
    assert judged(turn([], "wait"), "dance").reward == 0.0  # both are answered "nothing happens"


def test_progress_that_is_at_least_as_good_is_enough_unless_only_the_answer_counts():
    state = turn(["right"], "right")
    assert judged(state, "run").reward == judged(state, "run", compare="progress").reward == 1.0
    assert judged(state, "run", compare="observation").reward == 0.0
    assert judged(turn(["right"], "run"), "right").reward == 0.0  # progress, and less of it
    assert judged(turn(["right"], "look"), "wait").reward == 0.0  # as much as the demonstration's, which is none
    assert judged(turn([], "look"), "wait").reward == 0.0  # at the first turn nothing was said of progress yet
    assert judged(turn(["right"] * 3, "right"), "run").reason == "as near to the goal as the demonstration"


def test_an_environment_without_progress_gives_no_verdict_on_it():
    verdict = judged(turn(["right"], "right", MUTE), "east", MUTE, compare="progress")
    assert (verdict.reward, verdict.reason) == (None, "the environment reports no progress to compare")


def test_white_space_counts_unless_it_is_ignored():
    state = turn([], "right")
    told = TurnState(state.trace_id, 0, (Message("user", "walk  to 5"),), state.demonstration, (), state.environment)
    with pytest.raises(InputError, match="does not fit its environment"):
        judged(told, "east")
    assert judged(told, "east", ignore_whitespace=True).reward == 1.0


@given(st.lists(st.tuples(walks, st.sampled_from(WORDS)), min_size=1, max_size=4), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_verdicts_do_not_depend_on_the_order_of_judging(places, rng: random.Random):
    pairs = [(turn(walk, word), action) for walk, word in places for action in WORDS]
    verifier, order = Executed(LINE), list(range(len(pairs)))
    alone = []
    for state, action in pairs:
        verifier._states._known.clear()
        alone.append(told(verifier.judge(state, Message("assistant", action))))
    rng.shuffle(order)
    together = {place: told(verifier.judge(pairs[place][0], Message("assistant", pairs[place][1]))) for place in order}
    assert [together[place] for place in range(len(pairs))] == alone


def test_states_are_judged_side_by_side_where_the_environment_is_stepped_in_threads():
    """... with the same verdicts, each state rebuilt once, and the same bill."""
    threads = Part("line_game:InThreads")
    walks = [["right"] * n for n in range(4)]
    pairs = [(state, Message("assistant", word)) for state in [turn(walk, "right") for walk in walks] for word in WORDS]
    record = environment_record(threads, "train", 2, 0, "train-0-1")
    slow = {state.trace_id: replace(state, environment=record) for state, _ in pairs}
    line_game.Slow.at_once[0] = 0
    found = judge_turns(Executed(threads), [(slow[state.trace_id], action) for state, action in pairs])
    assert line_game.Slow.at_once[0] > 1
    alone = judge_turns(Executed(LINE), pairs)
    assert list(map(told, found)) == list(map(told, alone))
    bills = [sum(verdict.cost.tool_calls for verdict in verdicts) for verdicts in (found, alone)]
    tried = sum(action.content != "right" for _, action in pairs)
    assert bills == [tried + sum(n + 3 for n in range(4))] * 2
    assert sum(verdict.cost.environment_seconds for verdict in found) >= 0.002 * bills[0]


def test_a_state_is_rebuilt_once_and_forgetting_it_changes_nothing(monkeypatch):
    states = [turn(["right"] * n, "right") for n in range(3)]
    verifier, actions = Executed(LINE), [Message("assistant", word) for word in WORDS]
    first = [told(verifier.judge(state, action)) for state in states for action in actions]
    rebuilt = dict(verifier._states._known)
    assert [told(verifier.judge(state, action)) for state in states for action in actions] == first
    assert all(verifier._states._known[name][1] is found for name, (_, found) in rebuilt.items())
    monkeypatch.setattr(module, "_REMEMBERED_TURNS", 1)
    small = Executed(LINE)
    assert [small.judge(state, action) for action in actions for state in states] != []
    assert [told(small.judge(state, action)) for state in states for action in actions] == first
    assert len(small._states._known) == 1


# what is no verdict


def test_an_environment_that_fails_gives_no_reward():
    verdict = judged(turn(["right"], "right"), "crash")
    assert (verdict.reward, verdict.reason) == (None, "RuntimeError: the line is cut")
    assert judged(turn([], "crash"), "right").reward is None  # nothing to compare with
    state, verifier = turn(["right"], "crash"), Executed(LINE)
    bills = [verifier.judge(state, Message("assistant", "right")).cost.tool_calls for _ in range(3)]
    assert bills == [2, 0, 0], "what is known to fail is not played again"


def test_an_environment_that_answers_differently_when_it_is_asked_again_gives_no_reward():
    noisy = Part("line_game:tasks", {"noise": True})
    verdict = judged(turn([], "look", noisy), "east", noisy)
    assert verdict.reward is None and "differently when it is played again" in verdict.reason


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "other:tasks"}, "is 'other:tasks', not 'line_game:tasks'"),
        ({"task_id": "train-0-9"}, "is task 'train-0-9', which 'line_game:tasks' does not have"),
        ({"seed": "0"}, "field 'environment.seed': of trace"),
        ({"goal": 4}, "its task is 'walk to 5', and played again 'walk to 4'"),
        ({"length": 4}, "environment.length"),
    ],
)
def test_a_trace_that_does_not_fit_its_environment_is_refused(change, said):
    state = turn(["right"], "right")
    other = {**(state.environment or {}), **change}
    wrong = TurnState(state.trace_id, 1, state.history, state.demonstration, environment=other)
    with pytest.raises(InputError) as caught:
        judged(wrong, "east")
    assert said in str(caught.value)


def test_a_trace_without_an_environment_and_a_command_without_one_are_refused():
    state = turn([], "right")
    with pytest.raises(InputError, match="--environment"):
        judged(TurnState("t", 0, state.history, state.demonstration), "east")
    with pytest.raises(ConfigError, match="--environment"):
        Executed()


def test_the_options_that_are_named_replace_those_of_the_trace():
    state = turn([], "right")
    with pytest.raises(InputError, match="played again 'walk to 4'"):
        judged(state, "east", Part("line_game:tasks", {"goal": 4}))


def test_the_name_holds_all_that_decides():
    names = [
        Executed(LINE).name,
        Executed(MUTE).name,
        Executed(LINE, compare="progress").name,
        Executed(LINE, ignore_whitespace=True).name,
    ]
    assert len(set(names)) == 4 and Executed(LINE).name == names[0]


def test_calls_are_executed_like_texts():
    state = turn([], "right")
    action = Message("assistant", "", (ToolCall("move", {"to": 1}),))
    verdict = Executed(LINE).judge(state, action)
    assert (verdict.reward, verdict.kind) == (0.0, "move")
