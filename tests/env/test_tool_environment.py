"""A plain class becomes an environment: its public methods are the tools, its `reset` tells the task."""

from __future__ import annotations

import contextlib
import random
import sqlite3
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http.client import IncompleteRead
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from turntree.core.errors import InputError
from turntree.core.foreign import EnvironmentFault, EnvironmentGone, is_of_the_machine
from turntree.core.messages import Message, ToolCall
from turntree.env.adapted import Scored
from turntree.env.check import check_environment
from turntree.env.local import LocalPool
from turntree.env.pool import Session
from turntree.env.processes import ProcessPool, ProcessPoolConfig
from turntree.env.tool_environment import ToolEnvironment, tool_names, tool_schemas


class Counter:
    """Count to a goal."""

    def __init__(self) -> None:
        self.count = 0

    def reset(self, goal: int, **_: object) -> str:
        self.goal = goal
        return f"Count to {goal}."

    def add(self, number: int, times: int = 1) -> str:
        """Add to the counter.

        Args:
            number: What to add.
            times: How often.
        """
        if number > 100:
            raise ValueError("that is too much")
        self.count += number * times
        return f"The counter says {self.count}."

    def look(self) -> dict:
        """Look at the counter."""
        return {"count": self.count}

    def _hidden(self) -> str:
        return "nothing"

    @property
    def reward(self) -> float:
        return float(self.count == self.goal)


def calling(name: str, **arguments: object) -> Message:
    return Message("assistant", "", (ToolCall(name, dict(arguments), "1"),))


def begun(goal: int = 3) -> ToolEnvironment:
    environment = ToolEnvironment(Counter, task_id="a", arguments={"goal": goal})
    environment.reset()
    return environment


def answer(environment: ToolEnvironment, action: Message) -> str:
    return environment.step(action).messages[0].content


def test_public_methods_are_the_tools_with_the_schema_of_their_hints_and_docstring() -> None:
    assert tool_names(Counter) == ["add", "look"]
    add, look = (tool["function"] for tool in tool_schemas(Counter))
    assert add["description"] == "Add to the counter."
    assert add["parameters"]["properties"]["number"] == {"type": "integer", "description": "What to add."}
    assert add["parameters"]["required"] == ["number"]
    assert look["name"] == "look"


def test_reset_tells_the_task_and_the_reward_is_read_at_the_end() -> None:
    environment = ToolEnvironment(Counter, task_id="a", arguments={"goal": 3})
    assert environment.reset() == (Message("user", "Count to 3."),)
    told = environment.step(calling("add", number=3))
    assert told.messages == (Message("tool", "The counter says 3.", tool_call_id="1", name="add"),)
    assert not told.done
    over = environment.step(Message("assistant", "It is done."))
    assert (over.done, over.success, over.reward) == (True, True, 1.0)


class OwnsItsReward:
    """As TRL's environments are from version 1 on: a method gives the reward, and tools may be asynchronous."""

    def reset(self) -> str:
        self.said, self.lost = "", False
        return "Say yes."

    async def say(self, word: str) -> str:
        """Say a word.

        Args:
            word: The word.
        """
        self.said = word
        return f"You said {word}."

    async def get_reward(self) -> float | None:
        return None if self.lost else float(self.said == "yes")


def test_get_reward_is_no_tool_but_the_reward_and_asynchronous_tools_are_waited_for() -> None:
    assert tool_names(OwnsItsReward) == ["say"]
    environment = ToolEnvironment(OwnsItsReward, task_id="a")
    environment.reset()
    told = environment.step(calling("say", word="yes"))
    assert (told.messages[0].content, told.reward, told.done) == ("You said yes.", 1.0, False)
    over = environment.step(Message("assistant", "Done."))
    assert (over.done, over.success, over.reward) == (True, True, 1.0)
    environment.object.lost = True
    with pytest.raises(EnvironmentFault, match="NoneType, not a number"):
        environment.step(Message("assistant", "Done."))


