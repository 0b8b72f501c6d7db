"""Shared by the adapters: episodes that can be forked, disjoint splits, reward functions with TRL's signature."""

from __future__ import annotations

import contextlib
import copy
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

import numpy as np

from turntree.core import parts, seeds
from turntree.core.errors import InputError
from turntree.core.foreign import EnvironmentFault, reason_of
from turntree.core.messages import Message
from turntree.core.protocols import Environment, Observation, Task, task_of
from turntree.core.scalars import given_number
from turntree.env.loop import awaited
from turntree.env.recorded import Recorded
from turntree.run.jsonl import parse_object, read_lines
from turntree.traces.splits import assign_split

FRACTIONS = {"train": 0.8, "dev": 0.1, "test": 0.1}
HELD_OUT = {"train": 0.0, "dev": 0.5, "test": 0.5}  # of a file that is held out as a whole


class Game(Protocol):
    """One episode in a foreign package. It is copied by `copy.deepcopy` where the package allows that. Its `close()`,
    where it has one, ends what the package holds; it may be called in any thread."""

    def begin(self) -> tuple[Message, ...]: ...

    def act(self, action: Message) -> Observation: ...


class AdaptedEnvironment(Recorded):
    """One episode of one task (protocol `Environment`) on a `Game` that `make` begins anew.

    Packages draw from the global generators of `random` and numpy. Every episode has its own state of these, seeded
    with `seed`, so that its answers depend on its own actions only, and the draws of the trainer do not change.

    A fork is a copy of the game where the package allows it, else a replay on a new game, which is refused with an
    `EnvironmentFault` where that answers differently. `can_copy=False` goes straight to the replay.
    """

    total_reward = True  # games sum up what their package gives for each step

    def __init__(
        self,
        make: Callable[[], Game],
        *,
        task_id: str,
        seed: int = 0,
        tools: Sequence[dict[str, Any]] = (),
        task_type: str | None = None,
        can_copy: bool = True,
        gold: Sequence[Message] = (),
    ) -> None:
        super().__init__()
        self.task_id, self.task_type, self.tools, self.gold = task_id, task_type, tuple(tools), tuple(gold)
        self._make, self._seed, self._can_copy = make, seed, can_copy
        self._random = _seeded(seed)

    def _begin(self) -> tuple[Message, ...]:
        self._random = _seeded(self._seed)
        with self._own_random():
            self._hold(self._make())
            return self._held.begin()

    def _do(self, action: Message) -> Observation:
        with self._own_random():
            return self._held.act(action)

    def _copied(self) -> Game | None:
        if self._can_copy:
            try:
                return copy.deepcopy(self._held)
            except BaseException as error:  # a lock, a connection, a generator: whatever the package keeps
                reason_of(error)
                self._can_copy = False
        return None

    @contextlib.contextmanager
    def _own_random(self) -> Iterator[None]:
        before = random.getstate(), np.random.get_state()
        _set_random(self._random)
        try:
            yield
        finally:
            self._random = random.getstate(), np.random.get_state()
            _set_random(before)


def _seeded(seed: int) -> tuple[Any, Any]:
    return random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state()


def _set_random(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])


class Scored(Task):
    """An environment whose reward is given by a function of the episode so far, as TRL calls them.

    The function gets lists of one entry: `prompts`, `completions` (chat messages), `environments` and the columns of
    the row; it returns a list with one number. It is called after every turn, because an episode may end at any turn
    by a limit. An exception in it censors the rollout. Success is a reward of 1 or more.
    """

    total_reward = True  # the function sees the whole episode so far

    def __init__(self, inner: Any, reward: Callable[..., Any], row: Mapping[str, Any]) -> None:
        self._inner, self._reward, self._row = inner, reward, dict(row)
        self.task_id, self.task_type, self.gold = inner.task_id, task_of(inner).task_type, tuple(task_of(inner).gold)
        self._prompt: tuple[Message, ...] = ()
        self._said: tuple[Message, ...] = ()

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        return self._inner.tools

    def state(self) -> Any:
        """That of the environment, for the verifier `executed`."""
        return task_of(self._inner).state()

    def state_problem(self) -> str | None:
        return task_of(self._inner).state_problem()

    def reset(self) -> tuple[Message, ...]:
        self._prompt, self._said = self._inner.reset(), ()
        return self._prompt

    def step(self, action: Message) -> Observation:
        observation: Observation = self._inner.step(action)
        told = [message for message in observation.messages if message.role == "tool" or not observation.done]
        self._said = (*self._said, action, *told)
        columns = {key: [value] for key, value in self._row.items() if key != "prompt"}
        given = awaited(
            self._reward(
                prompts=[[message.to_chat() for message in self._prompt]],
                completions=[[message.to_chat() for message in self._said]],
                environments=[getattr(self._inner, "object", self._inner)],
                **columns,
            )
        )
        if not isinstance(given, list | tuple) or len(cast("Sequence[Any]", given)) != 1:
            told = f"{given!r}"[:80]
            raise EnvironmentFault(f"the reward function returned {told} instead of a list with one number")
        reward = given_number("reward (of the function)", given[0])
        success = reward >= 1 if observation.done else None
        return replace(observation, success=success, reward=reward)

    def fork(self) -> Scored:
        twin = Scored(self._inner.fork(), self._reward, self._row)
        twin._prompt, twin._said = self._prompt, self._said
        return twin


