"""`mcp:COMMAND` or `mcp:URL`: the tools of an MCP server, with your own tasks and reward.

`tasks` is a JSONL file: `prompt` is the task (a text or chat messages), the other columns are for the reward. The
episode ends with the first message that calls no tool. Its reward is what `reward` (`module:function`) returns, called
as TRL does: `reward(prompts=[...], completions=[...], environments=[...], **columns)` gives a list of numbers. Without
one, a row's `answer` is compared with the last message (case and outer white space do not count).

One server serves all episodes. The protocol has no sessions that could be copied, so a server whose answers depend on
earlier calls must be started anew for each episode (`own=true`), and forks by replay. A server whose connection is lost
is started again (a URL: connected to again), and the call under which that happened is a fault. Where it does not come
back, the run ends and can be resumed.
"""

from __future__ import annotations

import contextlib
import math
import shlex
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from turntree.adapters.base import AdaptedEnvironment, named, prompt_of, rows_of, scored
from turntree.core.errors import InputError
from turntree.core.foreign import EnvironmentFault
from turntree.core.messages import Message
from turntree.core.protocols import Environment, Observation
from turntree.environments.tasks import TaskSet
from turntree.tools.mcp import McpServer
from turntree.tools.runtime import ToolRuntime
from turntree.tools.tool import ToolStatus
from turntree.verifiers.texts import said


@dataclass(frozen=True, kw_only=True)
class McpTasks:
    """Tasks of a file, played with the tools of a server."""

    argument: str | None
    tasks: str
    """A file of rows with a prompt, and an answer where no reward is named."""
    held_out: str | None = None
    """A second such file, for held-out tasks (default: the first one is split by a hash of the row)."""
    reward: str | None = None
    """A function that judges an episode, as module:function (default: 1 for the row's answer)."""
    pure: tuple[str, ...] = ()
    """Tools without effects: their answers are kept and shared."""
    own: bool = False
    """Start a server for every episode instead of one for all."""

    @contextlib.contextmanager
    def open(self, splits: Mapping[str, int], *, seed: int) -> Iterator[TaskSet]:
        address = server_of(named(self.argument, "mcp:COMMAND"))
        with McpServer(address, pure=self.pure) as server:
            runtime = ToolRuntime(server.tools)
            games: weakref.WeakSet[McpGame] = weakref.WeakSet()
            tasks = {
                split: [
                    self._task(key, row, runtime, games, address)
                    for key, row in rows_of(self.tasks, self.held_out, split, count, seed)
                ]
                for split, count in splits.items()
            }
            try:
                yield TaskSet(tasks=tasks, figures=runtime.ledger.figures)
            finally:
                for game in list(games):
                    game.end()

    def _task(
        self,
        key: str,
        row: Mapping[str, Any],
        runtime: ToolRuntime,
        games: weakref.WeakSet[McpGame],
        address: str | Sequence[str],
    ) -> Environment:
        prompt = prompt_of(row.get("prompt"), self.tasks)
        if not prompt:
            raise InputError("is missing", path=self.tasks, field="prompt", hint="give every row a task")
        answer = row.get("answer")
        if self.reward is None and not _is_answer(answer):
            problem = f"is {answer!r}, which is no answer" if "answer" in row else "is missing"
            hint = "give every row a text or a number, or name a function with environment.reward"
            raise InputError(problem, path=self.tasks, field="answer", hint=hint)
        answer = str(answer) if self.reward is None else None
        shared = None if self.own else runtime
        make = partial(McpGame, shared, games, address, prompt, answer)
        task = AdaptedEnvironment(make, task_id=key, tools=runtime.schemas, can_copy=not self.own)
        return scored(task, self.reward, row)


class McpGame:
    """`runtime` None: a server of its own, which ends with the object."""

    def __init__(
        self,
        runtime: ToolRuntime | None,
        games: weakref.WeakSet[McpGame],
        address: str | Sequence[str],
        prompt: tuple[Message, ...],
        answer: str | None,
    ) -> None:
        self._stack = contextlib.ExitStack()
        self._own = runtime is None
        if runtime is None:
            runtime = ToolRuntime(self._stack.enter_context(McpServer(address)).tools)
            games.add(self)
        self._runtime, self._games, self._address = runtime, games, address
        self._prompt, self._answer = prompt, answer

    def __deepcopy__(self, memo: object) -> McpGame:
        return McpGame(self._runtime, self._games, self._address, self._prompt, self._answer)

    def end(self) -> None:
        self._stack.close()
        self._own = False

    def close(self) -> None:
        """In a thread of its own: the garbage collector may run in one that the server's connection waits for."""
        if self._own:
            threading.Thread(target=self.end, daemon=True).start()

    def begin(self) -> tuple[Message, ...]:
        return self._prompt

    def act(self, action: Message) -> Observation:
        if not action.tool_calls:
            right = None if self._answer is None else said(action).casefold() == self._answer.strip().casefold()
            return Observation((Message("user", "done"),), done=True, success=right)
        answers: list[Message] = []
        for call in action.tool_calls:
            result = self._runtime.call(call)
            if result.status is ToolStatus.FAILED:
                raise EnvironmentFault(f"tool {call.name!r} failed: {result.text}")
            answers.append(Message("tool", result.text, tool_call_id=call.id, name=call.name))
        return Observation(tuple(answers), done=False)


def _is_answer(value: Any) -> bool:
    """Whether a message can be it: a text that is not empty, or a number."""
    return bool(value.strip()) if isinstance(value, str) else isinstance(value, int | float) and math.isfinite(value)


def server_of(argument: str) -> str | Sequence[str]:
    """A URL as it is, a command line as its words."""
    return argument if argument.startswith(("http://", "https://")) else shlex.split(argument)