class Unread(Counter):
    """What is read of it raises, or is not of its kind."""

    success: object = None

    @property
    def reward(self) -> float:
        return self.no_such_thing  # type: ignore[attr-defined]


class Unclear(Counter):
    success = "no"


@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [(Unread, AttributeError, "no_such_thing"), (Unclear, EnvironmentFault, "success that is neither true nor false")],
)
def test_what_cannot_be_read_of_an_object_is_a_fault_and_no_outcome(
    kind: type, error: type[Exception], said: str
) -> None:
    """An error inside the property `reward` was no reward, so 0; the text "no" was success."""
    environment = ToolEnvironment(kind, task_id="a", arguments={"goal": 3})
    environment.reset()
    with pytest.raises(error, match=said):
        environment.step(Message("assistant", "Done."))


class Streams(Counter):
    closed: ClassVar[list[int]] = []

    def look(self) -> dict:
        """Look at the counter."""
        return {"count": np.int64(self.count), "all": np.arange(2)}

    async def close(self) -> None:
        self.closed.append(self.goal)


class Yields(Counter):
    def look(self):  # type: ignore[override]
        """Look at the counter."""
        yield "3"


def test_numbers_of_numpy_are_numbers_for_the_policy_and_an_asynchronous_close_is_waited_for() -> None:
    environment = ToolEnvironment(Streams, task_id="a", arguments={"goal": 5})
    environment.reset()
    assert answer(environment, calling("look")) == '{"count": 0, "all": [0, 1]}'
    del environment
    assert Streams.closed == [5]


def test_a_tool_that_yields_is_refused_before_it_is_played() -> None:
    """Its answer was the name and address of a generator, and nothing of it was done."""
    with pytest.raises(InputError, match=r"'Yields.look': it is a generator"):
        tool_schemas(Yields)


class Misjudging(OwnsItsReward):
    get_reward = None
    reward = "good"

    async def reset(self) -> str:
        self.said = ""
        return "Say yes."


def test_an_asynchronous_reset_is_waited_for_too() -> None:
    assert ToolEnvironment(Misjudging, task_id="a").reset() == (Message("user", "Say yes."),)


def test_a_reward_that_is_no_number_is_named() -> None:
    environment = ToolEnvironment(Misjudging, task_id="a")
    environment.reset()
    with pytest.raises(EnvironmentFault, match="answered a reward that is not a finite number"):
        environment.step(calling("say", word="yes"))


def test_its_state_is_what_the_object_holds_so_equal_states_compare_equal() -> None:
    """However they were reached, and whatever is done to another copy afterwards."""
    one, other = begun(), begun()
    assert one.state() == other.state() != begun(goal=4).state()
    one.step(calling("add", number=2))
    before = one.state()
    twin = one.fork()
    assert before == twin.state() != other.state()
    for _ in range(2):
        other.step(calling("add", number=1))
    assert other.state() == before
    one.step(calling("add", number=1))
    assert twin.state() == before != one.state()
    assert ToolEnvironment(Counter, task_id="a").state() is None, "nothing was reset"


class Drawing(Counter):
    def reset(self, goal: int, **_: object) -> str:
        self._random, self.bag, self.trail = random.Random(goal), {"a": [1, (2,)]}, {3}
        return super().reset(goal)

    def draw(self) -> str:
        """Draw a number."""
        self.bag["a"].append(self._random.random())
        return "drawn"


@dataclass(frozen=True)
class Place:
    row: int
    column: int


class Walker:
    def reset(self) -> str:
        self.seen, self.steps = {Place(0, 0)}, {Place(0, 0): 1}
        return "Walk."

    def go(self, row: int) -> str:
        """Walk.

        Args:
            row: Where to.
        """
        self.seen.add(Place(row, 0))
        return "There."


def test_records_in_sets_and_as_keys_belong_to_the_state() -> None:
    task = ToolEnvironment(Walker, task_id="a")
    task.reset()
    before, twin = task.state(), task.fork()
    assert before == twin.state() and task.state_problem() is None
    task.step(calling("go", row=1))
    assert task.state() != before


