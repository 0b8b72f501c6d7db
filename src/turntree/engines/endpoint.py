"""Completions from a server that speaks OpenAI's completions API with prompts of token ids.

vLLM does (tested against it). `transformers serve` does not: it refuses prompts of token ids and unknown fields. Other
servers must accept token ids, `stop_token_ids` and `return_token_ids`. The sampled ids come from the server where it
reports them (`return_token_ids`, or tokens written as "token_id:123"). Other servers return only text, which is
tokenised here: good enough to read an action, but not to train on, so `exact` is then False. Log-probabilities are
those that the server reports (at a temperature other than 1 many servers report them before the temperature is
applied). Entropies are *estimates*: the middle of the range that the reported top log-probabilities allow
(`entropy_bounds`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import json
import math
import os
import threading
import time
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from turntree.core.completion import Completion, Finished, GenerationRequest
from turntree.core.cost import NO_COST, Cost
from turntree.core.errors import ConfigError, InputError, TurntreeError
from turntree.engines.requests import check_idle, check_requests, cost_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UNKNOWN_LENGTH = 10**7  # tokenizers that do not know their model's context say a huge number
_SEED_BITS = 2**31 - 1  # what every server takes


@dataclass(frozen=True, kw_only=True)
class EndpointConfig:
    """A server that speaks OpenAI's completions API; a key, where one is needed, is OPENAI_API_KEY."""

    url: str
    """Sample from this server of --model, such as vLLM: the base of its API (http://host:8000/v1)."""
    tokenizer: str
    """With --endpoint: the tokenizer of the served model, a folder or a name on the Hub."""
    max_context: int = 0
    """Longest prompt plus completion, in tokens (0: what the tokenizer's folder says)."""
    concurrency: int = 32
    """Requests in flight."""
    retries: int = 3
    """How often a failed request is repeated, with growing pauses."""
    timeout: float = 120.0
    """Seconds of one try."""
    top_logprobs: int = 5
    """Log-probabilities asked for at each token; entropies are estimated from them."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"{self.url!r} is not a URL", field="endpoint", hint="write http://host:port/v1")
        if self.concurrency < 1 or self.retries < 0 or self.timeout <= 0 or self.top_logprobs < 1:
            raise ConfigError("impossible endpoint settings", field="endpoint", hint="concurrency >= 1, timeout > 0")


def connection_free(config: EndpointConfig | None) -> dict[str, Any] | None:
    """The settings that decide the completions, without how the server is reached."""
    return None if config is None else {"tokenizer": config.tokenizer, "max_context": config.max_context}


class EndpointEngine:
    """`core.protocols.StreamingEngine` over a server. Use it as a context manager, or `close` it.

    A request that fails after its retries is a fault of that request; `generate`, which cannot return faults, raises
    `TurntreeError` then. HTTP 400 and 413 (too long) are faults of one request too. Errors that would hit every request
    (an unknown model, key or field: HTTP 401, 404, 422) are not retried: `generate` and `poll` raise `InputError` with
    the server's message, and nothing is in flight any more.
    """

    def __init__(
        self, config: EndpointConfig, model: str, tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int]
    ) -> None:
        try:
            import openai
        except ImportError as error:
            hint = "pip install 'turntree[endpoint]'"
            raise InputError("needs the openai package", field="endpoint", hint=hint) from error
        self.stop_ids = frozenset(stop_ids)
        self.identity = f"endpoint:{model}"
        self.exact = True
        self.max_context = config.max_context or _context_of(tokenizer, Path(config.tokenizer))
        self._config, self._model, self._tokenizer, self._vocabulary = config, model, tokenizer, len(tokenizer)
        self._known = max(tokenizer.get_vocab().values()) + 1
        self._version, self._next = 0, 0
        self._open: dict[int, concurrent.futures.Future[Completion]] = {}
        self._client = openai.AsyncOpenAI(
            base_url=config.url,
            api_key=os.environ.get("OPENAI_API_KEY", "none"),
            timeout=config.timeout,
            max_retries=config.retries,
        )
        self._loop = asyncio.new_event_loop()
        self._places = asyncio.Semaphore(config.concurrency)
        self._thread = threading.Thread(target=self._loop.run_forever, name="turntree-endpoint", daemon=True)
        self._thread.start()

    def __enter__(self) -> EndpointEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is in flight and close the connections."""
        for ticket in list(self._open):
            self.cancel(ticket)
        self._run(self._client.close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # the protocol

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def in_flight(self) -> int:
        return len(self._open)

    def update_weights(self, model: Any, policy_version: int) -> None:
        raise TurntreeError("a completions server cannot take new weights: it can be profiled, but not trained")

    def weights_changed(self, policy_version: int) -> None:
        """The server now serves other weights (the engine does not put them there)."""
        check_idle(self.in_flight)
        self._version = policy_version

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        check_requests(requests, vocab_size=self._vocabulary, max_context=self.max_context)
        tickets = [self.submit(request) for request in requests]
        concurrent.futures.wait([self._open[ticket] for ticket in tickets])
        finished = self._collect(tickets, 0.0)
        completions = [done.completion for done in finished if done.completion is not None]
        if len(completions) < len(finished):
            fault = next(done.fault for done in finished if done.fault is not None)
            raise TurntreeError(f"{self._config.url}: {fault}")
        return completions

    def submit(self, request: GenerationRequest) -> int:
        check_requests([request], vocab_size=self._vocabulary, max_context=self.max_context)
        ticket, self._next = self._next, self._next + 1
        self._open[ticket] = self._run(self._complete(request))
        return ticket

    def cancel(self, ticket: int) -> Cost:
        """The cost at the server is not known and counts as zero."""
        if ticket in self._open:
            self._open.pop(ticket).cancel()
        return NO_COST

    def poll(self, timeout: float | None = None) -> list[Finished]:
        started = time.perf_counter()
        concurrent.futures.wait(list(self._open.values()), timeout, concurrent.futures.FIRST_COMPLETED)
        done = [ticket for ticket, future in self._open.items() if future.done()]
        seconds = (time.perf_counter() - started) / max(1, len(done))  # waiting is shared by those that it was for
        return self._collect(done, seconds)

    def _collect(self, tickets: Sequence[int], seconds: float) -> list[Finished]:
        try:
            return [self._finished(ticket, self._open.pop(ticket), seconds) for ticket in tickets]
        except InputError:
            for ticket in list(self._open):
                self.cancel(ticket)
            raise

    def _finished(self, ticket: int, future: concurrent.futures.Future[Completion], seconds: float) -> Finished:
        try:
            completion = future.result()
        except Exception as error:  # the boundary to foreign software: whatever it was, there is no completion
            if (status := _refused(error)) is not None:
                problem = f"the server refuses the request (HTTP {status}: {_words_of(error)})"
                raise InputError(problem, path=self._config.url, hint=_ADVICE.get(status, _CHECK)) from error
            return Finished(ticket=ticket, fault=_one_line(f"{type(error).__name__}: {_words_of(error)}"))
        self._check_vocabulary(completion)
        cost = dataclasses.replace(completion.cost, engine_seconds=seconds)
        return Finished(ticket=ticket, completion=dataclasses.replace(completion, cost=cost))

    def _check_vocabulary(self, completion: Completion) -> None:
        """Raise `ConfigError` for a token that the tokenizer does not know: then the tokenizer belongs to another model
        and decodes the server's tokens wrongly."""
        largest = max(completion.token_ids)
        if largest >= self._known:
            raise ConfigError(
                f"knows {self._known:,} tokens, and the server answers with token {largest:,}",
                field="endpoint.tokenizer",
                hint=f"name the folder with the tokenizer of {self._model!r} (--tokenizer)",
            )

    # one request

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _complete(self, request: GenerationRequest) -> Completion:
        sampling = request.sampling
        extensions: dict[str, Any] = {
            "stop_token_ids": sorted(self.stop_ids),
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
            **({"top_k": sampling.top_k} if sampling.top_k else {}),
        }
        async with self._places:
            answer = await self._client.completions.create(
                model=self._model,
                prompt=list(request.prompt_ids),
                max_tokens=min(sampling.max_tokens, self.max_context - len(request.prompt_ids)),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                seed=request.seed & _SEED_BITS,
                logprobs=self._config.top_logprobs,
                extra_body=extensions,
            )
        return self._read(request, answer.to_dict())

    def _read(self, request: GenerationRequest, answer: Mapping[str, Any]) -> Completion:
        choice = (answer.get("choices") or [{}])[0]
        reason = choice.get("finish_reason")
        if reason not in ("stop", "length"):
            raise _Unusable(f"the server ended with {reason!r}, which is neither 'stop' nor 'length'")
        ids, statistics = self._tokens(choice)
        end = next((place for place, token in enumerate(ids) if token in self.stop_ids), None)
        if end is not None:
            ids, statistics = ids[: end + 1], statistics[: end + 1]
        elif reason == "stop":  # a server that keeps the stop token to itself
            ids, statistics = [*ids, self._stop_id(choice)], [*statistics, _unreported(self._vocabulary)]
        if not ids:
            raise _Unusable("the server sampled nothing")
        finish: Literal["stop", "length"] = "stop" if ids[-1] in self.stop_ids else "length"
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        prefilled = len(request.prompt_ids) - min(len(request.prompt_ids), details.get("cached_tokens") or 0)
        return Completion(
            token_ids=tuple(ids),
            logprobs=tuple(logprob for logprob, _ in statistics),
            entropies=tuple(entropy for _, entropy in statistics),
            finish=finish,
            policy_version=self._version,
            cost=cost_of(request, decoded=len(ids), prefilled=prefilled),
        )

    def _tokens(self, choice: Mapping[str, Any]) -> tuple[list[int], list[tuple[float, float]]]:
        """The sampled ids with (log-probability, entropy) each."""
        reported = choice.get("logprobs") or {}
        names: list[str] = reported.get("tokens") or []
        ids: list[int] | None = choice.get("token_ids")
        if ids is None and names and all(name.startswith("token_id:") for name in names):
            ids = [int(name.removeprefix("token_id:")) for name in names]
        if ids is None:
            self.exact = False
            ids = list(self._tokenizer.encode(choice.get("text") or "", add_special_tokens=False))
        logprobs: list[float | None] = reported.get("token_logprobs") or []
        tops: list[Mapping[str, float] | None] = reported.get("top_logprobs") or []
        if len(logprobs) != len(ids):  # text that is cut into other tokens here than there
            return ids, [_unreported(self._vocabulary)] * len(ids)
        tops = [*tops, *[None] * (len(ids) - len(tops))]
        return ids, [self._statistics(logprob, top) for logprob, top in zip(logprobs, tops, strict=False)]

    def _statistics(self, logprob: float | None, top: Mapping[str, float] | None) -> tuple[float, float]:
        if logprob is None:
            return _unreported(self._vocabulary)
        low, high = entropy_bounds(
            sorted((top or {}).values(), reverse=True)[: self._config.top_logprobs], self._vocabulary
        )
        return min(0.0, logprob), (low + high) / 2

    def _stop_id(self, choice: Mapping[str, Any]) -> int:
        for candidate in (choice.get("stop_reason"), self._tokenizer.eos_token_id):
            if isinstance(candidate, int) and candidate in self.stop_ids:
                return candidate
        return min(self.stop_ids)


class _Unusable(Exception):
    """An answer that is not a completion."""


# of 4xx, those of one request alone (it is too long for the server), and those that another time may end well
_ONE_REQUEST, _PASSING = (400, 413), (408, 409, 425, 429)
_KEY = "set OPENAI_API_KEY to a key that it takes"
_CHECK = "use a server that takes prompts of token ids and vLLM's fields (vLLM does, `transformers serve` does not)"
_ADVICE = {
    401: _KEY,
    403: _KEY,
    404: "check the URL (most end in /v1) and --model, which is the name that the server gives the model",
}


def _refused(error: Exception) -> int | None:
    """The HTTP status if it means that the server refuses every request of this run; else None."""
    status = getattr(error, "status_code", None)
    lasting = isinstance(status, int) and 400 <= status < 500 and status not in (*_ONE_REQUEST, *_PASSING)
    return status if lasting else None


def _words_of(error: Exception) -> str:
    """The error message of the server, else that of the connection."""
    body: Any = getattr(error, "body", None)
    if isinstance(body, Mapping):
        row = cast("Mapping[str, Any]", body)
        body = next((row[name] for name in ("message", "detail", "error") if row.get(name)), row)
    if body:
        said = body if isinstance(body, str) else json.dumps(body, default=str)
        return _one_line(f"{getattr(error, 'status_code', '')} {said}" if _refused(error) is None else said)
    cause = f" ({type(error.__cause__).__name__}: {error.__cause__})" if error.__cause__ is not None else ""
    return _one_line(f"{error}{cause}")


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 300 else f"{text[:299]}…"


def entropy_bounds(top_logprobs: Sequence[float], vocabulary: int) -> tuple[float, float]:
    """The least and the largest entropy (nats) of a distribution over `vocabulary` tokens with these largest
    log-probabilities.

    The entropy is least where the remaining mass lies in as few tokens as possible, none likelier than the least of the
    given ones, and largest where it is spread evenly over all other tokens. Without any given: (0, log vocabulary).

    >>> entropy_bounds([math.log(0.5), math.log(0.5)], 100) == (math.log(2), math.log(2))
    True
    """
    if not top_logprobs:
        return 0.0, math.log(vocabulary)
    largest = [math.exp(min(0.0, logprob)) for logprob in top_logprobs]
    known, rest, others = _entropy(largest), max(0.0, 1 - math.fsum(largest)), vocabulary - len(largest)
    cap = min(largest)
    if rest < 1e-9 or others <= 0 or cap == 0.0:
        return known, known
    full = int(rest / cap)
    low = known + full * _entropy([cap]) + _entropy([max(0.0, rest - full * cap)])
    return low, max(low, known + rest * math.log(others / rest))


def _entropy(probabilities: Sequence[float]) -> float:
    return -math.fsum(p * math.log(p) for p in probabilities if p > 0)


def _unreported(vocabulary: int) -> tuple[float, float]:
    """For a token without reported statistics: log-probability 0, and the middle of the possible entropies."""
    return 0.0, math.log(vocabulary) / 2


def _context_of(tokenizer: PreTrainedTokenizerBase, folder: Path) -> int:
    """The context length of the tokenizer, else that of the model configuration beside it."""
    length = int(min(tokenizer.model_max_length, _UNKNOWN_LENGTH))
    if length == _UNKNOWN_LENGTH and (folder / "config.json").is_file():
        length = int(json.loads((folder / "config.json").read_text()).get("max_position_embeddings", _UNKNOWN_LENGTH))
    if length == _UNKNOWN_LENGTH:
        raise ConfigError(
            "neither the tokenizer nor a config.json beside it says how long the context is",
            field="endpoint.max_context",
            hint="give the context length of the server, e.g. --set endpoint.max_context=32768",
        )
    return length
