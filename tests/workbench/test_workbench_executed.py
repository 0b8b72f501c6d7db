"""The verifier `executed` at a shell: gold and tried command run in two copies; files, output and exit code decide."""

from dataclasses import replace

import pytest

from turntree.core.config import Part
from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import TurnState
from turntree.env.tasks import environment_record
from turntree.rollout.executed import Executed
from turntree.stages.gold import Gold
from turntree.verify.recommended import Recommended

TERMINAL = Part("terminal")


def bash(command):
    return Message("assistant", "", (ToolCall("bash", {"command": command}, "call_9"),))


@pytest.fixture(scope="module")
def verifier(sandbox):
    made = Executed(TERMINAL)
    yield made
    made.close()


@pytest.fixture(scope="module")
def played(sandbox):
    made = Recommended(TERMINAL)
    yield made
    made.close()


@pytest.fixture(scope="module")
def traces(sandbox):
    return {trace.meta["task_type"]: trace for trace in Gold(environment=TERMINAL, count=8)}


def state(trace, turn=0):
    position = trace.turn_positions[turn]
    return TurnState(
        trace_id=trace.id,
        turn=turn,
        history=trace.messages[:position],
        demonstration=trace.messages[position],
        tools=trace.tools,
        environment=trace.environment,
    )


def reward(verifier, at, command):
    verdict = verifier.judge(at, bash(command))
    assert verdict.reward is not None, verdict.reason
    return verdict.reward


def test_commands_that_do_the_same_are_accepted_and_others_are_not(verifier, traces):
    at = state(traces["delete"])
    for same in (
        "find . -name '*.tmp' -type f -exec rm {} +",
        "find . -name '*.tmp' | xargs rm",
        "rm $(find -name '*.tmp')\n",
    ):
        assert reward(verifier, at, same) == 1.0
    for other in ("find . -name '*.tmp'", "rm -r .", "true", "rm nothing", "find . -name '*.tmp' -delete; touch new"):
        assert reward(verifier, at, other) == 0.0


def test_output_and_exit_code_count_where_no_file_is_changed(verifier, traces):
    at = state(traces["count_files"])
    suffix = at.demonstration.tool_calls[0].arguments["command"].split("'")[1]
    assert reward(verifier, at, f'find -type f -name "{suffix}" | grep -c .') == 1.0
    for other in ("echo 99", f"find . -type f -name '{suffix}'", f"find . -type f -name '{suffix}' | wc -l; false"):
        assert reward(verifier, at, other) == 0.0


def test_the_state_is_that_after_the_turns_before(verifier, traces):
    at = state(traces["collect"], turn=1)
    assert reward(verifier, at, at.demonstration.tool_calls[0].arguments["command"] + " ") == 1.0
    assert reward(verifier, at, "true") == 0.0
    assert verifier.judge(state(traces["collect"], turn=2), bash("true")).reward == 0.0, "the end of the task"


def test_a_trace_of_an_episode_says_how_it_is_rebuilt(traces):
    recorded = next(iter(traces.values())).environment
    assert recorded["name"] == "terminal" and recorded["task_id"] == "terminal-train-0"
    expected = environment_record(TERMINAL, "train", 8, 0, "terminal-train-0")
    assert {key: recorded[key] for key in expected} == expected


class TestRecommendedWithASandbox:
    """Commands that words do not decide are played in copies; what words refuse for certain stays refused."""

    def test_other_words_with_the_same_effect_are_paid_and_with_another_effect_are_not(self, played, traces):
        at = state(traces["count_files"])
        suffix = at.demonstration.tool_calls[0].arguments["command"].split("'")[1]
        same, other = f'find -type f -name "{suffix}" | grep -c .', f"find . -type f -name '{suffix}'"
        assert [reward(played, at, command) for command in (same, other, "echo 99")] == [1.0, 0.0, 0.0]
        rules = Recommended()
        assert reward(rules, at, same) == 0.0

    def test_ways_to_delete_are_compared_by_what_is_left_and_never_with_what_deletes_nothing(self, played, traces):
        at = state(traces["delete"])
        for command in ("find . -name '*.tmp' -type f -exec rm {} +", "rm $(find -name '*.tmp')"):
            assert reward(played, at, command) == 1.0
            assert reward(Recommended(), at, command) == 0.0
        for command in ("rm -r .", "find . -name '*.tmp' -delete; touch new", "ls"):
            assert reward(played, at, command) == 0.0
        harmless = state(traces["count_files"])
        ran = played.judge(harmless, bash(harmless.demonstration.tool_calls[0].arguments["command"] + "; rm nothing"))
        assert (ran.reward, ran.reason) == (0.0, "another destructive command")

    def test_a_state_that_no_environment_is_known_of_is_left_to_the_words(self, played, traces):
        at = replace(state(traces["count_files"]), environment=None)
        assert played.judge(at, bash("echo 99")).reason == "other arguments"

    def test_its_name_says_what_is_played(self, played):
        assert "effects=executed/1" in played.name
        assert Recommended().name == "recommended/8"