def test_the_place_of_a_generator_and_nested_collections_belong_to_the_state() -> None:
    task = ToolEnvironment(Drawing, task_id="a", arguments={"goal": 3})
    task.reset()
    before, twin = task.state(), task.fork()
    task.step(calling("draw"))
    assert before == twin.state() != task.state()
    twin.step(calling("draw"))
    assert twin.state() == task.state()


class Connected(Counter):
    def reset(self, goal: int, **_: object) -> str:
        self.servers = [object()]
        return super().reset(goal)


class Chosen(Connected):
    def __getstate__(self) -> object:
        return {"count": self.count}


def test_an_object_that_holds_something_else_has_no_state_and_says_which_attribute_it_is() -> None:
    task = ToolEnvironment(Connected, task_id="a", arguments={"goal": 3})
    task.reset()
    assert task.state() is None
    assert task.state_problem() == "attribute 'servers[0]' is object"
    (note,) = [found for found in check_environment(task) if "compared" in found.law]
    assert (note.said, note.grave) == (
        "attribute 'servers[0]' is object; the verifier `executed` compares answers only",
        False,
    )
    chosen = ToolEnvironment(Chosen, task_id="a", arguments={"goal": 3})
    chosen.reset()
    assert (chosen.state(), chosen.state_problem()) == ({"count": 0}, None)


def test_what_reset_returns_is_appended_to_the_prompt_as_trl_does() -> None:
    prompt = (Message("system", "Be brief."), Message("user", "Play: "))
    environment = ToolEnvironment(Counter, task_id="a", arguments={"goal": 3}, prompt=prompt)
    assert environment.reset() == (prompt[0], Message("user", "Play: Count to 3."))


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (calling("nothing"), "error: there is no tool 'nothing'; the tools are add, look"),
        (calling("_hidden"), "error: there is no tool '_hidden'; the tools are add, look"),
        (calling("reset", goal=0), "error: there is no tool 'reset'; the tools are add, look"),
        (calling("add"), "error: wrong arguments: missing a required argument: 'number'"),
        (calling("add", number=1, more=2), "error: wrong arguments: got an unexpected keyword argument 'more'"),
        (calling("add", number=101), "error: that is too much"),
        (calling("look"), '{"count": 0}'),
    ],
)
def test_whatever_the_policy_calls_is_answered(action: Message, said: str) -> None:
    assert answer(begun(), action) == said


def test_a_fork_goes_its_own_way() -> None:
    environment = begun()
    environment.step(calling("add", number=2))
    twin = environment.fork()
    assert answer(twin, calling("add", number=1)) == "The counter says 3."
    assert answer(environment, calling("add", number=5)) == "The counter says 7."
    assert twin.step(Message("assistant", "done")).success


def test_a_copy_before_reset_begins_its_own_episode() -> None:
    environment = ToolEnvironment(Counter, task_id="a", arguments={"goal": 3})
    first, second = environment.fork(), environment.fork()
    first.reset(), second.reset()
    first.step(calling("add", number=1))
    assert answer(second, calling("look")) == '{"count": 0}'


class Dice(Counter):
    def roll(self) -> str:
        """Roll."""
        return str(random.random())


def test_an_environment_that_draws_without_a_seed_cannot_be_forked_and_says_so() -> None:
    environment = ToolEnvironment(Dice, task_id="a", arguments={"goal": 3})
    environment.reset()
    environment.step(calling("roll"))
    with pytest.raises(EnvironmentFault, match="answered differently at turn 1"):
        environment.fork()


class Copied(Dice):
    def fork(self) -> Copied:
        twin = Copied()
        twin.count, twin.goal = self.count, self.goal
        return twin


