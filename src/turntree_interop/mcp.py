"""`mcp:COMMAND` or `mcp:URL`: the tools of an MCP server, with your own tasks and reward.

`tasks` is a JSONL file: `prompt` is the task (a text or chat messages), the other columns are for the reward. The
episode ends with the first message that calls no tool. Its reward is what `reward` (`module:function`) returns, called
as TRL does: `reward(prompts=[...], completions=[...], environments=[...], **columns)` gives a list of numbers. Without
one, a row's `answer` is compared with the last message (case and outer white space do not count).

One server serves all episodes. The protocol has no sessions that could be copied, so a server whose answers depend on
earlier calls must be started anew for each episode (`own=true`), and forks by replay. A server whose connection is lost
is started again (a URL: connected to again), and the call under which that happened is a fault. Where it does not come
back, the run ends and can be resumed.

Tools of any MCP server, through the official SDK (`pip install 'turntree[mcp]'`).
"""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import threading
import weakref
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio.from_thread

from turntree.core.config import is_url
from turntree.core.errors import ConfigError, InputError
from turntree.core.foreign import EnvironmentFault, EnvironmentGone, needs, package, reason_of
from turntree.core.messages import Message, answer_text
from turntree.core.protocols import Environment, Observation
from turntree.env.adapted import AdaptedEnvironment, named, prompt_of, rows_of, scored
from turntree.env.tasks import TaskSet
from turntree.env.tools.runtime import ToolRuntime
from turntree.env.tools.tool import ToolOutput, ToolSpec, ToolStatus

if TYPE_CHECKING:
    from mcp import Client, StdioServerParameters
    from mcp.types import CallToolResult


class McpServer:
    """A connection to one server, and its tools for a `ToolRuntime`. Use it as a context manager.

    `server` is a URL (streamable HTTP) or the command line of a server that talks over its standard streams. Only the
    tools named in `pure` are cached, shared and tried again: the protocol does not tell which ones have no effects.
    The server has `seconds` to start, to greet and to list all of its tools.

    Where the connection is closed under a call, that call fails, because nobody knows what it did, and the server is
    started or connected to again for the next one. Calls raise `EnvironmentGone` where that does not succeed.
    """

    def __init__(self, server: str | Sequence[str], *, pure: Collection[str] = (), seconds: float = 60.0) -> None:
        if seconds <= 0:
            raise ConfigError(f"is {seconds:g}", field="seconds", hint="give the server more than 0")
        self._server, self._pure, self._seconds = server, frozenset(pure), seconds
        self._stack, self._connection = contextlib.ExitStack(), contextlib.ExitStack()
        self._lock = threading.Lock()  # held while the connection changes
        self._gone = ""
        self.tools: tuple[McpTool, ...] = ()

    def __enter__(self) -> McpServer:
        """Raises `InputError` when the SDK is not installed, the server does not answer, or `pure` names no tool."""
        told, started = self._server, package("mcp", "mcp").StdioServerParameters
        self._address = told if isinstance(told, str) else started(command=told[0], args=list(told[1:]))
        try:
            self._portal = self._stack.enter_context(anyio.from_thread.start_blocking_portal())
            listed = self._connect()
        except BaseException as error:  # whatever a foreign server and the transports below it raise
            reason = reason_of(_innermost(error))
            self._stack.close()
            raise InputError(f"the MCP server {self._server!r} does not answer ({reason})") from error
        self.tools = tuple(McpTool(self, spec, pure=spec.name in self._pure) for spec in listed)
        if unknown := sorted(self._pure - {spec.name for spec in listed}):
            self.__exit__()
            raise InputError(f"the MCP server has no tool {unknown[0]!r}", field="pure")
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._disconnect()
            self._stack.close()

    @property
    def version(self) -> str:
        server = self._client.server_info
        return f"{server.name} {server.version}" if server is not None else ""

    def call(self, name: str, arguments: Mapping[str, Any], seconds: float) -> CallToolResult:
        """Raises what the SDK raises, and `EnvironmentGone`."""
        with self._lock:  # calls wait while it is connected to again
            self._require()
            client = self._client
        try:
            return self._portal.call(lambda: client.call_tool(name, dict(arguments), read_timeout_seconds=seconds))
        except Exception as error:
            if _is_closed(error):
                with self._lock:
                    if self._client is client and not self._gone:  # no other call has tried
                        self._reconnect()
                self._require()
            raise

    def _connect(self) -> list[ToolSpec]:
        """The tools of the server, which is then connected."""
        connecting = self._portal.wrap_async_context_manager(_connected(self._address, self._seconds))
        self._client, listed = self._connection.enter_context(connecting)
        return listed

    def _disconnect(self) -> None:
        with contextlib.suppress(Exception):  # what broke it comes up again here
            self._connection.close()

    def _reconnect(self) -> None:
        self._disconnect()
        try:
            self._connect()
        except BaseException as error:
            self._gone = reason_of(_innermost(error))

    def _require(self) -> None:
        """Raises `EnvironmentGone` where it could not be connected to again."""
        if self._gone:
            raise EnvironmentGone(
                f"the MCP server {self._server!r} closed its connection and does not come back ({self._gone}); "
                "nothing is lost: mend it and give the same command again to resume"
            )


