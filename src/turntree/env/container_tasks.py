"""Tasks in containers (`--environment container`): a shell that persists, and a script that judges.

Each line of a file of tasks is an object; `instruction` and `check` are needed:

| key | meaning |
|---|---|
| `id`, `kind` | its name (default: a hash of its content), and its type |
| `instruction` | the task |
| `image` | the image (default: the option `image`) |
| `folder`, `user` | where the shell begins, and as whom (default: those of the image) |
| `setup` | a script that is run once as root, before the first episode of the task |
| `check` | a script that is run as root at the end: exit code 0 says that the task is solved |
| `gold` | commands that solve it |
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turntree.core.config import Bounded, Part, Positive
from turntree.core.errors import InputError
from turntree.core.foreign import EnvironmentFault
from turntree.core.messages import Message, ToolCall
from turntree.core.parts import build
from turntree.env.adapted import rows_of
from turntree.env.container import ContainerLimits, ContainerProvider, Snapshot
from turntree.env.container_shell import KILLED, ContainerShell
from turntree.env.local import LocalPool
from turntree.env.tasks import TaskSet, contents, must_be_held_out
from turntree.env.tool_environment import ToolEnvironment

_LONGEST = 100_000  # bytes of a command: the kernel takes 128 KiB
_MINUTES = 600.0  # for scripts that set a task up and judge it, in seconds


@dataclass(frozen=True)
class Judged:
    """The reward of an episode, and why it is that; `tampered`: the episode reached for its own judgement."""

    reward: float
    reason: str = ""
    tampered: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class ContainerTask:
    """A task in a container. `image` gives the image's id; `judge` judges what a shell left."""

    id: str
    instruction: str
    image: Callable[[ContainerProvider], str]
    judge: Callable[[ContainerShell], Judged]
    setup: str = ""
    folder: str = ""
    user: str = ""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    gold: tuple[str, ...] = ()
    kind: str | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _base: list[Snapshot] = field(default_factory=list[Snapshot])  # the image after `setup`, once it is known

    def shell(self, host: ContainerProvider) -> ContainerShell:
        """A new shell at the start of the task. Raises `EnvironmentFault` where the setup fails, or leaves no folder to
        start in."""
        with self._lock:
            if not self._base:
                first = Snapshot(self.image(host))
                if self.setup or self.folder:
                    with contextlib.closing(self._started(host, first, folder="", setup=self.setup)) as shell:
                        if self.folder and shell.script(["test", "-d", self.folder], seconds=_MINUTES).code != 0:
                            raise EnvironmentFault(f"task {self.id!r} begins in {self.folder!r}, which is no folder")
                        first = (shell.base() if self.setup else None) or first
                self._base.append(first)
        kept = self._base[0].depth > 0  # the image after the setup
        return self._started(host, self._base[0], folder=self.folder, setup="" if kept else self.setup)

    def _started(self, host: ContainerProvider, base: Snapshot, folder: str, setup: str) -> ContainerShell:
        shell = host.shell(base, folder=folder, user=self.user, environment=self.environment)
        try:
            if setup and (ran := shell.script(["bash", "-c", setup], seconds=_MINUTES)).code != 0:
                raise EnvironmentFault(f"the setup of task {self.id!r} failed: {ran}")
        except BaseException:
            shell.close()
            raise
        return shell

    def messages(self) -> tuple[Message, ...]:
        """`gold` as an expert would say it: one message a call."""
        calls = [*(ToolCall("bash", {"command": command}) for command in self.gold), ToolCall("submit", {})]
        numbered = (ToolCall(call.name, call.arguments, f"call_{n}") for n, call in enumerate(calls, start=1))
        return tuple(Message("assistant", "", (call,)) for call in numbered) if self.gold else ()


class ContainerTools:
    """One episode in a container: the tools of `ToolEnvironment`."""

    _shell: Any = None  # a `ContainerShell`

    def reset(self, task: ContainerTask, host: ContainerProvider) -> str:
        self._task, self._host = task, host
        self.reward, self.done = 0.0, False
        self._shell = task.shell(host)
        host.ahead(self._shell)
        return task.instruction

    def bash(self, command: str) -> str:
        """Run a command with bash. The shell persists: working folder, variables and functions stay.

        Args:
            command: The command, or several lines of them.
        """
        script = command.encode("utf-8", "replace")
        if b"\0" in script or len(script) > _LONGEST:
            return f"error: a command has at most {_LONGEST} bytes, and not the character NUL"
        return str(self._shell.run(script.decode()))

    def submit(self) -> str:
        """Say that the task is done. This ends it."""
        judged = self._task.judge(self._shell)
        self._host.count("judged")
        self._host.count("tampered", judged.tampered)
        self.reward, self.done = judged.reward, True  # not before: an error in judging must not end the episode with 0
        return "submitted" if not judged.tampered else f"submitted; not paid: {judged.reason}"

    def fork(self) -> ContainerTools | None:
        """None where it has to be replayed."""
        shell = self._shell.fork()
        if shell is None:
            return None
        twin = object.__new__(type(self))
        twin.__dict__.update({**self.__dict__, "_shell": shell})
        self._host.ahead(shell)
        return twin

    def close(self) -> None:
        if self._shell is not None:
            self._shell.close()

    def __getstate__(self) -> dict[str, object]:
        """What the verifier `executed` compares beside the answer."""
        return {**self._shell.state(), "done": self.done, "reward": self.reward}


