"""Engines over a server that speaks OpenAI's completions API with prompts of token ids.

`ServerEngine` is what they share: requests that come and go in a thread of their own, and the faults of single ones.
`EndpointEngine` samples from a server whose weights it does not know (`profile --endpoint`). vLLM is such a server
(tested against it). `transformers serve` is not: it refuses prompts of token ids and unknown fields. Other servers must
accept token ids, `stop_token_ids` and `return_token_ids`. `engine.vllm` also sends weights.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import weakref
from collections.abc import Collection, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from turntree.core.completion import Completion, Finished, GenerationRequest
from turntree.core.errors import ConfigError, InputError, TurntreeError
from turntree.core.progress import notice
from turntree.engine.answers import (
    TOP_LOGPROBS,
    Answer,
    AnswerReader,
    TooSlow,
    answer_of,
    one_line,
    refusal,
    status_of,
    words_of,
)
from turntree.engine.hub import context_of
from turntree.engine.limits import EndpointConfig
from turntree.engine.requests import RemoteEngine, check_idle
from turntree.run.received import client_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UNKNOWN_LENGTH = 10**7  # tokenizers that do not know their model's context say a huge number
_MOST_WARNINGS = 5  # a server may answer with any number of names
_SEED_BITS = 2**31 - 1  # what every server takes


class Server:
    """One server of OpenAI's completions API: its connection, its places and its state.

    `url` is the base of its API; /v1 is added where it has no path. `model` is the name under which its weights are
    asked for, and `places` bound the requests at it. What fails is tried again `retries` times by OpenAI's client,
    after the pause that the server asks for."""

    def __init__(self, url: str, model: str = "", *, concurrency: int, timeout: float, retries: int = 0) -> None:
        self.url = api_of(url)
        self.root, self.model = self.url.removesuffix("/v1"), model
        self.places = asyncio.Semaphore(concurrency)
        self._timeout = timeout
        self._client = client_of(self.url, timeout=timeout, field="endpoint", retries=retries, later=True)

    async def ask(self, fields: dict[str, Any], timeout: float | None = None) -> Answer:
        """The answer to one completion request of `model`. Raises `Unusable` where it is none, and `TooSlow` where it
        is not whole in time, retries included."""
        limit, body = timeout or self._timeout, {"model": self.model, **fields}
        try:
            async with asyncio.timeout(limit):
                return answer_of(await self._client.post("/completions", cast_to=str, body=body))
        except TimeoutError as error:
            raise TooSlow(f"no whole answer in {limit:g} s") from error

    async def healthy(self) -> bool:
        """Whether it answers /health with success."""
        try:
            await self._client.get(f"{self.root}/health", cast_to=str, options={"timeout": 10.0, "max_retries": 0})
        except Exception as error:  # whatever kept it from answering
            return status_of(error) == 404  # a server without that path answered
        return True

    async def close(self) -> None:
        await self._client.close()


def api_of(url: str) -> str:
    """The base of a server's API: /v1 where the URL has no path."""
    url = url.rstrip("/")
    return url if url.count("/") > 2 else f"{url}/v1"


