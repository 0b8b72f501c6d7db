"""Work at a shell as an environment: tasks in a folder (`--environment terminal`), generated or from a file, and bugs
in generated packages (`--environment swe`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from turntree.core.config import Bounded, Positive
from turntree.core.errors import ConfigError
from turntree.core.messages import Message
from turntree.env.local import LocalPool
from turntree.env.tasks import TRAIN, TaskSet, contents, must_be_held_out, shared_out
from turntree.env.tool_environment import ToolEnvironment
from turntree_worlds.sandboxes.limits import Limits, SandboxConfig
from turntree_worlds.sandboxes.sandbox import Sandbox
from turntree_worlds.workbench import bugs, families
from turntree_worlds.workbench.files import read_tasks
from turntree_worlds.workbench.shell import Editor, Shell
from turntree_worlds.workbench.tasks import Task, messages

GENERATED = "generated"


@dataclass(frozen=True, kw_only=True)
class Terminal(Bounded):
    """Tasks at a shell.

    Generated tasks have splits. Of a file (docs/environments.md) those that are drawn first are the split "train"; a
    command that trains on them checks on the next ones, or on those of `held_out`, which a command that plays only
    held-out tasks needs.
    """

    tasks: str = GENERATED
    """'generated', or a file of your own (JSON lines)."""
    held_out: str | None = None
    """A second such file, for held-out tasks."""
    instructions: str = "You work in a folder, through tools. Do what is asked, one step at a time, and then submit."
    """The system's message that opens every episode."""
    sandbox: SandboxConfig = field(
        default_factory=lambda: SandboxConfig(limits=Limits(output_bytes=4096, processes=64))
    )
    threads: Positive = 16
    """Concurrent commands; at most `sandbox.boxes` of them run at once."""

    tools: ClassVar[type[Shell]] = Shell

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.held_out is not None and self.tasks == GENERATED:
            raise ConfigError("goes with a file of tasks; generated ones have splits", field="held_out")

    @contextlib.contextmanager
    def open(self, splits: Mapping[str, int], *, seed: int) -> Iterator[TaskSet]:
        """`seed` draws tasks of a file; a generated one is defined by its split and number. Raises `InputError` on a
        machine without a sandbox."""
        with Sandbox(self.sandbox) as sandbox, LocalPool(self.threads) as pool:
            read: list[dict[str, Any]] = []
            if self.tasks == GENERATED:
                made = {name: [self.task(name, n, sandbox) for n in range(count)] for name, count in splits.items()}
            else:
                read, made = self.read(splits, sandbox, seed)
            tasks = {name: [self._played(task, sandbox) for task in each] for name, each in made.items()}
            files = {} if self.tasks == GENERATED else {"tasks": self.tasks, "held_out": self.held_out}
            yield TaskSet(tasks=tasks, pool=pool, read=read, contents=contents(files))

    def read(
        self, splits: Mapping[str, int], sandbox: Sandbox, seed: int
    ) -> tuple[list[dict[str, Any]], dict[str, Sequence[Task]]]:
        """What reading counted, and the tasks of each split from files."""
        must_be_held_out(splits, self.tasks, self.held_out)
        files = {split: self.tasks if split == TRAIN else self.held_out or self.tasks for split in splits}
        counted: list[dict[str, Any]] = []
        made: dict[str, Sequence[Task]] = {}
        for path in dict.fromkeys(files.values()):
            of = {split: count for split, count in splits.items() if files[split] == path}
            found, counts = read_tasks(path, sandbox, sum(of.values()), seed)
            counted.append(counts)
            made |= shared_out(found, of, path)
        return counted, made

    def task(self, split: str, number: int, sandbox: Sandbox) -> Task:
        """A generated task."""
        return families.generated(split, number)

    def _played(self, task: Task, sandbox: Sandbox) -> ToolEnvironment:
        return ToolEnvironment(
            self.tools,
            task_id=task.id,
            arguments={"task": task, "sandbox": sandbox},
            prompt=(Message("system", self.instructions), Message("user", "")),
            task_type=task.kind,
            gold=messages(task.gold),
        )


@dataclass(frozen=True, kw_only=True)
class Software(Terminal):
    """Bugs in small packages, with tools to read and edit files beside the shell."""

    instructions: str = "You work in a repository, through tools. Find the bug, fix it, and then submit."
    """The system's message that opens every episode."""

    tools: ClassVar[type[Shell]] = Editor

    def task(self, split: str, number: int, sandbox: Sandbox) -> Task:
        return bugs.generated(split, number, sandbox)
