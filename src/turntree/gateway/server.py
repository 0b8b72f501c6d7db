"""The HTTP side of a gateway, on Starlette.

Agents: `POST /v1/chat/completions`, `POST /v1/responses`, `GET /v1/models`, also below `/s/SESSION`.
Those who run them: `POST /sessions`, `GET /sessions/ID`, `POST /sessions/ID/reward`, `POST /sessions/ID/close`,
`GET /status`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from turntree.core.errors import InputError, TurntreeError
from turntree.core.progress import notice
from turntree.gateway.chat import chunks, completion_body, flag, read_chat
from turntree.gateway.config import Refused, bad_request
from turntree.gateway.lineage import Kept
from turntree.gateway.responses import events, read_responses, response_body
from turntree.gateway.rewards import only, read_reward
from turntree.gateway.sessions import Ask, LiveSession, Sessions, digest
from turntree.observe.jsonl import parse_object

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]

_ALIVE = 10.0  # seconds between two signs of life in a stream that waits for its answer
_SWEEP = 5.0  # seconds between two looks for sessions that took too long
_SMALL = 2**16  # bytes of a request that is read in the event loop; a larger one is read beside it
_MOST_VALUES = 2**17  # in the JSON of a request
_VALUE = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[{\[,]')
_SESSION = "x-turntree-session"


class Gateway:
    """The application of `sessions`. `admin_key` opens and rewards sessions; `model` is the name that is served."""

    def __init__(self, sessions: Sessions, *, model: str, admin_key: str) -> None:
        self.sessions, self.model, self._admin = sessions, _public(model), digest(admin_key)
        agents = [
            Route("/v1/chat/completions", self._guarded(self.chat), methods=["POST"]),
            Route("/v1/responses", self._guarded(self.responses), methods=["POST"]),
            Route("/v1/models", self._guarded(self.models), methods=["GET"]),
            Route("/v1/models/{model:path}", self._guarded(self.models), methods=["GET"]),
        ]
        below = [Route("/s/{session}" + one.path, one.endpoint, methods=list(one.methods or ())) for one in agents]
        admin = [
            Route("/sessions", self._guarded(self.open), methods=["POST"]),
            Route("/sessions/{session}", self._guarded(self.look), methods=["GET"]),
            Route("/sessions/{session}/reward", self._guarded(self.reward), methods=["POST"]),
            Route("/sessions/{session}/close", self._guarded(self.close), methods=["POST"]),
            Route("/status", self._guarded(self.status), methods=["GET"]),
        ]
        handlers: Any = {404: _missing, 405: _missing, 500: _defect}
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

    async def chat(self, request: Request) -> Response:
        session, body = self._asking(request), await self._body(request)
        asked, logprobs, options = read_chat(body), flag(body, "logprobs"), body.get("stream_options") or {}
        if not isinstance(options, dict):
            raise Refused(400, "is not an object", param="stream_options")
        usage = flag(options, "include_usage")
        if not flag(body, "stream"):
            calls = await _unless_gone(request, self.sessions.ask(session, asked))
            return _json(completion_body(calls, self.model, logprobs=logprobs))

        def lines(calls: Sequence[Kept]) -> Iterator[str]:
            for chunk in chunks(calls, self.model, with_usage=usage, logprobs=logprobs):
                yield f"data: {json.dumps(chunk)}\n\n"

        return await self._streamed(request, session, asked, lines, "data: [DONE]\n\n")

    async def responses(self, request: Request) -> Response:
        session, body = self._asking(request), await self._body(request)
        asked = read_responses(body, lambda name: next((one for one in session.calls if one.call_id == name), None))
        if not flag(body, "stream"):
            calls = await _unless_gone(request, self.sessions.ask(session, asked))
            return _json(response_body(calls[0], self.model))

        def lines(calls: Sequence[Kept]) -> Iterator[str]:
            for event in events(calls, self.model):
                yield f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"

        return await self._streamed(request, session, asked, lines, "")

    async def _streamed(
        self,
        request: Request,
        session: LiveSession,
        asked: Ask,
        lines: Callable[[Sequence[Kept]], Iterator[str]],
        last: str,
    ) -> Response:
        """A stream. What fails before its first sign of life is due has an HTTP status: an error inside a stream is not
        tried again by any client."""
        task = asyncio.create_task(self.sessions.ask(session, asked))
        leaving = asyncio.create_task(_left(request))
        try:
            await asyncio.wait({task, leaving}, timeout=_ALIVE, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                _result(task)
        except BaseException:
            leaving.cancel()
            await _cancelled(task)
            raise

        async def streamed() -> AsyncIterator[str]:
            try:
                while not task.done() and not leaving.done():
                    done, _ = await asyncio.wait({task, leaving}, timeout=_ALIVE, return_when=asyncio.FIRST_COMPLETED)
                    if not done:
                        yield ": the answer is being sampled\n\n"
                if task.done():
                    for line in lines(_result(task)):
                        yield line
            except TurntreeError as error:
                yield f"data: {json.dumps(_refused(error).body)}\n\n"
            finally:
                leaving.cancel()
                await _cancelled(task)
            yield last

        return StreamingResponse(streamed(), media_type="text/event-stream", headers={"cache-control": "no-cache"})

    async def models(self, request: Request) -> Response:
        self._asking(request)
        asked = request.path_params.get("model")  # every name is served
        served = {"id": asked or self.model, "object": "model", "created": 0, "owned_by": "turntree"}
        return _json(served if asked else {"object": "list", "data": [served]})

    # those who run them

    async def open(self, request: Request) -> Response:
        self._check_admin(request)
        body = only(await self._body(request), "task", "session", "seed", "sample", "meta")
        task, name, meta = body.get("task", "task"), body.get("session"), body.get("meta", {})
        seed, sample = body.get("seed"), body.get("sample", 0)
        if not isinstance(task, str) or not isinstance(meta, dict) or not isinstance(name, str | None):
            raise Refused(400, "task and session are texts, meta is an object")
        if any(type(number) is not int or not 0 <= number < 2**63 for number in (0 if seed is None else seed, sample)):
            raise Refused(400, "seed and sample are whole numbers of at least 0")
        opened, keys = self.sessions.open(task, seed=seed, sample=sample, session_id=name, meta=meta)
        base = _reached(request)
        places = {"base_url": f"{base}/v1", "reward_url": f"{base}/sessions/{opened.session_id}/reward"}
        named = {"session": opened.session_id, "task": task, "key": keys["ask"], "reward_key": keys["reward"]}
        return _json({**named, **places}, 201)

    async def look(self, request: Request) -> Response:
        self._check_admin(request)
        session = self.sessions.get(request.path_params["session"])
        calls = [
            {"id": kept.call_id, "index": kept.index, "cause": kept.cause, "status": kept.status, **_tokens(kept)}
            for kept in session.calls
        ]
        head = {"session": session.session_id, "task": session.task_id, "tokens": session.tokens}
        return _json({**head, "calls": calls, "running": len(session.running), **session.reward})

    async def reward(self, request: Request) -> Response:
        """The reward ends the session. The same one may be posted again: the answer to the first may have been lost."""
        name = request.path_params["session"]
        session = self.sessions.find(_key(request), name, use="reward", admin=self._is_admin(request))
        known = {*(kept.call_id for kept in session.calls), *session.reward.get("call_rewards", ())}
        self.sessions.reward(session, read_reward(await self._body(request), known))
        await self.sessions.close(session)
        return _json({"session": name, **session.reward})

    async def close(self, request: Request) -> Response:
        self._check_admin(request)
        session = self.sessions.get(request.path_params["session"])
        reason = only(await self._body(request), "reason").get("reason", "closed without a reward")
        await self.sessions.close(session, str(reason)[:1000])
        return _json({"session": session.session_id})

    async def status(self, request: Request) -> Response:
        self._check_admin(request)
        return _json({"open": len(self.sessions), **self.sessions.ledger})

    # what they share

    def _guarded(self, handler: Handler) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        async def guarded(request: Request) -> Response:
            try:
                return await handler(request)
            except TurntreeError as error:
                refused = _refused(error)
                self.sessions.ledger[f"refused_{refused.status}"] += 1
                headers = {"retry-after": "1"} if refused.status in (429, 503) else None
                return _json(refused.body, refused.status, headers)
            except _Gone:
                self.sessions.ledger["hung_up"] += 1
                return Response(status_code=499)

        return guarded

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
        limits = self.sessions.config.limits
        try:
            async with asyncio.timeout(limits.body_seconds):
                data = bytearray()
                async for part in request.stream():
                    data += part
                    if len(data) > limits.body_bytes:
                        raise Refused(413, f"the request has more than {limits.body_bytes} bytes", code="too_large")
        except TimeoutError:
            raise Refused(408, f"the request took longer than {limits.body_seconds:g} seconds to arrive") from None
        except ClientDisconnect as error:
            raise _Gone from error
        given = bytes(data) or b"{}"
        return parse_object(given) if len(given) <= _SMALL else await asyncio.to_thread(_read, given)


def _read(data: bytes) -> dict[str, Any]:
    """A large object. Python's reader lets no other thread work, so what it would read is counted first. Raises
    `Refused`."""
    at_most = sum(map(data.count, (b"{", b"[", b",")))  # those in texts included
    if at_most > _MOST_VALUES < sum(not found[0].startswith(b'"') for found in _VALUE.finditer(data)):
        raise Refused(413, f"the request has more than {_MOST_VALUES:,} values", code="too_large")
    return parse_object(data)


class _Gone(Exception):
    """The client hung up."""


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client hangs up."""
    task = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(request))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _Gone
        return _result(task)
    finally:
        leaving.cancel()
        await _cancelled(task)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _result(task: asyncio.Task[T]) -> T:
    if task.cancelled():
        raise Refused(403, "the session was ended", code="session_over")
    return task.result()


