"""The tasks that a stage plays, from whatever environment its configuration names.

An environment (a part of kind `environments`, see `core.parts`) is one of two things:

- a function `tasks(split, count, *, seed, **options)` that returns `count` environments of a split ("train", "dev",
  "test"). Its keyword parameters are the environment's options (`--set environment.KEY=VALUE`).
- a class with a method `open(splits, *, seed)` that is a context manager over a `TaskSet`, for tasks that share
  something that must be closed (an index, a sandbox, a pool of workers). Its constructor takes the options.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from turntree.core import parts, scalars
from turntree.core.config import Part, to_value
from turntree.core.errors import ConfigError, InputError
from turntree.core.foreign import EnvironmentFault
from turntree.core.messages import Message
from turntree.core.protocols import Environment, Observation, task_of
from turntree.env.local import LocalPool
from turntree.env.processes import ProcessPool, ProcessPoolConfig
from turntree.env.recorded import Recorded
from turntree.run.files import tree_hash
from turntree.run.identity import digest

T = TypeVar("T")

TRAIN, DEV = "train", "dev"


@dataclass(frozen=True, kw_only=True)
class TaskSet:
    """Environments by split, with: where they are stepped (None: in this process), what their tools did so far (part of
    the run's timing), the counts of reading their files, one entry per file (`rows`, which are those `kept` and those
    `dropped` by reason; perhaps where a reason was met `first`), and the hashes of those files by name."""

    tasks: Mapping[str, Sequence[Environment]]
    pool: LocalPool | None = None
    figures: Callable[[], dict[str, Any]] = dict
    read: Sequence[dict[str, Any]] = ()
    contents: Mapping[str, str] = field(default_factory=dict[str, str])

    def of(self, split: str) -> Sequence[Environment]:
        return self.tasks[split]


@contextlib.contextmanager
def open_tasks(
    environment: Part,
    splits: Mapping[str, int],
    *,
    seed: int = 0,
    model: str = "",
    workers: ProcessPoolConfig | None = None,
) -> Iterator[TaskSet]:
    """`splits[name]` tasks of every split, drawn by `seed` where there are more. `model` names the policy that will
    play, for environments whose prompts depend on it. With `workers` they are stepped in processes, unless the
    environment has its own pool. Raises `InputError` where the environment gives no tasks, gives what is not an
    environment, gives two tasks one id, puts one task into two splits, or where an id, tools or a failure_reward are
    none."""
    loaded = parts.load("environments", environment.name)
    with contextlib.ExitStack() as stack:
        if inspect.isclass(loaded.target) and hasattr(loaded.target, "open"):
            source = loaded.build(environment.options, {"model": model})
            opened = cast(TaskSet, stack.enter_context(source.open(splits, seed=seed)))
        else:
            made = {
                split: loaded.build(environment.options, {"split": split, "count": count, "seed": seed, "model": model})
                for split, count in splits.items()
            }
            opened = TaskSet(tasks={split: _environments(found, environment, split) for split, found in made.items()})
        _check(opened, environment)
        if workers is not None and workers.workers > 0:
            if opened.pool is not None:
                hint = "leave it at 0"
                raise ConfigError("is for environments without a pool of their own", field="workers.workers", hint=hint)
            opened = replace(opened, pool=stack.enter_context(ProcessPool(workers)))
        yield opened


def must_be_held_out(splits: Mapping[str, int], source: str, held_out: str | None) -> None:
    """Raises `InputError` where tasks of a single file would be played as held out by a command that trains on none of
    it: another command trains on some, and only that command knows how many."""
    if held_out is None and TRAIN not in splits:
        hint = "name a file that nothing was trained on as held_out (--held-out), or play those of --split train"
        raise InputError("may hold what was trained on", path=source, field="environment.held_out", hint=hint)
    if held_out is not None and TRAIN in splits and Path(held_out).resolve() == Path(source).resolve():
        hint = "name another file, or none: tasks that --count does not take are then held out"
        raise InputError("is also the file that is trained on", path=held_out, field="environment.held_out", hint=hint)


def shared_out(found: Sequence[T], splits: Mapping[str, int], path: str) -> dict[str, Sequence[T]]:
    """The first of these tasks for the split that is trained on, the next ones for the others."""
    made: dict[str, Sequence[T]] = {}
    start = 0
    for split in sorted(splits, key=lambda name: name != TRAIN):
        made[split] = found[start : start + splits[split]]
        start += splits[split]
        if not made[split]:
            problem = f"holds {len(found)} tasks, and none is left for split {split!r}"
            raise InputError(problem, path=path, hint=f"lower --count (now {splits[split]})")
    return made


def identity(environment: Part, opened: TaskSet) -> dict[str, Any]:
    """The identity of the tasks, for the identity of a run: the code that made them and their ids, by split."""
    ids = {
        split: digest("\n".join(task.task_id for task in tasks).encode(), 8) for split, tasks in opened.tasks.items()
    }
    return {"environment": parts.identity("environments", environment), "tasks": ids, **opened.contents}


def contents(sources: Mapping[str, str | None]) -> dict[str, str]:
    """The hashes of the files and folders among `sources`, by their names, for `TaskSet.contents`."""
    paths = {name: Path(os.path.expanduser(os.path.expandvars(source))) for name, source in sources.items() if source}
    return {f"{name}_hash": tree_hash(path) for name, path in paths.items()}


def _environments(found: Any, environment: Part, split: str) -> list[Environment]:
    if not isinstance(found, Sequence) or not found:
        said = f"gave {type(found).__name__}" if not isinstance(found, Sequence) else "gave no task"
        hint = "return a list of environments with task_id, reset and step"
        raise InputError(f"{environment.name!r} {said} for split {split!r}", field="environment", hint=hint)
    return [_with_fork(item, environment) for item in cast("Sequence[Any]", found)]


def _check(opened: TaskSet, environment: Part) -> None:
    """An id names one task of one split, and what is said of a task is of its kind."""
    home: dict[str, str] = {}
    for split, tasks in opened.tasks.items():
        for task in tasks:
            if (wrong := _wrong(task)) is not None:
                problem, hint = wrong
            elif (other := home.get(task.task_id)) == split:
                problem, hint = f"gave two tasks of split {split!r} the id {task.task_id!r}", "an id names one task"
            elif other is not None:
                problem = f"gave task {task.task_id!r} to two splits, {other!r} and {split!r}"
                hint = "held-out tasks must not be trained on: give every split its own tasks"
            else:
                home[task.task_id] = split
                continue
            raise InputError(f"{environment.name!r} {problem}", field="environment", hint=hint)


def _wrong(task: Environment) -> tuple[str, str] | None:
    """What a task says of itself that is not of its kind, and what to write instead."""
    if not isinstance(task.task_id, str):
        return f"gave a task with the id {task.task_id!r}", "an id is a text"
    tools: Any = task.tools
    if not isinstance(tools, list | tuple) or not all(isinstance(t, dict) and "function" in t for t in tools):
        hint = 'give a tuple of {"type": "function", "function": {"name": ..., ...}}, () without tools'
        return f"gave task {task.task_id!r} tools that are none ({tools!r})", hint
    try:
        scalars.number(task_of(task).failure_reward)
    except ValueError as error:
        return f"gave task {task.task_id!r} a failure_reward that is {error}", "give it a number"
    return None


def _with_fork(value: Any, environment: Part) -> Environment:
    needed = ("task_id", "reset", "step", *(("tools",) if hasattr(value, "fork") else ()))
    missing = [name for name in needed if not hasattr(value, name)]
    if missing:
        problem = f"{environment.name!r} gave {type(value).__name__}, which has no {', '.join(missing)}"
        raise InputError(problem, field="environment", hint="see turntree.Environment for what an environment is")
    return value if hasattr(value, "fork") else Replayed(value)


class Replayed(Recorded):
    """Adds `fork` to an environment without one: a fork is a fresh copy (`copy.deepcopy` before `reset`) that repeats
    the actions, and is refused where it answers differently."""

    def __init__(self, start: Any) -> None:
        super().__init__()
        self._start, self.task_id, task = start, start.task_id, task_of(start)
        self.task_type, self.failure_reward, self.total_reward = task.task_type, task.failure_reward, task.total_reward
        self.gold = tuple(task.gold)

    @property
    def own(self) -> Any:
        """The environment itself, as it stands; before `reset` as it was made."""
        return self._start if self._held is None else self._held

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        found: Any = getattr(self.own, "tools", ())
        return tuple(found) if isinstance(found, list) else found

    def _begin(self) -> tuple[Message, ...]:
        self._hold(copy.deepcopy(self._start))
        told = self._held.reset()
        if not isinstance(told, Sequence):
            said = f"`reset` returned {type(told).__name__} instead of a tuple of messages"
            comma = 'write (tt.Message("user", "..."),), with the comma'
            raise EnvironmentFault(f"{said}: {'it is asynchronous' if inspect.isawaitable(told) else comma}")
        return tuple(cast("Sequence[Message]", told))

    def _do(self, action: Message) -> Observation:
        return self._held.step(action)

    def state(self) -> Any:
        """The environment's own `state()`, where it has one."""
        return None if self._held is None else task_of(self._held).state()


