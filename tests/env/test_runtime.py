"""The laws of tool calls: executed once, in bounded time, each counted; a failure is typed, shared and never kept."""

import functools
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from turntree.core.errors import ConfigError
from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import Observation
from turntree.env.local import LocalPool
from turntree.env.tools.runtime import ToolCounts, ToolRuntime, ToolRuntimeConfig
from turntree.env.tools.tool import ToolFailed, ToolOutput, ToolSpec, ToolStatus

SCHEMA = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}


class Fake:
    """A tool whose `act` gets the query and the number of its execution, from 0."""

    def __init__(self, act=lambda query, number: f"about {query}", *, name="fake", pure=True, version="1"):
        self.spec, self.pure, self.version = ToolSpec(name, "a fake", SCHEMA), pure, version
        self._act, self._lock = act, threading.Lock()
        self.executed: list[str] = []

    def call(self, arguments, seconds):
        with self._lock:
            number = self.executed.count(arguments["query"])
            self.executed.append(arguments["query"])
        told = self._act(arguments["query"], number)
        return told if isinstance(told, ToolOutput) else ToolOutput(told)


def asked(query, name="fake", **more):
    return ToolCall(name, {"query": query, **more})


def runtime(tool, **config):
    return ToolRuntime([tool], ToolRuntimeConfig(**{"pause_seconds": 0.001, **config}))


def balanced(counts: ToolCounts) -> bool:
    return counts.calls == counts.hits + counts.joined + counts.misses + counts.refused


def test_an_answer_is_executed_once_and_then_a_hit():
    tools = runtime(tool := Fake())
    first, second = tools.call(asked("x")), tools.call(asked("x"))
    assert (first.text, first.status) == ("about x", ToolStatus.ANSWERED) and first == second
    assert tool.executed == ["x"]
    counts = tools.ledger.total()
    assert (counts.calls, counts.hits, counts.misses, counts.executions) == (2, 1, 1, 1)


def test_the_order_of_arguments_makes_no_difference_but_their_values_and_types_do():
    tools = runtime(tool := Fake())
    for call in (
        ToolCall("fake", {"query": "x", "n": 1}), ToolCall("fake", {"n": 1, "query": "x"}),
        ToolCall("fake", {"query": "x", "n": True}), ToolCall("fake", {"query": "x", "n": "1"}),
    ):  # fmt: skip
        tools.call(call)
    assert len(tool.executed) == 3


def test_identical_calls_under_way_are_executed_once_whatever_their_number():
    release = threading.Event()
    tools = runtime(tool := Fake(lambda query, _: (release.wait(20), "late")[1]))
    with ThreadPoolExecutor(20) as threads:
        waiting = [threads.submit(tools.call, asked("x")) for _ in range(20)]
        while tools.ledger.total().calls < 20:
            time.sleep(0.001)
        release.set()
        results = [future.result() for future in waiting]
    assert tool.executed == ["x"] and {result.text for result in results} == {"late"}
    assert tools.ledger.total().joined == 19 and balanced(tools.ledger.total())


def test_under_heavy_tails_nothing_is_executed_twice_and_slow_calls_delay_their_own_callers_only():
    """Pareto latencies from 40 threads; one query never returns within the test's patience."""
    stuck = threading.Event()

    def act(query, _):
        if query == "stuck":
            stuck.wait(60)
        time.sleep(min(0.2, 0.001 * random.Random(query).paretovariate(1.1)))
        return query

    tools = runtime(tool := Fake(act))
    draws = random.Random(0)
    queries = [str(draws.randrange(30)) for _ in range(400)]
    with ThreadPoolExecutor(44) as threads:
        never = [threads.submit(tools.call, asked("stuck")) for _ in range(4)]
        results = list(threads.map(lambda query: tools.call(asked(query)), queries))
        assert not any(future.done() for future in never)
        stuck.set()
    assert [result.text for result in results] == queries
    assert sorted(tool.executed) == sorted({*queries, "stuck"})
    counts = tools.ledger.total()
    assert counts.executions == len({*queries}) + 1 and balanced(counts)


def test_what_does_not_return_is_given_up_in_time_and_its_place_given_to_others():
    hang = threading.Event()
    tools = runtime(
        Fake(lambda query, _: (hang.wait(60) if query == "hang" else None, "fine")[1]),
        seconds=0.05, retries=1, concurrent=1,
    )  # fmt: skip
    started = time.perf_counter()
    failed = tools.call(asked("hang"))
    assert failed.status is ToolStatus.FAILED and "no answer within 0.05 s (2 times)" in failed.text
    assert time.perf_counter() - started < 5
    counts = tools.ledger.total()
    assert (counts.abandoned, counts.retries, counts.failures) == (2, 1, 1)
    hang.set()
    assert ToolRuntime([Fake()]).call(asked("other")).text == "about other"