@contextlib.asynccontextmanager
async def _connected(
    address: str | StdioServerParameters, seconds: float
) -> AsyncIterator[tuple[Client, list[ToolSpec]]]:
    """A connection and what the server offers. Raises `TimeoutError` where that took more than `seconds`."""
    from mcp import Client
    from mcp.client.stdio import stdio_client  # 2.0 of the SDK starts no command by itself

    with anyio.move_on_after(seconds) as limit:
        async with Client(address if isinstance(address, str) else stdio_client(address)) as client:
            specs: list[ToolSpec] = []
            cursor: str | None = None
            while True:
                page = await client.list_tools(cursor=cursor)
                specs += [ToolSpec(tool.name, tool.description or "", tool.input_schema) for tool in page.tools]
                cursor = page.next_cursor
                if cursor is None:
                    break
            limit.deadline = math.inf  # connected: calls have limits of their own
            yield client, specs
    if limit.cancelled_caught:
        raise TimeoutError(f"its tools were not all listed within {seconds:g} s")


def _innermost(error: BaseException) -> BaseException:
    """What went wrong below the groups in which the transports wrap it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _is_closed(error: Exception) -> bool:
    from mcp import MCPError
    from mcp.types import CONNECTION_CLOSED

    # over HTTP a server that was started again may not know the session
    return isinstance(error, MCPError) and (error.code == CONNECTION_CLOSED or error.message == "Session terminated")


class McpTool:
    """One tool of a connected server."""

    def __init__(self, server: McpServer, spec: ToolSpec, *, pure: bool) -> None:
        self.spec, self.pure, self.version = spec, pure, server.version
        self._server = server

    def call(self, arguments: Mapping[str, Any], seconds: float) -> ToolOutput:
        """A tool's own error is an answer (which is not cached); an error of the protocol is raised."""
        return _output(self._server.call(self.spec.name, arguments, seconds))


def _output(result: CallToolResult) -> ToolOutput:
    parts: list[str] = []
    for part in result.content:  # files come as resources whose text is embedded
        text = part.text if part.type == "text" else getattr(getattr(part, "resource", None), "text", None)
        parts.append(f"[{part.type}, not shown]" if text is None else text)
    if not parts and result.structured_content is not None:  # servers need not say it as text, too
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return ToolOutput("\n".join(parts) or "[no output]", final=not result.is_error)


@needs("mcp", "mcp")
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
            right = None if self._answer is None else answer_text(action).casefold() == self._answer.strip().casefold()
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
    if isinstance(value, float):
        return math.isfinite(value)
    return bool(value.strip()) if isinstance(value, str) else type(value) is int


def server_of(argument: str) -> str | Sequence[str]:
    """A URL as it is, a command line as its words."""
    return argument if is_url(argument) else shlex.split(argument)
