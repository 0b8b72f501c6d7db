"""Demonstrations of experts, played in an environment; `turntree traces gold`: those that its tasks hold."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from turntree.core import parts
from turntree.core.config import Between, Bounded, Part, Positive
from turntree.core.errors import InputError
from turntree.core.foreign import reason_of
from turntree.core.messages import Message
from turntree.core.protocols import Environment, Observation, task_of
from turntree.env.pool import checked, start
from turntree.env.tasks import environment_record, open_tasks
from turntree.traces.schema import Split, Trace
from turntree.traces.splits import demonstrated_split


@dataclass(frozen=True, kw_only=True)
class Demonstrations(Bounded):
    """Base of demonstrators whose experts play the tasks of an environment."""

    split: Split = "train"
    """Which of its tasks: train, dev or test."""
    count: Positive = 200
    """How many tasks."""
    dev: Annotated[float, Between(0, 0.99)] = 0.2
    """Share of the tasks to train on that is held out for development."""
    seed: int = 0
    """Of the tasks, the experts and the splits."""

    def __len__(self) -> int:
        return self.count

    def trace(
        self,
        task: Environment,
        messages: Sequence[Message],
        environment: Part,
        *,
        slips: Collection[int] = (),
        model: str = "",
        **meta: Any,
    ) -> Trace:
        """A successful episode of a task. `slips` are places of messages that nothing is to learn from; they stay in
        the history of later turns."""
        spoken = [place for place, message in enumerate(messages) if message.role == "assistant"]
        skipped = {str(turn): "slip" for turn, place in enumerate(spoken) if place in slips}
        told = {"task_type": task_of(task).task_type, **meta, "skip_turns": skipped}
        return Trace(
            id=task.task_id,
            messages=tuple(message.in_whole_characters() for message in messages),
            tools=tuple(task.tools),
            domain=environment.name,
            split=demonstrated_split(self.split, task.task_id, self.seed, self.dev),
            success=True,
            environment=environment_record(environment, self.split, self.count, self.seed, task.task_id, model),
            meta={key: value for key, value in told.items() if value},
        )


@dataclass(frozen=True, kw_only=True)
class Gold(Demonstrations):
    """The experts of any environment whose tasks have an attribute `gold`: the assistant messages that solve them.

    They are played, and an episode that does not end in success is dropped.

    \b
    Example: turntree traces gold --environment terminal --out runs/traces.jsonl
    """

    noun: ClassVar[str] = "tasks"
    short: ClassVar[dict[str, str]] = {
        "--environment": "environment", "--split": "split", "--count": "count", "--seed": "seed",
    }  # fmt: skip

    environment: Part = field(default_factory=lambda: parts.DEFAULT)
    """The environment whose tasks are played."""

    def __iter__(self) -> Iterator[Trace | str]:
        """Every task played once: the episode, or why there is none."""
        with open_tasks(self.environment, {self.split: self.count}, seed=self.seed) as opened:
            tasks = opened.of(self.split)
            if not any(task_of(task).gold for task in tasks):
                problem = f"the tasks of {self.environment.name!r} hold no expert"
                hint = "its tasks need an attribute `gold`: the assistant messages that solve them"
                raise InputError(problem, field="environment", hint=hint)
            yield from (self._played(task) for task in tasks)

    def _played(self, task: Any) -> Trace | str:
        if not task_of(task).gold:
            return "no gold"
        ended: Observation | None = None
        try:
            environment = task.fork()
            messages = list(start(environment).messages)
            for message in task_of(task).gold:
                observation = checked(environment.step(message))
                messages += [message, *observation.messages]
                if observation.done:
                    ended = observation
                    break
        except BaseException as error:  # the boundary to foreign code
            return f"fault: {reason_of(error)}"
        if ended is None or not ended.success:
            return "not solved by its gold" if ended is None or ended.success is False else "no word on its success"
        return self.trace(environment, messages, self.environment)
