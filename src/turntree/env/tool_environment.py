"""An environment made of a plain class: its public methods are the tools, its `reset` returns the task.

    class Counter:
        def reset(self, goal: int) -> str:
            self.count, self.goal = 0, goal
            return f"Count to {goal}."

        def add(self, number: int) -> str:
            \"\"\"Add to the counter.

            Args:
                number: What to add.
            \"\"\"
            self.count += number
            return f"The counter says {self.count}."

        @property
        def reward(self) -> float:
            return float(self.count == self.goal)

A class for TRL's `environment_factory` works unchanged: tools may be `async`, and a method `get_reward` gives the
reward. These attributes are read after every turn, where the object has them: `reward` (a number; without
`get_reward`), `success`, `done` (True ends the episode) and `progress` (0 to 1); a method of such a name is a tool.
`get_reward` is called after every turn, too, because an episode may end at any turn by a limit. An episode also ends
with the first message that calls no tool.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import json
import random
import types
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

from turntree.core.errors import InputError
from turntree.core.foreign import EnvironmentFault, EnvironmentGone, call_part, is_of_the_machine, reason_of
from turntree.core.messages import Message, ToolCall, joined_text
from turntree.core.protocols import Observation
from turntree.core.scalars import given_number, given_truth
from turntree.core.verdict import succeeded
from turntree.env.loop import awaited
from turntree.env.recorded import Recorded

T = TypeVar("T")

NOT_TOOLS = frozenset({"reset", "fork", "close", "get_reward"})  # they are called by us


class ToolEnvironment(Recorded):
    """One episode of one task (protocol `Environment`) on an object that `factory` makes.

    `arguments` are those of its `reset`. What `reset` returns is the task, as the user's message; with a `prompt` (the
    opening messages) it is appended to the last message of that, as TRL does. What a tool returns is its answer: a
    text, or a value that JSON can carry. An exception in a tool is shown to the policy as the answer, but one
    of the machine (`core.foreign.is_of_the_machine`: a lost connection, a time limit, a full disk, an exit) censors
    the rollout, as an `EnvironmentFault` does. `gold` are the messages of an expert that solve the task, where they are
    known (`turntree traces gold`).

    A fork is the object's own `fork()` where its class has one. Otherwise the episode is replayed on a new object, and
    refused where that answers differently: an environment that draws at random without a seed cannot be forked.
    `Recorded` says when the object's `close()` is called, where it has one.
    """

    total_reward = True  # what the object is worth now

    def __init__(
        self,
        factory: Callable[[], Any],
        *,
        task_id: str,
        arguments: Mapping[str, Any] | None = None,
        prompt: Sequence[Message] = (),
        task_type: str | None = None,
        gold: Sequence[Message] = (),
    ) -> None:
        super().__init__()
        self.task_id, self.task_type, self.gold = task_id, task_type, tuple(gold)
        self._factory, self._arguments, self._prompt = factory, dict(arguments or {}), tuple(prompt)

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        return tool_schemas(self._factory)

    @property
    def object(self) -> Any:
        """The object that `factory` made for this episode, for reward functions; None before `reset`."""
        return self._held

    def state(self) -> Any:
        """The state of the object as plain data, equal for objects with the same state: all attributes, or what its
        `__getstate__` gives. None before `reset`, and where `state_problem` says why there is none."""
        try:
            return None if self._held is None else _plain(self._held.__getstate__(), "")
        except (_NotPlain, RecursionError):
            return None

    def state_problem(self) -> str | None:
        """Which attribute of the object is not plain data, so that states cannot be compared; None where all are."""
        try:
            _plain(self._held.__getstate__(), "")
        except _NotPlain as found:
            return str(found)
        except RecursionError:
            return "its attributes contain each other in a cycle"
        return None

    def _copied(self) -> Any:
        own = getattr(self._held, "fork", None)
        return own() if callable(own) else None

    def _begin(self) -> tuple[Message, ...]:
        self._hold(self._factory())
        told = awaited(self._held.reset(**self._arguments))
        return _opening(self._prompt, None if told is None else _text(told))

    def _do(self, action: Message) -> Observation:
        answers = tuple(
            Message("tool", self._answer(call), tool_call_id=call.id, name=call.name) for call in action.tool_calls
        )
        state = self._held
        done, reward = not answers or _read(state, "done", given_truth) is True, _reward(state)
        return Observation(
            answers or (Message("user", "done"),),
            done=done,
            success=succeeded(_read(state, "success", given_truth), reward) if done else None,
            progress=_read(state, "progress", given_number),
            reward=reward,
        )

    def _answer(self, call: ToolCall) -> str:
        if call.name not in tool_names(type(self._held)):
            known = ", ".join(tool_names(type(self._held)))
            return f"error: there is no tool {call.name!r}; the tools are {known}"
        method = getattr(self._held, call.name)
        try:
            inspect.signature(method).bind(**call.arguments)
        except TypeError as error:
            return f"error: wrong arguments: {error}"
        try:
            return _text(awaited(method(**call.arguments)))
        except (EnvironmentFault, EnvironmentGone):
            raise
        except BaseException as error:
            reason = reason_of(error)
            if is_of_the_machine(error):
                raise EnvironmentFault(f"tool {call.name!r} failed: {reason}") from error
            return f"error: {error}" if str(error) else reason  # the class speaks to the policy through its exceptions


def tool_names(owner: type) -> list[str]:
    """The public methods of a class that are its tools, in the order of their definition."""
    found = dict.fromkeys(name for base in reversed(owner.__mro__[:-1]) for name in vars(base))
    return [
        name
        for name in found
        if not name.startswith("_") and name not in NOT_TOOLS and inspect.isfunction(getattr(owner, name, None))
    ]


@functools.lru_cache(maxsize=64)
def tool_schemas(factory: Callable[[], Any]) -> tuple[dict[str, Any], ...]:
    """The tools of what `factory` makes, in the shape that chat templates take. Raises `InputError` for a method whose
    arguments have no type hint or no description."""
    from transformers.utils.chat_template_utils import get_json_schema

    kind: type = factory if inspect.isclass(factory) else type(call_part("environment", factory))
    names = tool_names(kind)
    if not names:
        raise InputError(
            "has no public method, so no tool", field=kind.__name__, hint="give it methods with docstrings"
        )
    schemas: list[dict[str, Any]] = []
    for name in names:
        method = getattr(kind, name)
        try:
            if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
                raise TypeError("it is a generator, which is no answer: return a text")
            schemas.append(get_json_schema(types.MethodType(method, kind)))  # without `self`
        except Exception as error:
            problem = " ".join(str(error).split())
            hint = "give every argument a type hint and a line under Args: in the docstring"
            raise InputError(problem, field=f"{kind.__name__}.{name}", hint=hint) from error
    return tuple(schemas)


def _opening(prompt: tuple[Message, ...], told: str | None) -> tuple[Message, ...]:
    if told is None and not prompt:
        raise EnvironmentFault("has no task: `reset` returned nothing, and there is no prompt")
    if told is None:
        return prompt
    if not prompt:
        return (Message("user", told),)
    *before, last = prompt
    return (*before, Message(last.role, f"{last.content}{told}"))


def _text(value: Any) -> str:
    value = joined_text(value, Counter())  # of a list of text parts
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_jsonable)


def _jsonable(value: Any) -> Any:
    """Scalars and arrays of numpy and torch as numbers, anything else as text."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else str(value)