def scored(inner: Environment, reward: str | None, row: Mapping[str, Any]) -> Environment:
    """`inner`, with the reward of the function `module:function` where one is named."""
    return inner if reward is None else Scored(inner, parts.load("rewards", reward).target, row)


def rows_of(tasks: str, held_out: str | None, split: str, count: int, seed: int) -> list[tuple[str, dict[str, Any]]]:
    """`count` rows of a split of JSONL files, drawn by `seed`, by id. With `held_out` that file is "dev" and "test"
    and the whole of `tasks` is "train"; else `tasks` is all three. Rows are assigned by a hash of their content."""
    rows = _read(tasks)
    if held_out is None:
        return of_split(rows, split, count, seed=seed, where=tasks)
    return held_apart(rows, _read(held_out), split, count, seed=seed, where=tasks, where_held=held_out)


def _read(path: str) -> list[dict[str, Any]]:
    return [parse_object(line, path, number) for number, line in read_lines(path)]


def held_apart(
    rows: Iterable[Any], kept: Sequence[Any], split: str, count: int, *, seed: int, where: str, where_held: str
) -> list[tuple[str, Any]]:
    """For "train" the `rows` that are not also in `kept`; for "dev" and "test" one half of `kept` each."""
    if split != "train":
        return of_split(kept, split, count, seed=seed, where=where_held, fractions=HELD_OUT)
    held = {key_of(row) for row in kept}
    only = (row for row in rows if key_of(row) not in held)
    return of_split(only, "train", count, seed=seed, where=where, fractions={"train": 1.0})


def of_split(
    rows: Iterable[Any],
    split: str,
    count: int,
    *,
    seed: int | None,
    where: str,
    fractions: Mapping[Any, float] = FRACTIONS,
    key: Callable[[Any], str] | None = None,
    closed: bool = False,
) -> list[tuple[str, Any]]:
    """`count` distinct rows of a split, by id, drawn by `seed` (None: the first ones, of rows that are random already).
    A row is in one split, whatever other rows there are: it is assigned by a hash of its content alone, so splits never
    meet. `closed` says that there will be no other rows (the tasks of a benchmark): then no split of three or more rows
    is left empty. Raises `InputError` where the split is empty."""
    name = key or key_of
    rows = rows if seed is None else seeds.shuffled(seed, rows, name)
    moved = _moved([name(row) for row in rows], fractions) if closed else {}
    found: dict[str, Any] = {}
    for row in rows:
        if len(found) == count:
            break
        one = name(row)
        if (moved.get(one) or assign_split(one, 0, fractions)) == split:
            found.setdefault(one, row)
    if not found:
        hint = "rows are assigned by their hash: give more rows, or a separate file with held_out"
        raise InputError(f"{where} has no row for split {split!r}", field="environment", hint=hint)
    return list(found.items())


def _moved(keys: Sequence[str], fractions: Mapping[Any, float]) -> dict[str, str]:
    """The rows that change their split so that none is empty: each empty one takes a row of the largest."""
    homes: dict[str, list[str]] = {split: [] for split, share in fractions.items() if share > 0}
    for one in dict.fromkeys(keys):
        homes[assign_split(one, 0, fractions)].append(one)
    moved: dict[str, str] = {}
    for split in [split for split, held in homes.items() if not held]:
        largest = max(homes.values(), key=len)
        if len(largest) > 1:
            given = min(largest, key=lambda one: seeds.derive(0, "moved", one))
            largest.remove(given)
            homes[split].append(given)
            moved[given] = split
    return moved


def key_of(row: Any) -> str:
    """An id by content."""
    return f"{seeds.derive(0, json.dumps(row, sort_keys=True, default=str, ensure_ascii=False)):016x}"


def prompt_of(value: Any, where: str) -> tuple[Message, ...]:
    """A `prompt` column: chat messages, or the text of one."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (Message("user", value),)
    if not isinstance(value, list):
        raise InputError("is neither a text nor a list of messages", path=where, field="prompt")
    return tuple(Message.from_chat(chat) for chat in cast("list[Any]", value))


def named(argument: str | None, what: str) -> str:
    """The text after the name of the adapter. Raises `InputError` where there is none."""
    if not argument:
        raise InputError("names no environment", field="environment", hint=f"write {what}")
    return argument