class ServerEngine(RemoteEngine):
    """An engine over servers; subclasses say how one request is completed. Use it as a context manager, or `close` it.

    A request that fails after its retries is a fault of that request; `generate`, which cannot return faults, raises
    `TurntreeError` then. HTTP 400 and 413 (too long) are faults of one request too. Errors that would hit every request
    (an unknown model, key or field: HTTP 401, 404, 422) are not retried: `generate` and `poll` raise `InputError` with
    the server's message, and nothing is in flight any more.
    """

    def __init__(self, servers: Sequence[Server], reader: AnswerReader, max_context: int) -> None:
        super().__init__(reader.stop_ids, reader.known, max_context)
        self._servers, self._reader, self.where = tuple(servers), reader, servers[0].url
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="turntree-servers", daemon=True)
        thread.start()
        self._close = weakref.finalize(self, _end, self._loop, thread, self._servers)  # also when the process ends

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is in flight and close the connections."""
        for ticket in list(self._open):
            self.cancel(ticket)
        self._close()

    @property
    def exact(self) -> bool:
        """Whether all sampled ids came from the server so far."""
        return self._reader.exact

    # one request

    def _send(self, request: GenerationRequest) -> Future[Completion]:
        return self._run(self._complete(request))

    def _finished(
        self, ticket: int, request: GenerationRequest, answer: Future[Completion], seconds: float
    ) -> Finished:
        try:
            completion = answer.result()
        except TurntreeError:  # no request can be answered any more
            raise
        except Exception as error:  # the boundary to foreign software: whatever it was, there is no completion
            if (refused := refusal(error, self._servers[0].url)) is not None:
                raise refused from error
            return Finished(ticket=ticket, fault=words_of(error))
        self._reader.check_vocabulary(completion, self._servers[0].model)
        cost = dataclasses.replace(completion.cost, engine_seconds=seconds)
        return Finished(ticket=ticket, completion=dataclasses.replace(completion, cost=cost))

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _complete(self, request: GenerationRequest) -> Completion:
        raise NotImplementedError

    def _fields(self, request: GenerationRequest) -> dict[str, Any]:
        """The body of a request, without its model."""
        sampling, guide = request.sampling, request.guide
        grammar = None if guide is None else guide.grammar
        return {
            **({"stop": list(guide.stop), "include_stop_str_in_output": True} if guide and guide.stop else {}),
            **({"structured_outputs": dict(grammar)} if grammar else {}),
            "prompt": list(request.prompt_ids),
            "max_tokens": request.longest(self.max_context),
            "temperature": sampling.temperature,
            # what is left out, the generation_config.json of the model decides
            "top_p": 1.0,
            "top_k": -1,  # all
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": request.seed & _SEED_BITS,
            "logprobs": TOP_LOGPROBS,
            "stop_token_ids": sorted(self.stop_ids),
            "ignore_eos": True,  # the renderer's stop tokens end a turn, as in training, and no others
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
        }


class EndpointEngine(ServerEngine):
    """Samples from the model that a server knows by the name `model`."""

    def __init__(
        self, config: EndpointConfig, model: str, tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int]
    ) -> None:
        settings = {"concurrency": config.concurrency, "timeout": config.timeout, "retries": config.retries}
        self._server, self._warned = Server(config.url, model, **settings), set[str]()
        reader = AnswerReader(tokenizer, stop_ids)
        super().__init__([self._server], reader, config.max_context or _context_of(tokenizer, Path(config.tokenizer)))
        self.identity = f"endpoint:{model}"

    def update_weights(self, model: Any, policy_version: int) -> None:
        """With None: another trainer has put them on the server. Raises `TurntreeError` for weights of this process."""
        if model is not None:
            raise TurntreeError("a completions server cannot take new weights: it can be profiled, but not trained")
        check_idle(self.in_flight)
        self.policy_version = policy_version

    async def _complete(self, request: GenerationRequest) -> Completion:
        async with self._server.places:
            answer = await self._server.ask({**self._fields(request), "return_token_ids": True})
        completion = self._reader.read(request, answer, self.policy_version, self.max_context)
        if answer.model not in (None, asked := self._server.model):
            self._warn_once(f"asked for the model {asked!r}, it answers with {one_line(repr(answer.model))}")
        if self.policy_version and not (self.exact and self._reader.reported):  # its weights change: it is trained
            hint = "train with a vLLM server"
            raise InputError("gives no token ids or log-probabilities to train on", path=self._server.url, hint=hint)
        if not self.exact:
            self._warn_once("gives text and no ids of tokens: read an action in it, but train on none of it")
        elif not self._reader.reported:
            self._warn_once("does not report the log-probability of every token; the others count as certain (0)")
        return completion

    def _warn_once(self, what: str) -> None:
        if what not in self._warned and len(self._warned) < _MOST_WARNINGS:
            self._warned.add(what)
            notice(f"warning: {self._server.url} {what}")


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread, servers: Iterable[Server]) -> None:
    """Stop the thread of an engine, whatever it is doing."""

    async def finish() -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for server in servers:
            await server.close()

    asyncio.run_coroutine_threadsafe(finish(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def _context_of(tokenizer: PreTrainedTokenizerBase, folder: Path) -> int:
    """The context length of the tokenizer, else that of the model configuration beside it."""
    length = int(min(tokenizer.model_max_length, _UNKNOWN_LENGTH))
    if length == _UNKNOWN_LENGTH and (folder / "config.json").is_file():
        length = context_of(folder) or _UNKNOWN_LENGTH
    if length == _UNKNOWN_LENGTH:
        problem = "neither the tokenizer nor a config.json beside it says how long the context is"
        hint = "give the context length of the server, e.g. --set endpoint.max_context=32768"
        raise ConfigError(problem, field="endpoint.max_context", hint=hint)
    return length
