"""`browsing`: pages are searched and opened; gold wins, forks are apart, and nothing that a policy writes breaks it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.core.config import Part
from turntree.core.errors import InputError
from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import Environment, Observation
from turntree.env.check import check_environment
from turntree.env.tasks import TRAIN, open_tasks


@pytest.fixture(scope="module")
def tasks() -> Iterator[Sequence[Environment]]:
    try:
        with open_tasks(Part("browsing"), {TRAIN: 12}) as opened:
            yield opened.of(TRAIN)
    except InputError as error:
        pytest.skip(f"no sandbox here: {error}")


@pytest.fixture(scope="module")
def browsing(tasks: Sequence[Environment]) -> Environment:
    return tasks[0]


def call(name: str, **arguments: object) -> Message:
    return Message("assistant", "", (ToolCall(name, dict(arguments), "call_0"),))


def begun(task: Environment) -> Environment:
    environment = task.fork()
    environment.reset()
    return environment


def told(environment: Environment, action: Message) -> str:
    observation = environment.step(action)
    assert not observation.done and [message.role for message in observation.messages] == ["tool"]
    return observation.messages[0].content


def test_its_tools_are_those_of_a_browser(browsing: Environment) -> None:
    assert [tool["function"]["name"] for tool in browsing.tools] == ["search", "open", "find", "python"]


def test_the_gold_of_every_task_answers_it_and_pages_have_to_be_opened(
    tasks: Sequence[Environment],
) -> None:
    opened = 0
    for task in tasks:
        environment, last = begun(task), None
        for message in task.gold:  # pyright: ignore
            last = environment.step(message)
            opened += any(each.name == "open" for each in message.tool_calls)
        assert last is not None and last.done and last.success
    assert opened >= len(tasks)  # a search alone does not tell enough


def test_it_keeps_the_laws_that_training_relies_on(browsing: Environment) -> None:
    assert [str(finding) for finding in check_environment(browsing) if finding.grave] == []


def test_what_is_done_in_a_fork_is_not_seen_in_the_other(browsing: Environment) -> None:
    """The budget of calls is that of each path: one branch may spend it without the other."""
    environment = begun(browsing)
    assert not told(environment, call("search", query="a")).startswith("error: all")
    twin = environment.fork()
    spent = [told(twin, call("search", query=str(number))) for number in range(24)]
    assert spent[-1].startswith("error: all 24 calls are used")
    assert not told(environment, call("search", query="b")).startswith("error: all")
    gold: Sequence[Message] = browsing.gold  # pyright: ignore
    ends = [path.step(gold[-1]) for path in (twin, environment)]
    assert [(end.done, end.success) for end in ends] == [(True, True)] * 2


def test_a_page_is_read_in_parts_and_a_search_shows_little_of_it(browsing: Environment) -> None:
    gold: Sequence[Message] = browsing.gold  # pyright: ignore
    looked = next(message for message in gold if message.tool_calls[0].name == "open")
    title = looked.tool_calls[0].arguments["title"]
    page = told(begun(browsing), looked)
    found = told(begun(browsing), call("search", query=title))
    assert title in found and page not in found
    assert max(len(line) for line in found.splitlines()) < 200
    assert told(begun(browsing), call("open", title=title, part=99)) != page


HOSTILE = (
    "",
    " ",
    '"',
    "a OR NOT (b",
    "NEAR(a b, 2)",
    "title : *",
    "'; DROP TABLE documents; --",
    "\x00",
    "\ud800",
    "ñ" * 5000,
    "../../etc/passwd",
    "%s%n{0}",
)


@pytest.mark.parametrize("tool", ["search", "open", "find"])
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_texts_get_an_answer_and_leave_the_episode_usable(browsing: Environment, tool: str, text: str) -> None:
    environment = begun(browsing)
    named = {"search": {"query": text}, "open": {"title": text}, "find": {"title": text, "text": text}}[tool]
    assert len(told(environment, call(tool, **named))) < 2500  # nor does its own text fill its context
    gold: Sequence[Message] = browsing.gold  # pyright: ignore
    assert [environment.step(message) for message in gold][-1].success


json_values = st.none() | st.booleans() | st.integers() | st.text(max_size=9) | st.lists(st.integers(), max_size=2)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["search", "open", "find", "close", ""]),
    arguments=st.dictionaries(st.sampled_from(["query", "title", "text", "part", "x"]), json_values, max_size=3),
)
def test_any_call_is_answered_and_none_ends_the_episode(
    browsing: Environment, name: str, arguments: dict[str, object]
) -> None:
    environment = begun(browsing)
    found: Observation = environment.step(Message("assistant", "", (ToolCall(name, arguments),)))
    assert not found.done and len(found.messages) == 1 and found.messages[0].content
