"""A policy on a server of Tinker's API (Thinking Machines' service, SkyRL): the session with it, the adapter that is
trained there, and the engine that samples from it. No torch: all tensors are the server's.

The SDK repeats every request whose answer is lost, and a server need not notice (SkyRL's does not): a repeated
`forward_backward` adds its gradient twice, a repeated `optim_step` steps twice. So a request that changes the adapter
is sent once (`_once_only`). Where its fate is unknown the run ends, and resumes from the last saved state.
"""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import importlib
import importlib.util
import io
import math
import os
import tarfile
import uuid
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from turntree.core import seeds
from turntree.core.completion import Completion, Finished, GenerationRequest
from turntree.core.errors import ConfigError, InputError, TurntreeError, first_line
from turntree.core.foreign import package
from turntree.engine.answers import NEVER
from turntree.engine.limits import TinkerConfig
from turntree.engine.requests import RemoteEngine, check_idle, cost_of

_OLDEST = (0, 19)  # of the SDK
_SEED_BITS = 2**31 - 1  # what every server takes
_CHANGING = ("forward_backward", "optim_step")  # requests that may not be repeated
_SENT_BEFORE = 422  # a status that the SDK does not try again
ALPHA = 32  # of every adapter: the API has no word for another
_RESUME = "nothing is lost or counted twice: give the same command again to resume from the last checkpoint"


class TinkerSession:
    """The session with a server, for one base model. `max_context` is what the server says of it, where it does."""

    def __init__(self, config: TinkerConfig, names: Sequence[str]) -> None:
        """`names` are what the base may be called. Raises `InputError` where no server answers, where it has none of
        them, and for an SDK that is missing or too old."""
        self.config, self.sdk = config, _sdk()
        self.url = config.url or os.environ.get("TINKER_BASE_URL") or "tinker"
        self._service = self._opened()
        self.base_model, self.max_context = self._known(names)

    def close(self) -> None:
        """End the session, so that the server can let go of its adapters."""
        self._service.holder.close()

    def _opened(self) -> Any:
        import httpx

        own = self.url != "tinker"
        try:
            if own:  # the SDK would try for minutes
                httpx.get(f"{self.url.rstrip('/')}/api/v1/healthz", timeout=10.0).raise_for_status()
            key = {} if os.environ.get("TINKER_API_KEY") or not own else {"api_key": "tml-none"}
            address = {"base_url": self.url} if own else {}
            return self.sdk.ServiceClient(http_client=_once_only(), **address, **key)
        except Exception as error:  # the boundary to foreign software
            hint = "start it, or correct device.carrier.url" if own else "set TINKER_API_KEY"
            raise InputError(f"no Tinker server answers ({first_line(error)})", path=self.url, hint=hint) from error

    def _known(self, names: Sequence[str]) -> tuple[str, int | None]:
        found = self._service.get_server_capabilities().supported_models
        served = {model.model_name: model.max_context_length for model in found}
        for name in names:
            if name in served:
                return name, served[name]
        listed = ", ".join(sorted(map(str, served)))
        hint = f"it has {listed}: choose one with --model, or name it with --set device.carrier.base_model=NAME"
        raise InputError(f"does not serve {names[0]!r}", path=self.url, field="model", hint=hint)

    def sampler(self, path: str | None = None) -> Any:
        """Samples from saved weights (tinker://...), or from the base."""
        of = {"base_model": self.base_model} if path is None else {"model_path": path}
        return self.guarded(self._service.create_sampling_client, **of)

    def trained(self, rank: int) -> Any:
        """The SDK's client of a fresh adapter of the base, which leaves its distribution as it is."""
        seed = seeds.derive(0, "lora") & _SEED_BITS
        create = self._service.create_lora_training_client
        return self.guarded(create, self.base_model, rank=rank, seed=seed, train_unembed=False)

    def fetch(self, path: str, folder: Path) -> None:
        """Write a saved adapter (tinker://.../sampler_weights/...) into a folder, in PEFT's format."""
        import httpx

        run, _, saved = path.removeprefix("tinker://").partition("/")
        archives = self._service.create_rest_client()
        if "/" in saved:
            found = self.guarded(archives.get_checkpoint_archive_url_from_tinker_path, path)
        else:  # SkyRL, which names samplers' weights in short, and their archives too
            found = self.guarded(archives.get_checkpoint_archive_url, run, saved)
        try:
            answer = httpx.get(found.url, timeout=self.config.timeout, follow_redirects=True).raise_for_status()
            with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
                archive.extractall(folder, filter="data")
        except Exception as error:  # the boundary to foreign software
            raise InputError(f"cannot be fetched ({first_line(error)})", path=path) from error

    def guarded(self, call: Any, *arguments: Any, **named: Any) -> Any:
        """What a call of the SDK gives, its future awaited. Raises `TurntreeError`, naming the server, where it does
        not."""
        try:
            found = call(*arguments, **named)
            return found.result(timeout=self.config.timeout) if hasattr(found, "result") else found
        except Exception as error:  # the boundary to foreign software
            raise self.failure(error) from error

    def failure(self, error: BaseException) -> TurntreeError:
        """What became of a request, in one line."""
        if isinstance(error, TimeoutError | concurrent.futures.TimeoutError):
            return TurntreeError(f"{self.url}: no answer in {self.config.timeout:g} s; {_RESUME}")
        if "UnicodeDecodeError" in str(error) or getattr(error, "status_code", None) == 415:
            found = self.sdk.__version__
            hint = "install the version that the server's makers name (SkyRL 0.3: pip install 'tinker==0.19.0')"
            return InputError(f"does not understand version {found} of the package tinker", path=self.url, hint=hint)
        status = getattr(error, "status_code", None)
        if status in (400, 401, 403, 404, 422):
            return InputError(f"refuses ({first_line(error)})", path=self.url)
        return TurntreeError(f"{self.url}: {first_line(error)}; {_RESUME}")


