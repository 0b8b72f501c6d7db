"""Tools of any MCP server, through the official SDK (`pip install 'turntree[mcp]'`)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from turntree.core.errors import ConfigError, InputError
from turntree.tools.tool import ToolOutput, ToolSpec

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal
    from mcp import Client, StdioServerParameters
    from mcp.types import CallToolResult


class McpServer:
    """A connection to one server, and its tools for a `ToolRuntime`. Use it as a context manager.

    `server` is a URL (streamable HTTP) or the command line of a server that talks over its standard streams. Only the
    tools named in `pure` are cached, shared and tried again: the protocol does not tell which ones have no effects.
    The server has `seconds` to start, to greet and to list all of its tools.
    """

    def __init__(self, server: str | Sequence[str], *, pure: Collection[str] = (), seconds: float = 60.0) -> None:
        if seconds <= 0:
            raise ConfigError(f"is {seconds:g}", field="seconds", hint="give the server more than 0")
        self._server, self._pure, self._seconds = server, frozenset(pure), seconds
        self._stack = contextlib.ExitStack()
        self.tools: tuple[McpTool, ...] = ()

    def __enter__(self) -> McpServer:
        """Raises `InputError` when the SDK is not installed, the server does not answer, or `pure` names no tool."""
        try:
            from anyio.from_thread import start_blocking_portal
            from mcp import StdioServerParameters
        except ImportError as error:
            raise InputError("the MCP SDK is not installed", hint="pip install 'turntree[mcp]'") from error
        address = self._server
        if not isinstance(address, str):
            address = StdioServerParameters(command=address[0], args=list(address[1:]))
        try:
            portal = self._stack.enter_context(start_blocking_portal())
            connecting = portal.wrap_async_context_manager(_connected(address, self._seconds))
            client, listed = self._stack.enter_context(connecting)
            self.tools = tuple(McpTool(portal, client, spec, pure=spec.name in self._pure) for spec in listed)
        except Exception as error:  # whatever a foreign server and the transports below it raise
            self._stack.close()
            raise InputError(f"the MCP server {self._server!r} does not answer ({_innermost(error)})") from error
        if unknown := sorted(self._pure - {tool.spec.name for tool in self.tools}):
            self._stack.close()
            raise InputError(f"the MCP server has no tool {unknown[0]!r}", field="pure")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


@contextlib.asynccontextmanager
async def _connected(
    address: str | StdioServerParameters, seconds: float
) -> AsyncIterator[tuple[Client, list[ToolSpec]]]:
    """A connection and what the server offers. Raises `TimeoutError` where that took more than `seconds`."""
    import anyio
    from mcp import Client

    with anyio.move_on_after(seconds) as limit:
        async with Client(address) as client:
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


class McpTool:
    """One tool of a connected server."""

    def __init__(self, portal: BlockingPortal, client: Client, spec: ToolSpec, *, pure: bool) -> None:
        self.spec, self.pure = spec, pure
        server = client.server_info
        self.version = f"{server.name} {server.version}" if server is not None else ""
        self._portal, self._client = portal, client

    def call(self, arguments: Mapping[str, Any], seconds: float) -> ToolOutput:
        """A tool's own error is an answer (which is not cached); an error of the protocol is raised."""
        return _output(
            self._portal.call(
                lambda: self._client.call_tool(self.spec.name, dict(arguments), read_timeout_seconds=seconds)
            )
        )


def _output(result: CallToolResult) -> ToolOutput:
    parts = [part.text if part.type == "text" else f"[{part.type}, not shown]" for part in result.content]
    return ToolOutput("\n".join(parts) or "[no output]", final=not result.is_error)