PLACE: Mapping[str, type] = {"split": str, "count": int, "seed": int, "model": str, "task_id": str}
"""What `environment_record` says of the place of a task, beside its environment and that one's options."""


def options_of_record(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """The options under which an environment has tasks like the one that a trace records (`Trace.environment`), so that
    others of them can be played (`environment_record`); None where that is not known. A trace cannot name code: only
    environments that are installed are looked up."""
    name = record.get("name")
    if not isinstance(name, str) or name not in parts.names("environments") or "task_id" not in record:
        return None
    known = parts.load("environments", name).options()
    return {key: value for key, value in record.items() if key in known and key not in PLACE}


def same_tasks(told: Mapping[str, Mapping[str, Sequence[Message]]]) -> list[str]:
    """The tasks of two splits that tell the same at their start, whatever their ids are (`told` by split and id):
    held-out figures would be those of training. What several tasks of one split tell does not tell tasks apart, and is
    no sign."""
    homes: dict[str, list[tuple[str, str]]] = {}
    for split, tasks in told.items():
        for task_id, messages in tasks.items():
            homes.setdefault(repr([message.to_chat() for message in messages]), []).append((split, task_id))
    found = [each for each in homes.values() if len({split for split, _ in each}) == len(each) > 1]
    return [" and ".join(f"{task_id!r} of {split!r}" for split, task_id in each) for each in found]


def environment_record(
    environment: Part, split: str, count: int, seed: int, task_id: str, model: str = ""
) -> dict[str, Any]:
    """A trace's record of its environment (`Trace.environment`), from which its task can be rebuilt: the arguments of
    `open_tasks` and the index of the task."""
    place = {"split": split, "count": count, "seed": seed, "model": model, "task_id": task_id}
    return {"name": environment.name, **to_value(environment.options), **place}