class _NotPlain(Exception):
    """A value that cannot be compared. The text says where it is."""


def _plain(value: Any, place: str) -> Any:
    """A copy of plain data (numbers, texts, collections, dataclasses, generators of random numbers), equal for equal
    values. Raises `_NotPlain` for anything else."""
    if value is None or isinstance(value, bool | int | float | str | bytes | enum.Enum):
        return value
    if isinstance(value, dict):
        items: dict[Any, Any] = value
        return {_plain(key, place): _plain(item, f"{place}.{key}".lstrip(".")) for key, item in items.items()}
    if isinstance(value, list | tuple | deque):
        members: Iterable[Any] = value
        return (type(value).__name__, *(_plain(item, f"{place}[{n}]") for n, item in enumerate(members)))
    if isinstance(value, set | frozenset):
        return frozenset(_plain(item, place) for item in cast("Iterable[Any]", value))
    if isinstance(value, random.Random):
        return value.getstate()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
        return (type(value).__qualname__, *((name, _plain(item, f"{place}.{name}")) for name, item in held))
    raise _NotPlain(f"attribute {place!r} is {type(value).__name__}")


def _read(state: Any, name: str, reader: Callable[[str, Any], T]) -> T | None:
    """None where the object has no such attribute. An `AttributeError` inside a property of its class is an error."""
    value = getattr(state, name) if hasattr(type(state), name) else getattr(state, name, None)
    return None if value is None or callable(value) else reader(name, value)


def _reward(state: Any) -> float | None:
    """What `get_reward` gives, or the attribute `reward`. Raises `EnvironmentFault` where the method gives none, which
    is no failure of the policy."""
    method = getattr(state, "get_reward", None)
    if not callable(method):
        return _read(state, "reward", given_number)
    return given_number("reward (get_reward)", awaited(method()))
