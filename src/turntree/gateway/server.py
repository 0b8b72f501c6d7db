"""The HTTP side of a gateway, on Starlette, served by uvicorn: in the foreground as a command, or in a thread beside a
training run.

Agents: `POST /v1/chat/completions`, `/v1/responses`, `/v1/messages` and `/v1/messages/count_tokens`, `GET /v1/models`,
also below `/s/SESSION`.
Those who run them: `POST /sessions`, `POST /sessions/ID/reward`, `POST /sessions/ID/close`,
`GET /status`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from turntree.core.config import Count, from_mapping
from turntree.core.errors import InputError, TurntreeError
from turntree.core.messages import Message
from turntree.core.progress import notice
from turntree.gateway.calls import Call
from turntree.gateway.config import Refused, bad_request, read_reward
from turntree.gateway.dialects import DIALECTS, OF_MESSAGES, Dialect
from turntree.gateway.dialects.common import Stream
from turntree.gateway.listening import Listener
from turntree.gateway.sampling import Ask, LiveSession
from turntree.gateway.sessions import Sessions, digest
from turntree.run.jsonl import parse_object

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

T = TypeVar("T")

_SWEEP = 5.0  # seconds between two looks for sessions that took too long
_SMALL = 2**16  # bytes of a request that is read in the event loop; a larger one is read beside it
_SESSION = "x-turntree-session"
_READ = "turntree.read"  # of a request's scope: its body was read to the end
_BACKLOG = 4096
_BODY = 30.0  # seconds that a client may take to send a request
_DROPPING = 10.0  # seconds in which the rest of a request that is refused is read and thrown away
_OWN = DIALECTS["/v1/chat/completions"]  # errors of requests that are in no dialect
_IDLE = 130  # seconds; clients keep a connection for less (httpx 5, aiohttp 15, LiteLLM 120), so they end it, not we


class Gateway:
    """The application of `sessions`. `admin_key` opens and rewards sessions; `model` is the name that is served."""

    def __init__(self, sessions: Sessions, *, model: str, admin_key: str) -> None:
        local = model.startswith(("/", ".", "~")) or Path(model).exists()  # where a folder lies is nobody's business
        self.model = (Path(model).name or "policy") if local else model
        self.sessions, self._admin = sessions, digest(admin_key)
        agents = [
            *(Route(path, partial(self.answer, one), methods=["POST"]) for path, one in DIALECTS.items()),
            Route(f"{OF_MESSAGES}/count_tokens", self.count, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{model:path}", self.models, methods=["GET"]),
        ]
        below = [Route("/s/{session}" + one.path, one.endpoint, methods=list(one.methods or ())) for one in agents]
        admin = [
            Route("/sessions", self.open, methods=["POST"]),
            Route("/sessions/{session}/reward", self.reward, methods=["POST"]),
            Route("/sessions/{session}/close", self.close, methods=["POST"]),
            Route("/status", self.status, methods=["GET"]),
        ]
        handlers: Any = {404: _missing, 405: _missing, 500: _defect, TurntreeError: self._refuse, _Gone: self._hung_up}
        self.app = Starlette(routes=[*agents, *below, *admin], exception_handlers=handlers, lifespan=self._sweeping)

    @contextlib.asynccontextmanager
    async def _sweeping(self, app: Starlette) -> AsyncIterator[None]:
        async def sweep() -> None:
            while True:
                await asyncio.sleep(_SWEEP)
                await self.sessions.expire()

        task = asyncio.create_task(sweep())
        yield
        task.cancel()

    # agents

    async def answer(self, dialect: Dialect, request: Request) -> Response:
        session = self._asking(request)
        try:
            return await self._answer(dialect, request, session)
        except TurntreeError as error:
            session.refused = str(error)
            raise

    async def _answer(self, dialect: Dialect, request: Request, session: LiveSession) -> Response:
        """A stream begins when some of its text is certain, so that what fails before has an HTTP status: a client
        tries it again."""
        asked = await self._asked(dialect, request, session)
        sampler = self.sessions.sampler
        listener = sampler.listener(asked) if asked.stream and not asked.logprobs else None
        work = asyncio.create_task(sampler.ask(session, asked, listener))
        first = listener and asyncio.create_task(listener.more(work))
        call = await _unless_gone(request, work, first) or (listener and listener.call)
        assert call is not None  # without a listener nothing else ends before it
        if not asked.stream:
            return _json(dialect.body(call, self.model, asked))
        events = self._events(dialect.stream(call.call_id, self.model, asked), work, listener, first)
        return StreamingResponse(events, headers={"cache-control": "no-cache"}, media_type="text/event-stream")

    async def _events(
        self,
        stream: Stream,
        work: asyncio.Task[Call],
        listener: Listener | None,
        first: asyncio.Task[Message | None] | None,
    ) -> AsyncIterator[str]:
        """The answer as it becomes certain; its end, once it is kept."""
        try:
            text = await first if first is not None else None
            while text is not None and listener is not None:
                for event in stream.said(text):
                    yield event
                text = await listener.more(work)
            await asyncio.wait({work})
            for event in _last(stream, work):
                yield event
        finally:
            work.cancel()  # where the client hung up

    async def count(self, request: Request) -> Response:
        session = self._asking(request)
        asked = await self._asked(DIALECTS[OF_MESSAGES], request, session)
        return _json({"input_tokens": self.sessions.sampler.count(session, asked)})

    async def _asked(self, dialect: Dialect, request: Request, session: LiveSession) -> Ask:
        body = await self._body(request)
        before = {call.call_id: call for call in session.calls}
        return dialect.read(body, before.get)

    async def models(self, request: Request) -> Response:
        self._asking(request)
        asked = request.path_params.get("model")  # every name is served
        name = asked or self.model
        served = {"id": name, "object": "model", "created": 0, "owned_by": "turntree"}
        served |= {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}  # Anthropic's form
        return _json(served if asked else {"object": "list", "data": [served], "has_more": False})

    # those who run them

    async def open(self, request: Request) -> Response:
        self._check_admin(request)
        asked = from_mapping(_Opening, await self._body(request))
        opened, keys = await self.sessions.open(
            asked.task, seed=asked.seed, sample=asked.sample, session_id=asked.session, meta=asked.meta
        )
        # by its socket: the Host header is the word of a client or a proxy, and keys are sent to what is answered here
        base = _address(*request.scope["server"])
        places = {"base_url": f"{base}/v1", "reward_url": f"{base}/sessions/{opened.session_id}/reward"}
        named = {"session": opened.session_id, "task": asked.task, "key": keys["ask"], "reward_key": keys["reward"]}
        return _json({**named, **places}, 201)

    async def reward(self, request: Request) -> Response:
        """The reward ends the session. The same one may be posted again: the answer to the first may have been lost."""
        name = request.path_params["session"]
        session = self.sessions.find(_key(request), name, use="reward", admin=self._is_admin(request))
        known = {call.call_id for call in session.calls} | set(_worth(session).get("call_rewards", ()))
        self.sessions.reward(session, read_reward(await self._body(request), known))
        await self.sessions.close(session)
        return _json({"session": name, **_worth(session)})

    async def close(self, request: Request) -> Response:
        self._check_admin(request)
        session = self.sessions.get(request.path_params["session"])
        await self.sessions.close(session, from_mapping(_Closing, await self._body(request)).reason[:1000])
        return _json({"session": session.session_id})

    async def status(self, request: Request) -> Response:
        self._check_admin(request)
        return _json({"open": len(self.sessions), **self.sessions.ledger})

    # what they share

    async def _refuse(self, request: Request, error: Exception) -> Response:
        refused = _refused(error)
        await _heard_out(request)
        self.sessions.ledger[f"refused_{refused.status}"] += 1
        headers = {"retry-after": "1"} if refused.status in (429, 503) else None
        return _json(_error_in(request, refused), refused.status, headers)

    async def _hung_up(self, request: Request, error: Exception) -> Response:
        self.sessions.ledger["hung_up"] += 1
        return Response(status_code=499)

    def _asking(self, request: Request) -> LiveSession:
        """The session of a request: named by its key, or by the path or a header, which the key must then open. A path
        may hold the whole key."""
        named = request.path_params.get("session") or request.headers.get(_SESSION)
        key = named if named is not None and "." in named else _key(request)
        return self.sessions.find(key, named and named.partition(".")[0], admin=self._is_admin(request))

    def _is_admin(self, request: Request) -> bool:
        return secrets.compare_digest(digest(_key(request)), self._admin)

    def _check_admin(self, request: Request) -> None:
        if not self._is_admin(request):
            raise Refused(401, "this needs the gateway's own key", code="invalid_api_key")

    async def _body(self, request: Request) -> dict[str, Any]:
        """The JSON object of a request, within the limits of size and time."""
        most, size, data = self.sessions.config.limits.body_bytes, 0, bytearray()
        try:
            async with asyncio.timeout(_BODY):
                async for part in request.stream():
                    size += len(part)
                    data += part if size <= most else b""  # what is too much is read and thrown away
            request.scope[_READ] = True
        except TimeoutError:
            if size <= most:
                raise Refused(408, f"the request took longer than {_BODY:g} seconds to arrive") from None
        except ClientDisconnect as error:
            raise _Gone from error
        if size > most:
            raise Refused(413, f"the request has more than {most} bytes", code="too_large")
        given = bytes(data) or b"{}"
        try:
            return parse_object(given) if size <= _SMALL else await asyncio.to_thread(parse_object, given)
        except InputError as error:
            raise Refused(400, f"the body of the request {error.problem}; send one JSON object") from error


@dataclass(frozen=True, kw_only=True)
class _Opening:
    """What opens a session."""

    task: str = "task"
    session: str | None = None
    seed: Count | None = None
    sample: Count = 0
    meta: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True)
class _Closing:
    """What closes a session without a reward."""

    reason: str = "closed without a reward"


class _Gone(Exception):
    """The client hung up."""


def _last(stream: Stream, work: asyncio.Task[Call]) -> Iterator[str]:
    """The end of a stream, by what became of its call."""
    if work.cancelled():
        return stream.failed(_over())
    error = work.exception()
    if error is None:
        return stream.ended(work.result())
    if not isinstance(error, TurntreeError):
        raise error
    return stream.failed(_refused(error))


def _over() -> Refused:
    return Refused(403, "the session was ended", code="session_over")


async def _unless_gone(request: Request, task: asyncio.Task[T], first: asyncio.Task[Any] | None = None) -> T | None:
    """The result of `task`, which is cancelled when the client hangs up; None where `first` ends before."""
    leaving, begun = asyncio.create_task(_left(request)), False
    try:
        await asyncio.wait({task, leaving, *([first] if first else [])}, return_when=asyncio.FIRST_COMPLETED)
        begun = first is not None and first.done() and not task.done()
        if begun:
            return None
        if not task.done():
            raise _Gone
        if task.cancelled():
            raise _over()
        return task.result()
    finally:
        leaving.cancel()
        if not task.done() and not begun:
            task.cancel()
            await asyncio.wait({task})  # until it has put its things in order


async def _heard_out(request: Request) -> None:
    """Read and throw away what the client of a refused request still sends: closing the connection under it would be a
    reset for it, and the answer lost."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DROPPING):
            while not request.scope.get(_READ):
                request.scope[_READ] = not (await request.receive()).get("more_body", False)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """JSON in ASCII: what a policy says may hold half a character, which UTF-8 does not."""
    return Response(json.dumps(body), status, headers, media_type="application/json")