@dataclass(frozen=True, kw_only=True)
class InContainers(Bounded, ABC):
    """Tasks of a file or folder in containers, over Docker's API; with `held_out` that one is "dev" and "test". A
    command that plays only held-out tasks needs it."""

    held_out: str | None = None
    """A second file or folder of such tasks, for held-out tasks."""
    limits: ContainerLimits = field(default_factory=ContainerLimits)
    provider: Part = field(default_factory=lambda: Part("docker"))
    """Where containers come from: "docker" (Docker's or podman's daemon), "swerex" (services, by SWE-ReX), or one of
    your own."""
    threads: Positive = 16
    """Commands that run at once."""

    @abstractmethod
    def source(self) -> str:
        """The file or folder of tasks to train on."""

    @abstractmethod
    def of_split(self, split: str, count: int, seed: int) -> list[ContainerTask]:
        """Raises `InputError` for what is no task."""

    @contextlib.contextmanager
    def open(self, splits: Mapping[str, int], *, seed: int) -> Iterator[TaskSet]:
        """Raises `InputError` for what is no task, and where no daemon answers."""
        source = self.source()
        must_be_held_out(splits, source, self.held_out)
        made = {split: self.of_split(split, count, seed) for split, count in splits.items()}
        files = contents({"tasks": source, "held_out": self.held_out})
        provider = build("providers", self.provider, field="environment.provider", limits=self.limits)
        with opened(made, provider, self.threads, files) as tasks:
            yield tasks


@dataclass(frozen=True, kw_only=True)
class ContainerTasks(InContainers):
    """Tasks in containers, over Docker's API.

    The rows of `tasks` are assigned to splits by a hash of their content; with `held_out` that file is "dev" and
    "test". A command that plays only held-out tasks needs it.
    """

    tasks: str
    """A file of tasks (JSON lines)."""
    image: str = ""
    """The image of tasks that name none."""

    def source(self) -> str:
        return self.tasks

    def of_split(self, split: str, count: int, seed: int) -> list[ContainerTask]:
        return [self._task(row, name) for name, row in rows_of(self.tasks, self.held_out, split, count, seed)]

    def _task(self, row: Mapping[str, Any], name: str) -> ContainerTask:
        for key in row:
            if key not in _KEYS:
                raise InputError("is not known", path=self.tasks, field=key, hint=f"a task has {', '.join(_KEYS)}")
        for key in ("instruction", "check"):
            if not isinstance(row.get(key), str) or not row[key].strip():
                raise InputError("is missing, or no text", path=self.tasks, field=key)
        image = row.get("image") or self.image
        if not image:
            hint = "name one in the row, or for all with --set environment.image=NAME"
            raise InputError("is missing", path=self.tasks, field="image", hint=hint)
        gold = row.get("gold") or []
        if not isinstance(gold, list) or not all(isinstance(each, str) for each in gold):
            raise InputError("is not a list of commands", path=self.tasks, field="gold")
        for key in ("setup", "folder", "user", "kind", "image"):
            if not isinstance(row.get(key), str | None):
                raise InputError("is no text", path=self.tasks, field=key)
        texts = {key: row.get(key) or "" for key in ("setup", "folder", "user", "kind", "check")}
        return ContainerTask(
            id=str(row.get("id") or name),
            instruction=row["instruction"],
            image=lambda host: host.image(image),
            judge=lambda shell: checked_by(shell, texts["check"]),
            gold=tuple(gold),
            setup=texts["setup"],
            folder=texts["folder"],
            user=texts["user"],
            kind=texts["kind"] or None,
        )


_KEYS = ("id", "kind", "instruction", "image", "folder", "user", "setup", "check", "gold")


def checked_by(shell: ContainerShell, check: str) -> Judged:
    """1 where a script ends with exit code 0, after every process of the episode has ended. Raises `EnvironmentFault`
    where it was stopped or killed, as for memory, which is no failure of the policy."""
    shell.restart()
    ran = shell.script(["/bin/bash", "-c", check], seconds=_MINUTES)
    if ran.stopped or ran.code == KILLED:
        raise EnvironmentFault(f"the check was stopped: {ran}")
    return Judged(float(ran.code == 0), str(ran))


@contextlib.contextmanager
def opened(
    made: Mapping[str, Sequence[ContainerTask]], provider: ContainerProvider, threads: int, hashes: Mapping[str, str]
) -> Iterator[TaskSet]:
    """Environments of tasks."""
    with provider as host, LocalPool(threads) as pool:
        tasks = {
            split: [
                ToolEnvironment(
                    ContainerTools,
                    task_id=task.id,
                    arguments={"task": task, "host": host},
                    task_type=task.kind,
                    gold=task.messages(),
                )
                for task in each
            ]
            for split, each in made.items()
        }
        for image in {task.image for each in made.values() for task in each}:
            image(host)  # pulled and built before anything is played: what cannot be is no fault of a rollout
        yield TaskSet(tasks=tasks, pool=pool, figures=lambda: {"containers": dict(host.counts)}, contents=hashes)
