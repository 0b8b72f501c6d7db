"""Run a gateway: in the foreground as a command, or in a thread beside a training run."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import threading
from collections.abc import Coroutine, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from turntree.core.errors import InputError, TurntreeError

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

T = TypeVar("T")
_BACKLOG = 4096
_DROPPED = 2**28  # bytes of a request that are read when it is answered already, and thrown away
_DROPPING = 10.0  # seconds that this may take
_IDLE = 130  # seconds; clients keep a connection for less (httpx 5, aiohttp 15, LiteLLM 120), so they end it, not we


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket to serve on; port 0 takes a free one. Raises `InputError` where the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches Nagle's algorithm off only where the protocol is named: with it a small answer waits 40 ms
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((host, port))
        except (OSError, OverflowError) as error:
            raise InputError(
                f"cannot listen on {host}:{port} ({error})", field="port", hint="choose another"
            ) from error
        bound.listen(_BACKLOG)
        yield bound


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Hearing:
    """`app`, which hears a client out: what a request still sends when it is answered (it is too large, its key is
    wrong) is read and thrown away. Closing the connection under a client that writes would be a reset for it, and the
    answer lost."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        unread = scope["type"] == "http"

        async def received() -> Message:
            nonlocal unread
            message = await receive()
            unread = unread and bool(message.get("more_body", False))
            return message

        async def sent(message: Message) -> None:
            if unread and message["type"] == "http.response.body" and not message.get("more_body", False):
                await send({**message, "more_body": True})
                message, dropped = {"type": "http.response.body"}, 0
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_DROPPING):
                        while unread and dropped < _DROPPED:
                            dropped += len((await received()).get("body", b""))
            await send(message)

        await self._app(scope, received, sent)


def server_of(app: ASGIApp, *, most: int) -> uvicorn.Server:
    """`most` is how many connections are served at once; further ones get HTTP 503."""
    try:
        import uvicorn
    except ImportError as error:
        raise InputError(
            "needs the package uvicorn", field="gateway", hint="pip install 'turntree[gateway]'"
        ) from error

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:  # every connection is an open file
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # no log of requests: a path may hold a key
    settings: dict[str, Any] = {"access_log": False, "log_level": "warning", "timeout_graceful_shutdown": 5}
    settings |= {"backlog": _BACKLOG, "limit_concurrency": most, "timeout_keep_alive": _IDLE}
    settings["proxy_headers"] = False  # whoever is asked is this socket, whatever a header says
    return uvicorn.Server(uvicorn.Config(Hearing(app), **settings))


class Served:
    """A gateway that is served by a thread. `call` runs a coroutine in its event loop and gives its result."""

    def __init__(self, url: str, loop: asyncio.AbstractEventLoop) -> None:
        self.url, self._loop = url, loop

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


@contextlib.contextmanager
def serving(app: ASGIApp, *, most: int, host: str = "127.0.0.1", port: int = 0) -> Iterator[Served]:
    """Serve `app` in a thread while the block lasts."""
    server = server_of(app, most=most)
    with listening(host, port) as bound:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(
            target=lambda: loop.run_until_complete(server.serve(sockets=[bound])), name="turntree-gateway", daemon=True
        )
        thread.start()
        try:
            while not server.started:
                thread.join(0.005)
                if not thread.is_alive():
                    raise TurntreeError("the gateway could not be started")
            yield Served(url_of(bound), loop)
        finally:
            server.should_exit = True
            thread.join()
            loop.close()
