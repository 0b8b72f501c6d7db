"""What a server sends has the bounds of a file, and comes unpacked: a small answer cannot fill the memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from turntree.run.opening import LONGEST

UNPACKED = {"Accept-Encoding": "identity"}  # a header of every request


class TooMuch(Exception):
    """A server's answer is packed, or too long."""


def bound(response: Any) -> None:
    """A hook of an HTTP client: its answers are bounded while they arrive. Raises `TooMuch`."""
    if (packed := response.headers.get("content-encoding", "identity")) != "identity":
        raise TooMuch(f"the answer is packed ({packed[:20]}), though it was asked for as it is")
    stream = response.stream  # a client takes only its own kind of stream: httpx has one, its successor another
    response.stream = type("Bounded", (_Bounded, type(stream)), {})(stream)


async def bound_later(response: Any) -> None:
    """`bound` of a client that is awaited."""
    bound(response)


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
