"""Which tasks an iteration plays: seeded epochs, without those that a filter skips."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from turntree.core import seeds
from turntree.core.errors import ConfigError
from turntree.core.foreign import call_part
from turntree.core.protocols import Environment, Filter


def first_reason(filters: Sequence[Filter], ask: Callable[[Filter], Any]) -> tuple[Filter, str] | None:
    """The first filter that has a reason, and the reason. Raises `ConfigError` for one that is no text."""
    for part in filters:
        why = call_part("filter", ask, part)
        if why is not None and not isinstance(why, str):
            raise ConfigError(f"gave {type(why).__name__}", field="filter", hint="return a reason as text, or None")
        if why:
            return part, why
    return None


class TaskStream:
    """Every task once per epoch, in a new order each epoch; the position is the whole state.

    A task that one of `filters` skips is drawn again in the next epoch. After a whole epoch of skips the next task is
    taken anyway, so that an iteration always has tasks.
    """

    def __init__(self, tasks: Sequence[Environment], seed: int, filters: Sequence[Filter] = ()) -> None:
        self._tasks, self._seed, self._filters = tasks, seed, filters
        self._position = 0
        self._epoch: tuple[int, list[int]] = (-1, [])

    def draw(self, count: int, iteration: int) -> tuple[list[Environment], list[tuple[str, str]]]:
        """The next `count` tasks, and (task id, reason) for every skipped task before them."""
        drawn: list[Environment] = []
        skipped: list[tuple[str, str]] = []
        in_a_row = 0
        while len(drawn) < count:
            task = self._next()
            reason = first_reason(self._filters, lambda part, task=task: part.skip(task.task_id, iteration))
            if reason is not None and in_a_row < len(self._tasks):
                skipped.append((task.task_id, reason[1]))
                in_a_row += 1
                continue
            in_a_row = 0
            drawn.append(task)
        return drawn, skipped

    def _next(self) -> Environment:
        epoch, place = divmod(self._position, len(self._tasks))
        if self._epoch[0] != epoch:
            order = list(range(len(self._tasks)))
            seeds.generator(self._seed, "task epoch", epoch).shuffle(order)
            self._epoch = (epoch, order)
        self._position += 1
        return self._tasks[self._epoch[1][place]]

    def state(self) -> dict[str, Any]:
        return {"position": self._position}

    def restore(self, state: dict[str, Any]) -> None:
        self._position = state["position"]
