"""States of traces, rebuilt in their environment: the task that a trace names, with its actions played again."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from turntree.core.config import Part
from turntree.core.errors import InputError
from turntree.core.foreign import call_foreign
from turntree.core.messages import Message
from turntree.core.protocols import Environment, Observation, TurnState
from turntree.env.pool import checked, start
from turntree.env.tasks import PLACE, open_tasks

Said = Sequence[tuple[str, str]]  # role and text of messages
Reading = Callable[[Sequence[Message]], Said]
Walked = tuple[Environment, Observation]


def said(messages: Sequence[Message]) -> Said:
    """Roles and texts. Ids of calls are left out, because they are drawn at random."""
    return [(message.role, message.content) for message in messages]


def walk(task: Environment, messages: Sequence[Message], of: str, reading: Reading = said) -> Iterator[Walked]:
    """Play the assistant turns of `messages` again on a copy of `task`: before every one, and after the last, the copy
    and its latest answer. Raises `EnvironmentFault` where the environment fails, and `InputError` where it answers
    differently from `messages` (`of` names them)."""
    environment = call_foreign(task.fork)
    spoken = [place for place, message in enumerate(messages) if message.role == "assistant"]
    last = call_foreign(lambda: start(environment))
    for place, end in zip([-1, *spoken], [*spoken, len(messages)], strict=True):
        if place >= 0:
            action = messages[place]
            last = call_foreign(lambda action=action: checked(environment.step(action)))
        told = messages[place + 1 : end]
        if reading(told) != reading(last.messages):
            raise _misfit(of, place, reading(told), reading(last.messages))
        yield environment, last


class Rebuilder:
    """Rebuilds states of traces in `environment`, whose options replace those of the traces. Its code runs because the
    user names it, never because a trace does.

    A trace says how its task is opened (`env.tasks.environment_record`). `concurrency` states are rebuilt at the same
    time (0: one by one), as many as environments are stepped at once; that is known once a task is open.
    """

    def __init__(self, environment: Part, reading: Reading = said) -> None:
        self._part, self._reading = environment, reading
        self._open = contextlib.ExitStack()
        self._tasks: dict[str, Mapping[str, Environment]] = {}
        self._lock = threading.Lock()
        self.concurrency = 0

    def close(self) -> None:
        """Close the environments' tasks."""
        self._open.close()

    def at(self, turn: TurnState) -> Walked:
        """The environment just before a turn, and its answer there. Raises `EnvironmentFault` where the environment
        fails, and `InputError` where the trace does not say how to build its environment, or does not fit it."""
        with self._lock:
            task = self._task(turn)
        *_, last = walk(task, turn.history, f"trace {turn.trace_id!r}", self._reading)
        return last

    def _task(self, turn: TurnState) -> Environment:
        """The task of a trace. Tasks are opened once, with the arguments that the trace records."""
        source, of = turn.environment or {}, f"of trace {turn.trace_id!r}"
        if source.get("name") != self._part.name:
            problem = f"{of} is {source.get('name')!r}, not {self._part.name!r}"
            hint = "name the environment of the traces with --environment (`turntree traces record` writes it down)"
            raise InputError(problem, field="environment", hint=hint)
        for key, kind in PLACE.items():
            if type(source.get(key)) is not kind:
                hint = "record the traces with `turntree traces record`, or use another verifier"
                raise InputError(f"{of} does not say which task it is", field=f"environment.{key}", hint=hint)
        task_id, split = source["task_id"], source["split"]
        key = json.dumps({name: value for name, value in source.items() if name != "task_id"}, sort_keys=True)
        if key not in self._tasks:
            given = {name: value for name, value in source.items() if name not in ("name", *PLACE)}
            part = Part(self._part.name, {**given, **self._part.options})
            tasks = open_tasks(part, {split: source["count"]}, seed=source["seed"], model=source["model"])
            opened = self._open.enter_context(tasks)
            self.concurrency = max(self.concurrency, opened.pool.concurrency if opened.pool else 0)
            self._tasks[key] = {task.task_id: task for task in opened.of(split)}
        if task_id not in self._tasks[key]:
            hint = "name the environment, with the options, that was played"
            raise InputError(f"{of} is task {task_id!r}, which {self._part.name!r} does not have", hint=hint)
        return self._tasks[key][task_id]


def _misfit(of: str, place: int, told: Said, again: Said) -> InputError:
    what = "its task" if place < 0 else f"the answer to its message {place}"
    both = f"{what} is {_short(told)}, and played again {_short(again)}"
    hint = "name the environment that was played; one that draws at random without a seed cannot be played again"
    return InputError(f"{of} does not fit its environment: {both}", field="environment", hint=hint)


def _short(told: Said) -> str:
    text = " | ".join(content for _, content in told)
    return repr(text if len(text) <= 80 else text[:77] + "...")