async def _cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel a task where it is under way, and wait until it has put its things in order."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})


def _json(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """JSON in ASCII: what a policy says may hold half a character, which UTF-8 does not."""
    return Response(json.dumps(body), status, headers, media_type="application/json")


def _refused(error: TurntreeError) -> Refused:
    if isinstance(error, Refused):
        return error
    if isinstance(error, InputError):
        return bad_request(error)
    notice(f"warning: {error}")  # it may name files of this machine, which are no agent's business
    return Refused(500, "the gateway failed at this request; its own output says why")


def _key(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _public(model: str) -> str:
    """The name of a model in answers: of a folder its last part, because where it lies is nobody's business."""
    local = model.startswith(("/", ".", "~")) or Path(model).exists()
    return (Path(model).name or "policy") if local else model


def _reached(request: Request) -> str:
    """The address at which a request arrived, by its socket. The Host header is the word of a client or a proxy, and
    keys are sent to what is answered here."""
    host, port = request.scope["server"]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _tokens(kept: Kept) -> dict[str, Any]:
    sampled = 0 if kept.completion is None else len(kept.completion.token_ids)
    return {"prompt_tokens": kept.prompt_tokens, "new_tokens": len(kept.added_ids), "sampled_tokens": sampled}


async def _missing(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    refused = Refused(status, f"there is no {request.method} {request.url.path}; see docs/how-to/gateway.md")
    return _json(refused.body, status)


async def _defect(request: Request, error: Exception) -> Response:
    return _json(Refused(500, f"the gateway failed ({type(error).__name__})").body, 500)
