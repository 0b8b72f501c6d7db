"""What every pool of environments promises, in this process and in workers that die."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from fault_drill import Corridor, FaultPlan, Faulty
from turntree.core.errors import InputError
from turntree.core.foreign import EnvironmentGone
from turntree.core.messages import Message
from turntree.core.protocols import Environment, Observation
from turntree.env import processes
from turntree.env.local import LocalPool
from turntree.env.pool import Answer, Session
from turntree.env.processes import ProcessPool, ProcessPoolConfig


@pytest.fixture(scope="module")
def workers() -> Iterator[ProcessPool]:
    with ProcessPool(ProcessPoolConfig(workers=2, step_seconds=2.0)) as pool:
        yield pool


@pytest.fixture(scope="module")
def threads() -> Iterator[LocalPool]:
    with LocalPool(threads=4) as pool:
        yield pool


@pytest.fixture(params=["in this process", "in threads", "in worker processes"])
def pool(request: pytest.FixtureRequest) -> Iterator[LocalPool]:
    if request.param == "in this process":
        pool = LocalPool()
    else:
        pool = request.getfixturevalue("threads" if request.param == "in threads" else "workers")
    yield pool
    assert pool.in_flight == 0
    assert pool.poll() == {}


def said(text: str) -> Message:
    return Message("assistant", text)


def answers(pool: LocalPool, count: int) -> dict[Session, Answer]:
    """The next `count` answers, by session."""
    found: dict[Session, Answer] = {}
    until = time.monotonic() + 60
    while len(found) < count and time.monotonic() < until:
        answered = pool.poll(1.0)
        assert not answered.keys() & found.keys()
        found |= answered
    assert len(found) == count
    return found


def one(pool: LocalPool) -> Answer:
    (answer,) = answers(pool, 1).values()
    return answer


def begun(pool: LocalPool, environment: Environment) -> Session:
    session = pool.open(environment)
    pool.reset(session)
    assert one(pool).observation == Observation((Message("user", "walk 3"),), done=False)
    return session


def content(answer: Answer) -> str | None:
    return answer.observation and answer.observation.messages[0].content


def test_sessions_answer_to_their_own_actions_only(pool: LocalPool) -> None:
    task = Corridor()
    sessions = [pool.open(task) for _ in range(5)]
    for session in sessions:
        pool.reset(session)
    assert {content(answer) for answer in answers(pool, 5).values()} == {"walk 3"}
    for turn in range(3):
        for number, session in enumerate(sessions):
            pool.step(session, said(f"{turn}-{number}"))
        told = answers(pool, 5)
        for number, session in enumerate(sessions):
            assert content(told[session]) == " ".join(f"{t}-{number}" for t in range(turn + 1))
            assert told[session].calls == 1
    for session in sessions:
        assert pool.close(session) == 0


def test_a_call_is_answered_once(pool: LocalPool) -> None:
    session = begun(pool, Corridor())
    pool.step(session, said("on"))
    assert pool.in_flight == 1
    assert content(one(pool)) == "on"
    assert pool.in_flight == 0
    assert pool.poll(0) == {}
    pool.close(session)


def test_a_closed_session_is_not_answered_and_its_call_is_counted(pool: LocalPool) -> None:
    closed, kept = begun(pool, Corridor()), begun(pool, Corridor())
    pool.step(closed, said("on"))
    pool.step(kept, said("on"))
    assert pool.close(closed) == 1
    assert pool.in_flight == 1
    assert set(answers(pool, 1)) == {kept}
    pool.step(kept, said("left"))
    assert content(one(pool)) == "on left", "and the worker that it was in goes on"
    pool.close(kept)


def test_a_fork_goes_on_by_itself(pool: LocalPool) -> None:
    session = begun(pool, Corridor())
    pool.step(session, said("on"))
    one(pool)
    twin = pool.fork(session)
    pool.step(session, said("left"))
    pool.step(twin, said("right"))
    told = answers(pool, 2)
    assert [content(told[session]), content(told[twin])] == ["on left", "on right"]
    pool.close(session)
    pool.close(twin)


def walked(pool: LocalPool, *words: str) -> Session:
    """A session that has said so."""
    session = begun(pool, Corridor())
    for word in words:
        pool.step(session, said(word))
        one(pool)
    return session


def test_a_fork_of_a_fork_goes_on_by_itself(pool: LocalPool) -> None:
    session = walked(pool, "on")
    twin = pool.fork(session)
    pool.step(twin, said("right"))
    one(pool)
    second = pool.fork(twin)
    pool.close(twin)
    pool.step(second, said("back"))
    assert content(one(pool)) == "on right back"
    pool.close(session)
    pool.close(second)


class Breaking(Corridor):
    """Says "break" as its own class of trouble, once per copy."""

    def step(self, action: Message) -> Observation:
        trouble = {
            "raise": lambda: 1 / 0,
            "exit": lambda: sys.exit(3),
            "nothing": lambda: None,
            "text": lambda: Observation("on", False),  # type: ignore[arg-type]
            "empty": lambda: Observation((), False),
            "a message of nobody": lambda: Observation((Message("nobody", "on"),), False),  # type: ignore[arg-type]
            "no text": lambda: Observation((Message("user", 7),), False),  # type: ignore[arg-type]
            "maybe": lambda: Observation((Message("user", "on"),), "maybe"),  # type: ignore[arg-type]
        }
        return trouble[action.content]() if action.content in trouble else super().step(action)

    def fork(self) -> Breaking:
        twin = Breaking(self.task_id, self.length)
        twin.said = list(self.said)
        return twin


@pytest.mark.parametrize(
    ("action", "why"),
    [
        ("raise", "ZeroDivisionError: division by zero"),
        ("exit", "SystemExit: 3"),
        ("nothing", "answered NoneType instead of an observation"),
        ("text", "answered something that is not a tuple of messages"),
        ("empty", "answered no message, and the episode goes on"),
        ("a message of nobody", "answered something that is not a tuple of messages"),
        ("no text", "answered something that is not a tuple of messages"),
        ("maybe", "answered done that is neither true nor false ('maybe')"),
    ],
)
def test_a_fault_is_named_and_the_session_goes_on_as_if_nothing_had_happened(
    pool: LocalPool, action: str, why: str
) -> None:
    session = begun(pool, Breaking())
    pool.step(session, said("left"))
    one(pool)
    pool.step(session, said(action))
    failed = one(pool)
    assert (failed.observation, failed.fault, failed.calls) == (None, why, 1)
    pool.step(session, said("right"))
    again = one(pool)
    assert content(again) == "left right"
    assert again.calls == 2, "what is replayed is counted"
    pool.close(session)


class Interrupted(Corridor):
    def step(self, action: Message) -> Observation:
        raise KeyboardInterrupt

    def fork(self) -> Interrupted:
        return Interrupted(self.task_id, self.length)


def test_an_interrupt_interrupts_this_process_and_leaves_no_call_of_a_thread_unanswered(threads: LocalPool) -> None:
    pool = LocalPool()
    session = begun(pool, Interrupted())
    with pytest.raises(KeyboardInterrupt):
        pool.step(session, said("on"))
    session = begun(threads, Interrupted())
    threads.step(session, said("on"))
    assert (one(threads).fault, threads.in_flight) == ("KeyboardInterrupt:", 0)
    threads.close(session)


class Gone(Corridor):
    def step(self, action: Message) -> Observation:
        raise EnvironmentGone("the server is gone")

    def fork(self) -> Gone:
        return Gone(self.task_id, self.length)


def test_what_is_gone_for_all_episodes_ends_the_run_and_is_no_fault_of_one(pool: LocalPool) -> None:
    session = begun(pool, Gone())
    with pytest.raises(EnvironmentGone, match="the server is gone"):
        pool.step(session, said("on"))
        pool.poll(60)
    pool.close(session)


class Numbered(Corridor):
    """Gives a number, as a library of arrays would, for its reward, its progress and a metric of its own."""

    numbers: ClassVar[dict[str, Any]] = {
        "numpy": np.float32(0.5),
        "an array": np.array(0.5),
        "nothing": None,
        "nan": np.float32("nan"),
        "more than float32 holds": 1e200,
        "many": np.array([0.5, 0.5]),
        "text": "0.5",
    }

    def step(self, action: Message) -> Observation:
        field, _, name = action.content.partition(" ")
        number = self.numbers[name]
        told = {"metrics": {"steps": number}} if field == "metrics" else {field: number}
        return replace(super().step(action), **told)

    def fork(self) -> Numbered:
        twin = Numbered(self.task_id, self.length)
        twin.said = list(self.said)
        return twin


@pytest.mark.parametrize("field", ["reward", "progress", "metrics"])
def test_numbers_of_array_libraries_become_plain_ones_that_json_can_write(pool: LocalPool, field: str) -> None:
    session = begun(pool, Numbered())
    for library in ("numpy", "an array"):
        pool.step(session, said(f"{field} {library}"))
        observation = one(pool).observation
        found = getattr(observation, field)
        assert json.dumps(found) == ('{"steps": 0.5}' if field == "metrics" else "0.5")
    pool.close(session)
    twin = pool.fork(session)  # of what is closed there is no copy: it is replayed
    pool.step(twin, said("reward nothing"))
    assert (answer := one(pool).observation) is not None and answer.reward is None, "and a replay agrees with them"
    pool.close(twin)


@pytest.mark.parametrize("wrong", ["nan", "many", "text", "more than float32 holds"])
@pytest.mark.parametrize("field", ["reward", "progress", "metrics"])
def test_what_is_no_finite_number_is_a_fault_that_names_it(pool: LocalPool, field: str, wrong: str) -> None:
    session = begun(pool, Numbered())
    pool.step(session, said(f"{field} {wrong}"))
    name = "metric 'steps'" if field == "metrics" else field
    assert (one(pool).fault or "").startswith(f"answered a {name} that is not a finite number (")
    pool.close(session)


class Unforkable(Corridor):
    """Only its start can be copied."""

    def fork(self) -> Unforkable:
        if self.said:
            raise RuntimeError("no copy of a running episode")
        return Unforkable(self.task_id, self.length)


def test_where_the_environment_refuses_to_fork_the_twin_is_replayed(pool: LocalPool) -> None:
    session = begun(pool, Unforkable())
    pool.step(session, said("on"))
    one(pool)
    twin = pool.fork(session)
    pool.step(twin, said("left"))
    told = one(pool)
    assert (content(told), told.calls) == ("on left", 2)
    pool.step(session, said("right"))
    assert content(one(pool)) == "on right"
    pool.close(session)
    pool.close(twin)


class Forgetful(Corridor):
    """Tells something else every time it is reset."""

    resets = 0

    def reset(self) -> tuple[Message, ...]:
        Forgetful.resets += 1
        return (Message("user", f"episode {Forgetful.resets}"),)

    def step(self, action: Message) -> Observation:
        raise RuntimeError

    def fork(self) -> Forgetful:
        return Forgetful()


def test_a_replay_that_is_answered_differently_is_a_fault(pool: LocalPool) -> None:
    session = pool.open(Forgetful())
    pool.reset(session)
    assert one(pool).observation is not None
    for why in ("RuntimeError: ", "a replay was answered differently at turn 0"):
        pool.step(session, said("on"))
        assert (one(pool).fault or "").startswith(why.strip())
    pool.close(session)


# worker processes only


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("killed", "the worker died, exit code -9"),
        ("hanging", "the environment call took longer than 2 seconds"),
        ("garbage", "answered "),
        ("raising", "RuntimeError: the simulator crashed"),
    ],
)
def test_what_a_worker_suffers_hurts_one_call_only(workers: ProcessPool, tmp_path: Path, fault: str, why: str) -> None:
    plan = FaultPlan(seed=11, tally=str(tmp_path), **{fault: 0.1})
    bystanders = [begun(workers, Corridor()) for _ in range(4)]
    session, faults = workers.open(Faulty(Corridor(), plan)), 0

    def ask(turn: int) -> None:
        workers.step(session, said(str(turn))) if turn else workers.reset(session)

    for turn in range(6):
        ask(turn)
        for bystander in bystanders:
            workers.step(bystander, said("on"))
        told = answers(workers, 5)
        assert [told[bystander].fault for bystander in bystanders] == [None] * 4
        while told[session].fault is not None:
            assert (told[session].fault or "").startswith(why)
            faults += 1
            ask(turn)
            told = answers(workers, 1)
    assert content(told[session]) == "1 2 3 4 5"
    assert faults == plan.happened()[fault] > 0
    for each in (session, *bystanders):
        workers.close(each)


def test_workers_killed_while_idle_are_replaced_without_a_fault(workers: ProcessPool) -> None:
    sessions = [begun(workers, Corridor()) for _ in range(4)]
    lost = workers.lost
    for process in multiprocessing.active_children():
        process.kill()
        process.join()
    for session in sessions:
        workers.step(session, said("on"))
    assert {(content(answer), answer.calls) for answer in answers(workers, 4).values()} == {("on", 1)}
    assert workers.lost == lost + 2
    for session in sessions:
        workers.close(session)


def test_an_answer_that_is_collected_late_is_no_timeout_and_the_next_call_has_its_whole_time(
    workers: ProcessPool,
) -> None:
    sessions = [begun(workers, Corridor()) for _ in range(4)]  # two in each worker: the second call waits for the first
    lost = workers.lost
    for session in sessions:
        workers.step(session, said("on"))
    time.sleep(2.2)  # the caller is busy for longer than a step may take
    assert {(content(answer), answer.fault) for answer in answers(workers, 4).values()} == {("on", None)}
    assert workers.lost == lost
    for session in sessions:
        workers.close(session)


class Large(Corridor):
    """Too large for a pipe to take at once: whoever sends it to a stopped worker would wait."""

    def __init__(self, task_id: str = "large", length: int = 3) -> None:
        super().__init__(task_id, length)
        self.ballast = "x" * 2_000_000

    def fork(self) -> Large:
        twin = Large(self.task_id, self.length)
        twin.said = list(self.said)
        return twin


@pytest.mark.parametrize("environment", [Corridor, Large])
def test_a_stopped_worker_holds_a_call_for_seconds_and_the_episode_goes_on(
    monkeypatch: pytest.MonkeyPatch, environment: type[Corridor]
) -> None:
    """A worker that is stopped between two calls, or that a call cannot be brought to."""
    monkeypatch.setattr(processes, "_PIPE_SECONDS", 1)
    monkeypatch.setattr(processes, "_START_SECONDS", 30.0)
    before = set(multiprocessing.active_children())
    with ProcessPool(ProcessPoolConfig(workers=1, step_seconds=1.0)) as pool:
        session = begun(pool, Corridor())
        pool.step(session, said("left"))
        one(pool)
        (worker,) = set(multiprocessing.active_children()) - before
        os.kill(worker.pid or 0, signal.SIGSTOP)
        second = pool.open(environment())
        pool.step(session, said("right"))
        pool.reset(second)
        told: dict[Session, Answer] = {}
        until = time.monotonic() + 100
        while set(told) != {session, second} and time.monotonic() < until:
            for asked, answer in pool.poll(1.0).items():
                if answer.fault is None:
                    told[asked] = answer
                else:
                    assert answer.fault == "the environment call took longer than 1 seconds"
                    pool.step(session, said("right"))
        assert (content(told[session]), content(told[second])) == ("left right", "walk 3")
        assert pool.lost == 1


class Stubborn(Corridor):
    """Hangs in a process of its own, which outlives a worker that is merely killed."""

    def step(self, action: Message) -> Observation:
        child = subprocess.Popen(["sleep", "3600"])
        Path(action.content).write_text(str(child.pid))
        child.wait()
        raise AssertionError("was waited for")


def runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_an_environment_started_dies_with_its_worker(workers: ProcessPool, tmp_path: Path) -> None:
    session = begun(workers, Stubborn())
    workers.step(session, said(str(tmp_path / "pid")))
    assert one(workers).fault == "the environment call took longer than 2 seconds"
    pid = (tmp_path / "pid").read_text()
    until = time.monotonic() + 30
    while runs(pid) and time.monotonic() < until:
        time.sleep(0.01)
    assert not runs(pid)
    workers.close(session)


def test_an_environment_that_cannot_travel_is_refused_in_one_line(workers: ProcessPool) -> None:
    unpicklable: Callable[[], None] = lambda: None  # noqa: E731
    environment = Corridor("t")
    environment.length = unpicklable  # type: ignore[assignment]
    with pytest.raises(InputError, match="the environment of 't' cannot be sent to a worker"):
        workers.open(environment)


class Truthful(Corridor):
    """Compares arrays, as a gymnasium game does: its `done` and `success` are numpy's."""

    def step(self, action: Message) -> Observation:
        told = super().step(action)
        return replace(told, done=np.bool_(told.done), success=np.bool_(False))  # type: ignore[arg-type]

    def fork(self) -> Truthful:
        twin = Truthful(self.task_id, self.length)
        twin.said = list(self.said)
        return twin


def test_booleans_of_array_libraries_become_plain_ones(pool: LocalPool) -> None:
    session = begun(pool, Truthful())
    pool.step(session, said("left"))
    assert (told := one(pool).observation) is not None
    assert (told.done, told.success) == (False, False)
    assert json.dumps([told.done, told.success]) == "[false, false]"
    pool.close(session)