def _refused(error: Exception) -> Refused:
    if isinstance(error, Refused):
        return error
    if isinstance(error, InputError):
        return bad_request(error)
    notice(f"warning: {error}")  # it may name files of this machine, which are no agent's business
    return Refused(500, "the gateway failed at this request; its own output says why")


def _key(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    bearer = key.strip() if scheme.lower() == "bearer" else ""
    return bearer or request.headers.get("x-api-key", "")  # Anthropic's clients use either


def _worth(session: LiveSession) -> dict[str, Any]:
    return {} if session.reward is None else session.reward.to_json()


async def _missing(request: Request, error: Exception) -> Response:
    await _heard_out(request)
    status = getattr(error, "status_code", 404)
    refused = Refused(status, f"there is no {request.method} {request.url.path}; see docs/how-to/gateway.md")
    return _json(_error_in(request, refused), status)


def _error_in(request: Request, refused: Refused) -> dict[str, Any]:
    """An error in the dialect of a request; of one that is in none, as OpenAI writes it."""
    dialect = next((one for path, one in DIALECTS.items() if path in request.url.path), _OWN)
    return dialect.error(refused)


async def _defect(request: Request, error: Exception) -> Response:
    return _json(Refused(500, f"the gateway failed ({type(error).__name__})").body, 500)


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
    return _address(*bound.getsockname()[:2])


def _address(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server_of(app: ASGIApp, *, most: int) -> uvicorn.Server:
    """`most` is how many connections are served at once; further ones get HTTP 503."""
    import uvicorn

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:  # every connection is an open file
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # no log of requests: a path may hold a key
    settings: dict[str, Any] = {"access_log": False, "log_level": "warning", "timeout_graceful_shutdown": 5}
    settings |= {"backlog": _BACKLOG, "limit_concurrency": most, "timeout_keep_alive": _IDLE}
    settings["proxy_headers"] = False  # whoever is asked is this socket, whatever a header says
    return uvicorn.Server(uvicorn.Config(app, **settings))


def serve(app: ASGIApp, bound: socket.socket, *, most: int) -> None:
    """Serve `app` until the process is told to end (SIGINT, SIGTERM)."""
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn has ended in good order, and raises the signal once more
        server_of(app, most=most).run(sockets=[bound])


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
