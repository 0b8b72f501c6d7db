"""A gateway in front of a server of others: everything passes through unchanged, conversations become traces."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from turntree.core.errors import InputError
from turntree.gateway.config import Refused
from turntree.gateway.traces import TraceWriter, answers_in
from turntree.observe.jsonl import parse_object

_MOST = 32_000_000  # bytes of a request; of an answer that is traced (a larger one passes through)
_FLUSH = 5.0  # seconds between two looks for conversations that nobody continues
_HOP = frozenset(  # belongs to one connection, or would hide the answer from us
    {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "proxy-authorization", "host"}
    | {"proxy-authenticate", "content-length", "accept-encoding", "x-turntree-session"}
)
_METHODS = ["GET", "POST", "DELETE", "PUT", "PATCH"]


class Upstream:
    """The application. `url` is the base of the other server's API (`https://host/v1`)."""

    def __init__(self, url: str, writer: TraceWriter, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise InputError(f"{url!r} is not a URL", field="upstream.url", hint="write https://host/v1")
        self._url, self.writer = url.rstrip("/"), writer
        limits = httpx.Limits(max_connections=None)  # whoever asks has a connection here, and needs one there
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(600, connect=30), limits=limits, transport=transport)
        self._tracer = ThreadPoolExecutor(1, thread_name_prefix="turntree-traces")  # in nobody's way, one by one
        paths = ("/v1/{path:path}", "/s/{session}/v1/{path:path}")
        self.app = Starlette(
            routes=[Route(path, self.forward, methods=_METHODS) for path in paths], lifespan=self._lifespan
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        async def flush() -> None:
            while True:
                await asyncio.sleep(_FLUSH)
                await asyncio.get_running_loop().run_in_executor(self._tracer, self.writer.flush)

        task = asyncio.create_task(flush())
        yield
        task.cancel()
        await asyncio.to_thread(self._tracer.shutdown)
        self.writer.flush(everything=True)
        await self._client.aclose()

    async def forward(self, request: Request) -> Response:
        path = request.path_params["path"]
        if any(part in ("..", ".") for part in path.split("/")):
            return _error(400, "the path leaves the API")
        data = bytearray()
        async for part in request.stream():
            data += part
            if len(data) > _MOST:
                return _error(413, f"the request has more than {_MOST:,} bytes")
        asked = self._client.build_request(
            request.method,
            f"{self._url}/{path}",
            params=str(request.query_params),
            headers={**_passed(request.headers), "accept-encoding": "identity"},
            content=bytes(data),
        )
        try:
            response = await self._client.send(asked, stream=True)
        except httpx.HTTPError as error:
            self.writer.counts["unreachable"] += 1
            return _error(502, f"the server behind the gateway does not answer ({type(error).__name__})")
        traced = path == "chat/completions" and response.status_code == 200
        if not traced:
            self.writer.counts[f"passed: {response.status_code}"] += 1
        session = request.path_params.get("session") or request.headers.get("x-turntree-session", "")
        relay = self._relay(response, session.partition(".")[0], bytes(data) if traced else None)
        return StreamingResponse(relay, response.status_code, _passed(response.headers))

    async def _relay(self, response: httpx.Response, session: str, asked: bytes | None) -> AsyncIterator[bytes]:
        """The answer as it comes; once it is whole, its trace."""
        seen, whole = bytearray(), False
        try:
            async for part in response.aiter_raw():
                if asked is not None and len(seen) <= _MOST:
                    seen += part
                yield part
            whole = True
        finally:
            await response.aclose()
            if asked is not None and (not whole or len(seen) > _MOST):
                self.writer.counts["not traced: the answer was cut off" if not whole else "not traced: too large"] += 1
        if asked is not None and len(seen) <= _MOST:
            tracing = (self._trace, session, asked, bytes(seen), response)
            await asyncio.get_running_loop().run_in_executor(self._tracer, *tracing)

    def _trace(self, session: str, asked: bytes, answered: bytes, response: httpx.Response) -> None:
        try:
            streamed = "event-stream" in response.headers.get("content-type", "")
            self.writer.call(session, parse_object(asked), answers_in(answered, streamed=streamed))
        except (InputError, KeyError, TypeError, AttributeError) as error:  # foreign data: counted, never in the way
            self.writer.counts[f"not traced: {type(error).__name__}"] += 1


def _passed(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _HOP}


def _error(status: int, message: str) -> Response:
    body: dict[str, Any] = Refused(status, message).body
    return JSONResponse(body, status)
