"""The question-answering environment: what it tells, what it counts, what it pays, and how it forks."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import Environment
from turntree.env.local import LocalPool
from turntree.env.tools.runtime import ToolRuntime, ToolRuntimeConfig
from turntree.env.tools.tool import ToolFailed, ToolOutput, ToolSpec
from turntree.traces.schema import Trace
from turntree_worlds.qa.build import QaWorld
from turntree_worlds.qa.demonstrator import QaDemonstrator
from turntree_worlds.qa.entry import POLICY, Questions
from turntree_worlds.qa.environment import INSTRUCTIONS, QaConfig, QaEnvironment, Undecided
from turntree_worlds.qa.experts import answer, compute, play, search
from turntree_worlds.qa.hierarchical import ExecutedCall, HierarchicalReward
from turntree_worlds.qa.questions import Question

QUESTION = Question(id="q", text="Who?", answers=("Ada",), kind="chain")


@pytest.fixture
def environment(searching: ToolRuntime) -> QaEnvironment:
    return QaEnvironment(QUESTION, searching, config=QaConfig(max_calls=2))


def test_it_begins_with_the_question_and_its_instructions(searching: ToolRuntime) -> None:
    assert QaEnvironment(QUESTION, searching).reset() == (Message("user", "Who?"),)
    told = QaEnvironment(QUESTION, searching, config=QaConfig(instructions=INSTRUCTIONS)).reset()
    assert [message.role for message in told] == ["system", "user"]


def test_a_policy_that_was_trained_from_the_embedded_one_is_asked_as_it_was(tmp_path: Path) -> None:
    """Asked with instructions that it has never seen, it would answer next to nothing."""
    trained = tmp_path / "trained"
    shutil.copytree(POLICY, trained)
    tokenizer = json.loads((trained / "tokenizer.json").read_text())
    (trained / "tokenizer.json").write_text(json.dumps(tokenizer | {"version": "of another release"}, indent=2))
    other = tmp_path / "other"
    shutil.copytree(POLICY, other)
    tokenizer["model"]["vocab"].popitem()
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    for model, instructed in (("qa", False), (trained, False), (other, True), ("some-org/some-model", True)):
        with Questions(model=str(model)).open({"train": 1}, seed=0) as opened:
            first = opened.tasks["train"][0].reset()[0]
        assert (first.role == "system") is instructed, model
        shown = next(iter(QaDemonstrator(questions=Questions(model=str(model)), count=1)))
        assert isinstance(shown, Trace) and shown.messages[0] == first, "its traces begin as its episodes do"


def test_it_names_its_task_its_kind_and_its_tools(environment: Environment) -> None:
    assert environment.task_id == "q"
    assert isinstance(environment, QaEnvironment) and environment.task_type == "chain"
    assert [tool["function"]["name"] for tool in environment.tools] == ["search"]


def test_every_call_is_answered_by_a_message_of_its_own(environment: QaEnvironment) -> None:
    environment.reset()
    calls = (ToolCall("search", {"query": "mother"}, id="a"), ToolCall("search", {"query": "mayor"}, id="b"))
    told = environment.step(Message("assistant", "", calls))
    assert [(m.role, m.name, m.tool_call_id) for m in told.messages] == [
        ("tool", "search", "a"),
        ("tool", "search", "b"),
    ]
    assert "The mother is" in told.messages[0].content and "The mayor is" in told.messages[1].content
    assert not told.done and told.success is None


def test_mistakes_are_told_and_recorded_as_refused(environment: QaEnvironment) -> None:
    environment.reset()
    told = environment.step(Message("assistant", "", (ToolCall("browse", {}), ToolCall("search", {"q": "x"}))))
    assert "there is no tool 'browse'" in told.messages[0].content
    assert "wrong arguments" in told.messages[1].content
    assert environment.calls == (ExecutedCall("browse", False), ExecutedCall("search", False))


def test_calls_beyond_the_limit_are_told_and_not_made(environment: QaEnvironment, searching: ToolRuntime) -> None:
    environment.reset()
    for _ in range(2):
        environment.step(search("mother"))
    before = searching.ledger.total().calls
    told = environment.step(search("father"))
    assert told.messages[0].content == "error: all 2 calls are used; give your answer"
    assert not told.done and searching.ledger.total().calls == before
    assert environment.step(answer("Ada")).success is True


@pytest.mark.parametrize(
    ("text", "success", "reward"),
    [("<answer>Ada</answer>", True, 1.0), ("<answer>Eve</answer>", False, 0.0), ("Ada", False, -1.0)],
)
def test_the_first_message_without_a_call_ends_the_episode(
    environment: QaEnvironment, text: str, success: bool, reward: float
) -> None:
    environment.reset()
    ended = environment.step(Message("assistant", text))
    assert (ended.done, ended.success, ended.reward) == (True, success, reward)


def test_an_answer_that_is_partly_right_is_paid_and_no_success(searching: ToolRuntime) -> None:
    question = Question(id="q", text="Who?", answers=("Ada Nash",))
    environment = QaEnvironment(question, searching, HierarchicalReward(score="overlap"))
    environment.reset()
    ended = environment.step(answer("Ada Nash York"))
    assert ended.success is False and ended.reward == pytest.approx(0.8)


def test_an_episode_that_ends_without_an_answer_is_paid_as_such(environment: QaEnvironment) -> None:
    environment.reset()
    assert environment.step(search("mother")).reward == HierarchicalReward().format_penalty


def test_the_bonus_comes_from_the_calls_of_its_own_path(searching: ToolRuntime) -> None:
    reward = HierarchicalReward(bonus_tools=("search",), tool_bonus=0.25)
    environment = QaEnvironment(QUESTION, searching, reward)
    environment.reset()
    twin = environment.fork()
    environment.step(search("mother"))
    assert environment.step(answer("Ada")).reward == 1.25
    assert twin.step(answer("Ada")).reward == 1.0


def test_a_fork_answers_as_the_original_would_and_neither_sees_the_others_calls(searching: ToolRuntime) -> None:
    environment = QaEnvironment(QUESTION, searching, config=QaConfig(max_calls=3))
    environment.reset()
    environment.step(search("mother"))
    twin = environment.fork()
    assert environment.step(search("mayor of Alden")) == twin.step(search("mayor of Alden"))
    environment.step(search("father"))
    assert [len(environment.calls), len(twin.calls)] == [3, 2]
    assert "[1]" in twin.step(search("father")).messages[0].content, "its own third call"


def test_a_reset_begins_anew(environment: QaEnvironment) -> None:
    environment.reset()
    first = environment.step(search("mother"))
    environment.reset()
    assert environment.calls == ()
    assert environment.step(search("mother")) == first


class Broken:
    spec = ToolSpec("search", "", {"type": "object"})
    version, pure = "1", True

    def call(self, arguments, seconds: float) -> ToolOutput:
        raise ConnectionError("the engine is down")


def test_a_tool_that_fails_raises_so_that_the_rollout_is_censored() -> None:
    runtime = ToolRuntime([Broken()], ToolRuntimeConfig(retries=0))
    environment = QaEnvironment(QUESTION, runtime)
    environment.reset()
    with pytest.raises(ToolFailed, match="the engine is down"):
        environment.step(search("mother"))
    assert environment.calls == ()


def test_an_answer_whose_comparison_is_open_has_no_reward() -> None:
    """It is no failure of the policy's, and no success."""
    question = dataclasses.replace(QUESTION, answers=("x \\le 3",), answer_type="expression")
    environment = QaEnvironment(question, ToolRuntime([Broken()]))
    environment.reset()
    with pytest.raises(Undecided, match="is not decided"):
        environment.step(Message("assistant", "<answer>(-\\infty, 3]</answer>"))