class TinkerAdapter:
    """The adapter that is trained on the server, which makes it when it is first used. `start` are the saved weights
    that it begins with (tinker://...); without them it is a fresh one."""

    def __init__(self, session: TinkerSession, rank: int, start: str | None = None) -> None:
        self.session, self.rank, self._start = session, rank, start

    @functools.cached_property
    def _client(self) -> Any:
        client = self.session.trained(self.rank)
        if self._start is not None:
            self.session.guarded(client.load_state, self._start)
        return client

    def forward_backward(self, data: Sequence[Any], loss: str, config: dict[str, float] | None = None) -> Any:
        """Add the gradient of `data` (Datum) to that of the next step. Raises `TurntreeError`, also where it was sent
        and what became of it is not known."""
        return self._changed("forward_backward", list(data), loss, config)

    def step(self, **adam: float) -> dict[str, float]:
        """One step of AdamW on the gradient so far (`AdamParams`); the server's metrics. Raises as above."""
        return self._changed("optim_step", self.session.sdk.types.AdamParams(**adam)).metrics or {}

    def _changed(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._client, name)(*arguments).result(timeout=self.session.config.timeout)
        except Exception as error:  # the boundary to foreign software
            failure = self.session.failure(error)
            if isinstance(failure, InputError) and getattr(error, "status_code", None) != _SENT_BEFORE:
                raise failure from error
            problem = f"what became of a {name} is not known ({first_line(error)})"
            raise TurntreeError(f"{self.session.url}: {problem}; {_RESUME}") from error

    def save(self, name: str) -> str:
        """Save weights and moments; their address on the server. `name` is unique in it."""
        return self.session.guarded(self._client.save_state, f"{name}-{uuid.uuid4().hex[:8]}").path

    def load(self, path: str) -> None:
        """Take saved weights with their moments. Raises `InputError` where the server has them no more."""
        try:
            self.session.guarded(self._client.load_state_with_optimizer, path)
        except InputError as error:
            hint = "start the server with the folder and database of its checkpoints, or pass --overwrite"
            problem = f"the server does not have {path} ({error.problem})"
            raise InputError(problem, path=self.session.url, hint=hint) from error

    def sampler(self, path: str) -> Any:
        """Samples from saved weights, which are those that this adapter begins with. SkyRL samples only from what it
        trained since it was started; it is asked for one token, and else these weights are loaded and published."""
        sampler, types = self.session.sampler(path), self.session.sdk.types
        one = types.SamplingParams(max_tokens=1, temperature=1.0, seed=0)
        try:
            asked = sampler.sample(prompt=types.ModelInput.from_ints([0]), num_samples=1, sampling_params=one)
            asked.result(timeout=self.session.config.timeout)
        except Exception as error:  # the boundary to foreign software
            if "not loaded" not in str(error):
                raise self.session.failure(error) from error
            return self.publish()
        return sampler

    def publish(self) -> Any:
        """The sampler of the weights of now."""
        return self.session.guarded(self._client.save_weights_and_get_sampling_client)

    def save_for_sampling(self, name: str) -> str:
        """Save the weights for samplers; their address on the server."""
        saved = f"{name}-{uuid.uuid4().hex[:8]}"
        return self.session.guarded(self._client.save_weights_for_sampler, saved).path