def test_a_class_with_a_fork_of_its_own_is_not_replayed() -> None:
    environment = ToolEnvironment(Copied, task_id="a", arguments={"goal": 3})
    environment.reset()
    environment.step(calling("add", number=2))
    environment.step(calling("roll"))
    assert answer(environment.fork(), calling("look")) == '{"count": 2}'
    assert "fork" not in tool_names(Copied)


class Fails(Counter):
    done = False

    def stop(self) -> str:
        """Stop."""
        self.done = True
        return "stopped"

    def lose(self) -> str:
        """Lose the server."""
        raise EnvironmentFault("the server is gone")

    def lose_all(self) -> str:
        """Lose the server of all."""
        raise EnvironmentGone("no server is left")


def test_an_object_may_end_the_episode_or_have_it_censored() -> None:
    environment = ToolEnvironment(Fails, task_id="a", arguments={"goal": 3})
    environment.reset()
    with pytest.raises(EnvironmentFault, match="the server is gone"):
        environment.fork().fork() and environment.step(calling("lose"))
    with pytest.raises(EnvironmentGone):
        environment.step(calling("lose_all"))
    over = environment.step(calling("stop"))
    assert (over.done, over.success, over.reward) == (True, False, 0.0)


class Saying(Counter):
    def done(self) -> str:
        """Say that it is done."""
        return "bye"


def test_a_tool_named_done_does_not_end_the_episode() -> None:
    environment = ToolEnvironment(Saying, task_id="a", arguments={"goal": 3})
    environment.reset()
    assert not environment.step(calling("add", number=3)).done
    said = environment.step(calling("done"))
    assert (said.messages[0].content, said.done) == ("bye", False)


class Lamp:
    """Holds a file while it is open."""

    def reset(self, folder: str) -> str:
        self._file = Path(tempfile.mkstemp(dir=folder)[1])
        return "Press."

    def press(self) -> str:
        """Press."""
        return "pressed"

    def fall(self) -> str:
        """Fall."""
        raise EnvironmentFault("it fell")

    def close(self) -> None:
        self._file.unlink()


def call_foreign(pool: LocalPool, session: Session, name: str = "press") -> str | None:
    """Begin, or call a tool; the fault."""
    pool.step(session, calling(name)) if session.answers else pool.reset(session)
    return pool.poll(60)[session].fault


@pytest.mark.parametrize("kind", [LocalPool, partial(LocalPool, threads=2), ProcessPool])
def test_an_object_is_closed_once_its_session_is_over_and_a_fork_closes_its_own(
    kind: Callable[..., LocalPool], tmp_path: Path
) -> None:
    """As soon as its worker is called again, where it is in one."""

    def opened() -> int:
        return len(list(tmp_path.iterdir()))

    pool = kind(ProcessPoolConfig(workers=1)) if kind is ProcessPool else kind()
    with pool:
        task = ToolEnvironment(Lamp, task_id="a", arguments={"folder": str(tmp_path)})
        first, second = pool.open(task), pool.open(task)
        call_foreign(pool, first), call_foreign(pool, second), call_foreign(pool, first)
        twin = pool.fork(first)
        call_foreign(pool, twin)
        assert opened() == 3
        pool.close(first)
        call_foreign(pool, twin)
        assert opened() == 2
        assert call_foreign(pool, second, "fall") == "it fell"
        assert opened() == 1, "a failed call leaves an object half-way: the next one is made anew"
        call_foreign(pool, second)
        assert opened() == 2
    del pool
    assert opened() == 0


def test_an_object_is_closed_where_an_episode_begins_again(tmp_path: Path) -> None:
    task = ToolEnvironment(Lamp, task_id="a", arguments={"folder": str(tmp_path)})
    task.reset(), task.reset()
    assert len(list(tmp_path.iterdir())) == 1
    assert "close" not in tool_names(Lamp)


class Undescribed:
    def reset(self) -> str:
        return "go"

    def act(self, what):
        """Act."""


@pytest.mark.parametrize(("kind", "said"), [(Undescribed, "Undescribed.act"), (object, "has no public method")])
def test_a_class_whose_tools_cannot_be_described_is_refused_by_name(kind: type, said: str) -> None:
    with pytest.raises(InputError, match=said):
        tool_schemas(kind)