@pytest.mark.parametrize("open_pool", [LocalPool, lambda: LocalPool(threads=2)], ids=["inline", "threads"])
def test_it_is_played_and_forked_in_every_pool_that_shares_memory(
    open_pool, world: QaWorld, searching: ToolRuntime
) -> None:
    pool = open_pool()
    posed = next(posed for posed in world.questions("dev", 20) if posed.operation == "none")
    environment = QaEnvironment(posed.question, searching)
    said = [m for m in play(environment.fork(), posed).messages if m.role == "assistant"]
    session = pool.open(environment)
    pool.reset(session)
    (told,) = pool.poll(20).values()
    for action in said[:-1]:
        pool.step(session, action)
        (told,) = pool.poll(20).values()
    twin = pool.fork(session)
    pool.step(twin, answer("nobody"))
    assert [a.observation and a.observation.success for a in pool.poll(20).values()] == [False]
    pool.step(session, said[-1])
    assert [a.observation and a.observation.success for a in pool.poll(20).values()] == [True]
    assert told.fault is None


def test_python_is_run_in_the_sandbox(tools: ToolRuntime) -> None:
    question = Question(id="q", text="6 * 7?", answers=("42",), answer_type="number")
    environment = QaEnvironment(question, tools)
    environment.reset()
    assert environment.step(compute("6 * 7")).messages[0].content == "42"
    environment.step(search("mother"))
    assert environment.step(answer("42")).reward == pytest.approx(1.1), "correct, with both tools"
