"""What a server sends has the bounds of a file, and comes unpacked: a small answer cannot fill the memory."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

from turntree.core.foreign import package
from turntree.run.opening import LONGEST


def client_of(url: str, *, timeout: float, field: str, retries: int = 4, later: bool = False) -> Any:
    """A client of OpenAI's API at `url`, which is awaited if `later`. A request that fails is tried again, after
    growing pauses. Raises `InputError`, which names `field`, where the package is missing."""
    openai = package("openai", "endpoint", field)
    key = os.environ.get("OPENAI_API_KEY") or "none"  # also where it is empty
    unpacked = {"Accept-Encoding": "identity"}
    options: dict[str, Any] = {"base_url": url, "api_key": key, "timeout": timeout, "max_retries": retries}
    # a redirect would send prompts, or a request without them, to a server that nobody named
    if not later:
        http = openai.DefaultHttpxClient(follow_redirects=False, event_hooks={"response": [_bound]})
        return openai.OpenAI(default_headers=unpacked, http_client=http, **options)
    awaited = openai.DefaultAsyncHttpxClient(follow_redirects=False, event_hooks={"response": [_bound_later]})
    return openai.AsyncOpenAI(default_headers=unpacked, http_client=awaited, **options)


class TooMuch(Exception):
    """A server's answer is packed, or too long."""


def _bound(response: Any) -> None:
    """A hook of an HTTP client: its answers are bounded while they arrive. Raises `TooMuch`."""
    if (packed := response.headers.get("content-encoding", "identity")) != "identity":
        raise TooMuch(f"the answer is packed ({packed[:20]}), though it was asked for as it is")
    stream = response.stream  # a client takes only its own kind of stream: httpx has one, its successor another
    response.stream = type("Bounded", (_Bounded, type(stream)), {})(stream)


async def _bound_later(response: Any) -> None:
    """`_bound` of a client that is awaited."""
    _bound(response)


class _Bounded:
    def __init__(self, stream: Any) -> None:
        self._stream, self._seen = stream, 0

    def _counted(self, data: bytes) -> bytes:
        self._seen += len(data)
        if self._seen > LONGEST:
            raise TooMuch(f"the answer is longer than {LONGEST:,} bytes")
        return data

    def __iter__(self) -> Iterator[bytes]:
        return map(self._counted, self._stream)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for data in self._stream:
            yield self._counted(data)

    def close(self) -> None:
        self._stream.close()

    async def aclose(self) -> None:
        await self._stream.aclose()