class _Lost(Exception):
    """As an HTTP client raises it."""

    def __init__(self, status: int | None = None) -> None:
        super().__init__("lost")
        self.response = None if status is None else SimpleNamespace(status_code=status)


RemoteProtocolError = type("RemoteProtocolError", (Exception,), {})  # of httpx
ServerDisconnectedError = type("ServerDisconnectedError", (type("ClientConnectionError", (Exception,), {}),), {})


def _of_sqlite(*statements: str) -> Exception:
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        try:
            for statement in statements:
                database.execute(statement)
        except sqlite3.Error as error:
            return error.with_traceback(None)  # its frames would hold those that import this module
    raise AssertionError(statements)


def _full_disk() -> Exception:
    return _of_sqlite("pragma max_page_count=1", "create table t (x)", "create table u (x)")


def _no_table() -> Exception:
    return _of_sqlite("select * from missing")


@pytest.mark.parametrize(
    ("error", "censored"),
    [
        (ExceptionGroup("of tasks", [ValueError("no"), ConnectionRefusedError()]), True),
        (ExceptionGroup("of tasks", [ValueError("no")]), False),
        (IncompleteRead(b""), True),
        (RemoteProtocolError("closed"), True),
        (ServerDisconnectedError("closed"), True),
        (_Lost(503), True),
        (_Lost(429), True),
        (_Lost(404), False),
        (_Lost(), False),
        (_full_disk(), True),
        (_no_table(), False),
        (type("SSHException", (Exception,), {})("closed"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), True),
    ],
)
def test_a_failure_of_a_server_is_no_answer_of_a_tool(error: Exception, censored: bool) -> None:
    """As an answer it would leave the rollout its reward of 0."""
    assert is_of_the_machine(error) is censored
    wrapped = RuntimeError("the tool failed")
    wrapped.__cause__ = error
    assert is_of_the_machine(wrapped) is censored


class Board(Counter):
    def reset(self, **_: object) -> list[dict[str, str]]:
        return [{"type": "text", "text": "Count "}, {"type": "text", "text": "on."}]


def test_text_parts_are_their_text_as_for_trl() -> None:
    assert ToolEnvironment(Board, task_id="a").reset() == (Message("user", "Count on."),)


def test_a_fork_that_is_a_replay_keeps_nobody_waiting_and_is_counted() -> None:
    made: list[int] = []

    def counter() -> Counter:
        made.append(1)
        return Counter()

    pool = LocalPool()
    session = pool.open(ToolEnvironment(counter, task_id="a", arguments={"goal": 9}))
    pool.reset(session)
    pool.poll(60)
    for _ in range(3):
        pool.step(session, calling("add", number=1))
        pool.poll(60)
    begun, twin = len(made), pool.fork(session)
    assert len(made) == begun, "the fork replays in its own call"
    pool.step(twin, calling("add", number=2))
    (answered,) = pool.poll(60).values()
    assert answered.observation is not None and answered.observation.messages[0].content == "The counter says 5."
    assert answered.calls == 4


def test_a_reward_function_sees_the_answer_that_ended_the_episode() -> None:
    seen: list[list[str]] = []

    def judge(completions: list[list[dict[str, str]]], **_: object) -> list[float]:
        seen.append([message["role"] for message in completions[0]])
        return [1.0]

    class Ending(Counter):
        done = False

        def add(self, number: int) -> str:
            """Add.

            Args:
                number: What.
            """
            self.done = True
            return "done"

    environment = Scored(ToolEnvironment(Ending, task_id="a", arguments={"goal": 3}), judge, {})
    environment.reset()
    assert environment.step(calling("add", number=1)).done
    other = Scored(begun(), judge, {})
    other.reset()
    assert other.step(Message("assistant", "so")).done
    assert seen == [["assistant", "tool"], ["assistant"]]
