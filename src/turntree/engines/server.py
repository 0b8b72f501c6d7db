"""One server of OpenAI's completions API, such as vLLM: its connection, its places and its state."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any, cast

from turntree.core.errors import InputError
from turntree.engines.answers import Unusable, one_line, pause_before, status_of


class Server:
    """`url` is the base of its API; /v1 is added where it has no path. `model` is the name under which its weights are
    asked for, `places` bound the requests at it, and `up` is False from a failure until it is seen to work again."""

    def __init__(self, url: str, model: str = "", *, concurrency: int, timeout: float, retries: int = 0) -> None:
        try:
            import openai

            from turntree.observe.received import UNPACKED, bound_later
        except ImportError as error:
            hint = "pip install 'turntree[endpoint]'"
            raise InputError("needs the openai package", field="endpoint", hint=hint) from error
        self.url = url.rstrip("/") if url.rstrip("/").count("/") > 2 else f"{url.rstrip('/')}/v1"
        self.model = model
        self.places = asyncio.Semaphore(concurrency)
        self.up = True
        self._root = self.url.removesuffix("/v1")
        self._timeout, self._retries = timeout, retries
        self._client = openai.AsyncOpenAI(
            base_url=self.url,
            api_key=os.environ.get("OPENAI_API_KEY") or "none",  # also where it is empty
            timeout=timeout,
            max_retries=0,
            # a redirect would send prompts, or a request without them, to a server that nobody named
            default_headers=UNPACKED,
            http_client=openai.DefaultAsyncHttpxClient(follow_redirects=False, event_hooks={"response": [bound_later]}),
        )

    async def ask(self, fields: dict[str, Any], timeout: float | None = None) -> dict[str, Any]:
        """The answer to one completion request of `model`, which is tried again where that may help."""
        tries = 0
        while True:
            try:
                return await self._ask(fields, self._timeout if timeout is None else timeout)
            except Exception as error:
                tries += 1
                wait = pause_before(error, tries)
                if tries > self._retries or wait is None:
                    raise
            await asyncio.sleep(wait)

    async def _ask(self, fields: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Raises `Unusable` where the answer is no JSON object, and where it arrives piece by piece and is not whole in
        time: the client's own time-out is of one wait for bytes, and comes first where there are none."""
        limit = 2 * timeout
        try:
            async with asyncio.timeout(limit):
                answer = _json(await self._post("/completions", {"model": self.model, **fields}, timeout))
        except TimeoutError as error:
            raise Unusable(f"no whole answer in {limit:g} s") from error
        if not isinstance(answer, dict):
            raise Unusable("the answer is no JSON object: this is not a completions API")
        return cast("dict[str, Any]", answer)

    async def post(self, path: str, body: dict[str, Any] | None = None, timeout: float = 600.0) -> Any:
        """Administration: the JSON answer of a path below the server's root, None for text. Not tried again."""
        return _json_or_none(await self._post(self._root + path, body, timeout))

    async def get(self, path: str, timeout: float = 30.0) -> Any:
        options: Any = {"timeout": timeout}
        return _json_or_none(await self._client.get(self._root + path, cast_to=str, options=options))

    async def healthy(self, timeout: float = 10.0) -> bool:
        """Whether it answers /health with success."""
        try:
            await self.get("/health", timeout)
        except Exception as error:  # whatever kept it from answering
            return status_of(error) == 404  # a server without that path answered
        return True

    async def close(self) -> None:
        await self._client.close()

    async def _post(self, path: str, body: Any, timeout: float) -> str:
        options: Any = {"timeout": timeout}
        return await self._client.post(path, cast_to=str, body=body, options=options)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise Unusable("the answer is nested too deeply to read") from error
    except ValueError as error:
        begins = f"no complete JSON: it begins with {one_line(text[:60])!r}" if text.strip() else "empty"
        raise Unusable(f"the answer is {begins}") from error


def _json_or_none(text: str) -> Any:
    try:
        return _json(text)
    except Unusable:
        return None