class TinkerEngine(RemoteEngine):
    """An engine over a Tinker server. The server reports the log-probability of each sampled
    token and no entropy; as such stands minus that log-probability, which is the entropy on average. Its caches are its
    own, so every position of a prompt counts as prefilled.

    A request that gets no answer ends the run, which can be resumed: no rollout is censored for a server that is gone.
    """

    def __init__(
        self, session: TinkerSession, sampler: Any, stop_ids: Collection[int], vocabulary: int, max_context: int
    ) -> None:
        super().__init__(stop_ids, vocabulary, max_context, session.config.timeout)
        self._session, self._sampler = session, sampler

    def update_weights(self, model: TinkerAdapter, policy_version: int) -> None:
        check_idle(self.in_flight)
        self._sampler = model.publish()
        self.policy_version = policy_version

    def _send(self, request: GenerationRequest) -> Any:
        types, sampling = self._session.sdk.types, request.sampling
        settings = types.SamplingParams(
            max_tokens=request.longest(self.max_context),
            temperature=sampling.temperature,
            top_p=1.0,
            top_k=-1,
            seed=request.seed & _SEED_BITS,
            stop=sorted(self.stop_ids),
        )
        prompt = types.ModelInput.from_ints(list(request.prompt_ids))
        return self._sampler.sample(prompt=prompt, num_samples=1, sampling_params=settings)

    def _silence(self) -> TurntreeError:
        return self._session.failure(TimeoutError())

    def _finished(self, ticket: int, request: GenerationRequest, answer: Any, seconds: float) -> Finished:
        try:
            (sequence,) = answer.result().sequences
        except Exception as error:  # the boundary to foreign software
            raise self._session.failure(error) from error
        tokens, logprobs = list(sequence.tokens), sequence.logprobs
        if logprobs is None or not tokens or max(tokens) >= self._vocabulary:
            problem = "gives a completion without tokens, without log-probabilities or with tokens of another model"
            raise InputError(problem, path=self._session.url)
        asked = request.longest(self.max_context)
        stopped = tokens[-1] in self.stop_ids
        if len(tokens) > asked or not self.stop_ids.isdisjoint(tokens[:-1]) or len(logprobs) != len(tokens):
            raise InputError(f"gives other tokens than those of one turn of up to {asked}", path=self._session.url)
        if not stopped and len(tokens) < asked:  # it would be a turn that the policy left unfinished
            problem = f"ends an answer after {len(tokens)} of {asked} tokens: it has a limit of its own"
            raise InputError(problem, path=self._session.url)
        if not all(logprob is not None and NEVER < logprob <= 1e-3 for logprob in logprobs):
            raise InputError("gives log-probabilities that no sampled token has", path=self._session.url)
        logprobs = [min(0.0, logprob) for logprob in logprobs]
        if sequence.stop_reason == "stop" and not stopped:
            raise InputError("leaves out the token that ends a turn, which is trained on", path=self._session.url)
        completion = Completion(
            token_ids=tuple(tokens),
            logprobs=tuple(logprobs),
            entropies=tuple(min(max(0.0, -logprob), math.log(self._vocabulary)) for logprob in logprobs),
            finish="stop" if stopped else "length",
            policy_version=self.policy_version,
            cost=cost_of(request, decoded=len(tokens), prefilled=len(request.prompt_ids), seconds=seconds),
        )
        return Finished(ticket=ticket, completion=completion)


def _sdk() -> Any:
    """The package tinker. Raises `InputError` where it is missing or too old."""
    sdk = package("tinker", "tinker", "device.carrier")
    found = str(sdk.__version__)
    if tuple(int(part) for part in found.split(".")[:2]) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        problem = f"needs version {oldest} of the package tinker or a newer one, and {found} is here"
        raise ConfigError(problem, field="device.carrier", hint=f"pip install 'tinker>={oldest}'")
    return sdk


def _once_only() -> Any:
    """An HTTP client that sends a request which changes the adapter once, whatever the SDK wants to repeat: only one
    that was certainly not received may be sent again. The SDK numbers its requests, so no two have the same body."""
    import httpx

    class Once(httpx.AsyncHTTPTransport):
        def __init__(self) -> None:
            http2 = importlib.util.find_spec("h2") is not None  # the SDK brings it
            super().__init__(http2=http2, limits=httpx.Limits(max_connections=1000, max_keepalive_connections=20))
            self._sent = set[bytes]()

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if Path(request.url.path).name not in _CHANGING:
                return await super().handle_async_request(request)
            key = hashlib.blake2b(request.url.path.encode() + await request.aread()).digest()
            if key in self._sent:
                told = {"detail": "not sent again: its first answer was lost"}
                return httpx.Response(_SENT_BEFORE, json=told, request=request)
            self._sent.add(key)
            try:
                answer = await super().handle_async_request(request)
            except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout):
                self._sent.discard(key)
                raise
            if answer.status_code == 429:  # it was refused
                self._sent.discard(key)
            return answer

    return httpx.AsyncClient(transport=Once(), follow_redirects=False)