def test_a_failure_is_tried_again_a_bounded_number_of_times():
    def act(query, number):
        if number < 2:
            raise ConnectionError("reset by peer")
        return "third time"

    tools = runtime(tool := Fake(act), retries=2)
    assert tools.call(asked("x")).text == "third time"
    counts = tools.ledger.total()
    assert (counts.misses, counts.retries, counts.failures, counts.executions) == (1, 2, 0, 3) and len(
        tool.executed
    ) == 3
    few = runtime(tool := Fake(act), retries=1)
    failed = few.call(asked("x"))
    assert failed.status is ToolStatus.FAILED and "ConnectionError: reset by peer" in failed.text
    assert len(tool.executed) == 2 and few.ledger.total().failures == 1


def test_a_failure_is_not_kept():
    tools = runtime(Fake(lambda query, number: 1 / 0 if number == 0 else "well"), retries=0)
    assert tools.call(asked("x")).status is ToolStatus.FAILED
    assert tools.call(asked("x")).text == "well"


def test_a_failure_raises_where_it_would_become_an_observation():
    failed = runtime(Fake(lambda *_: 1 / 0), retries=0).call(asked("x"))
    with pytest.raises(ToolFailed, match="fake: ZeroDivisionError"):
        failed.observation()
    assert runtime(Fake()).call(asked("x")).observation() == "about x"


@pytest.mark.parametrize(
    "call", [ToolCall("fake", {}), ToolCall("fake", {"query": 3}), ToolCall("other", {"query": "x"})]
)
def test_the_policys_own_mistake_is_told_and_nothing_is_executed(call):
    tools = runtime(tool := Fake())
    result = tools.call(call)
    assert result.status is ToolStatus.REFUSED and result.observation().startswith("error: ")
    assert tool.executed == [] and tools.ledger.total() == ToolCounts(calls=1, refused=1)


def test_a_tool_with_effects_is_executed_every_time_and_never_again_for_a_failure():
    tools = runtime(tool := Fake(lambda query, number: 1 / 0 if number == 2 else str(number), pure=False))
    assert [tools.call(asked("x")).status for _ in range(3)] == ["answered", "answered", "failed"]
    assert len(tool.executed) == 3 and tools.ledger.total().retries == 0


def test_an_answer_that_is_not_final_is_not_kept():
    tools = runtime(tool := Fake(lambda *_: ToolOutput("timed out", final=False)))
    assert {tools.call(asked("x")).text for _ in range(2)} == {"timed out"}
    assert len(tool.executed) == 2


def test_long_answers_are_cut_and_say_by_how_much():
    tools = runtime(Fake(lambda *_: "a" * 150), output_chars=100)
    assert tools.call(asked("x")).text == "a" * 100 + "\n[50 more characters]"
    assert tools.call(asked("x")).text.endswith("[50 more characters]")
    assert tools.ledger.total().truncated == 1


def test_the_answers_kept_are_bounded_and_the_least_recently_used_goes_first():
    tools = runtime(tool := Fake(), cached_answers=2)
    for query in ("a", "b", "a", "c", "a", "b"):
        tools.call(asked(query))
    assert tool.executed == ["a", "b", "c", "b"]


def test_a_call_under_way_is_joined_however_many_others_are_answered_meanwhile():
    begun, go = threading.Event(), threading.Event()

    def slow(query, number):
        if query == "slow":
            begun.set()
            assert go.wait(10)
        return query

    tools = runtime(tool := Fake(slow), cached_answers=2)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(tools.call, asked("slow"))
        assert begun.wait(10)
        for query in ("a", "b", "c"):
            tools.call(asked(query))
        second = threads.submit(tools.call, asked("slow"))
        while not tools.ledger.total().joined:
            time.sleep(0.01)
        go.set()
        assert first.result().text == second.result().text == "slow"
    assert tool.executed.count("slow") == 1


def test_tools_are_shown_in_the_shape_of_chat_templates():
    assert runtime(Fake()).schemas == (
        {"type": "function", "function": {"name": "fake", "description": "a fake", "parameters": SCHEMA}},
    )


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="two tools are named 'fake'"):
        ToolRuntime([Fake(), Fake()])


class Asker:
    """An episode that makes one tool call a turn."""

    task_id, tools = "asker", ()

    def __init__(self, runtime):
        self.runtime = runtime

    def reset(self):
        return (Message("user", "ask"),)

    def step(self, action):
        text = self.runtime.call(asked(action.content)).observation()
        return Observation((Message("tool", text),), done=False)

    def fork(self):
        return Asker(self.runtime)


def gather(pool, count):
    found = {}
    until = time.monotonic() + 30
    while len(found) < count and time.monotonic() < until:
        found |= pool.poll(0.5)
    return found


def test_in_a_pool_a_slow_call_keeps_its_own_session_waiting_and_a_failure_is_a_fault():
    slow = threading.Event()

    def act(query, _):
        if query == "bad":
            raise OSError("down")
        if query == "slow":
            slow.wait(30)
        return query

    tools = runtime(tool := Fake(act), retries=0)
    with LocalPool(threads=8) as pool:
        sessions = [pool.open(Asker(tools)) for _ in range(4)]
        for session in sessions:
            pool.reset(session)
        gather(pool, 4)
        for session, query in zip(sessions, ("slow", "quick", "bad", "slow"), strict=True):
            pool.step(session, Message("assistant", query))
        first = gather(pool, 2)
        assert first[sessions[1]].observation == Observation((Message("tool", "quick"),), done=False)
        assert "ToolFailed: fake: OSError: down" in (first[sessions[2]].fault or "")
        assert pool.in_flight == 2 and pool.poll(0.01) == {}
        slow.set()
        assert len(gather(pool, 2)) == 2
    assert tool.executed.count("slow") == 1


def test_a_forked_session_replays_from_the_cache():
    tools = runtime(tool := Fake())
    with LocalPool(threads=2) as pool:
        session = pool.open(Asker(tools))
        pool.reset(session)
        gather(pool, 1)
        pool.step(session, Message("assistant", "a"))
        gather(pool, 1)
        twin = pool.fork(session)
        pool.step(twin, Message("assistant", "b"))
        assert gather(pool, 1)[twin].observation.messages[0].content == "about b"
    assert tool.executed == ["a", "b"]


def declared(parameters):
    tool = Fake()
    tool.spec = ToolSpec("fake", "a fake", parameters)
    return tool


@pytest.mark.parametrize(
    "broken",
    [
        {"properties": {"query": {"$ref": "#/$defs/nowhere"}}},
        {"properties": {"query": {"$ref": "http://127.0.0.1:9/schema.json"}}},
        {"properties": {"query": {"$ref": "file:///etc/hostname"}}},
        {"properties": {"query": {"pattern": "("}}},
        {"patternProperties": {"[": {}}},
        {"type": "sentence"},
        {"$schema": ["not a dialect"]},
        {"properties": {"deep": functools.reduce(lambda s, _: {"not": s}, range(400), {})}},
    ],
    ids=["dangling", "http", "file", "pattern", "pattern of names", "type", "dialect", "deep"],
)
def test_a_tool_whose_schema_decides_nothing_is_refused_where_it_is_declared(broken, monkeypatch):
    fetched = []
    monkeypatch.setattr("urllib.request.urlopen", lambda *a, **k: fetched.append(a))
    with pytest.raises(ConfigError, match="field 'fake': its parameters"):
        runtime(declared(broken))
    assert fetched == []


@pytest.mark.parametrize(
    "endless",
    [
        {"properties": {"query": {"pattern": "^(a+)+$"}}},
        {"patternProperties": {"^(a|a)*c": {}}, "properties": {"query": {"pattern": "^(a|a)*$"}}},
        {
            "properties": {"query": {"$ref": "#/$defs/l0"}},
            "$defs": {
                **{f"l{n}": {"allOf": [{"$ref": f"#/$defs/l{n + 1}"}] * 2} for n in range(40)}, "l40": {}
            },
        },
        {"properties": {"query": {"$ref": "#/properties/query"}}},
    ],
    ids=["pattern", "names", "references", "circle"],
)  # fmt: skip
def test_a_schema_that_takes_endless_time_is_a_failure_of_the_tool_within_the_limit(endless, monkeypatch):
    monkeypatch.setattr("turntree.verify.arguments.SECONDS", 0.2)
    tools = runtime(tool := declared(endless))
    result = tools.call(asked("a" * 60 + "!"))
    assert result.status is ToolStatus.FAILED
    assert tool.executed == [] and balanced(tools.ledger.total())


def test_patterns_and_references_inside_a_schema_are_kept_to():
    tools = runtime(
        declared({"properties": {"query": {"$ref": "#/$defs/word"}}, "$defs": {"word": {"pattern": "^[a-z]+$"}}})
    )
    assert tools.call(asked("word")).status is ToolStatus.ANSWERED
    refused = tools.call(asked("two words"))
    assert refused.status is ToolStatus.REFUSED and "query: 'two words' does not match" in refused.text


@pytest.mark.parametrize(
    "written", [10**5000, functools.reduce(lambda v, _: [v], range(5000), [])], ids=["long", "deep"]
)
def test_arguments_that_cannot_be_written_are_the_callers_mistake(written):
    tools = runtime(tool := declared({"type": "object"}))
    assert tools.call(ToolCall("fake", {"query": "x", "more": written})).status is ToolStatus.REFUSED
    assert tool.executed == []
