"""Sampling from vLLM servers that hold the weights of the policy, and follow them through training.

The servers run in an environment of their own (`turntree serve`), so their pins never meet ours. Prompts go out as
token ids; ids and log-probabilities come back. New weights travel through a folder that the servers see too: an adapter
under a new name and path each time (the key of a server's cache, so nothing stale is found), whole weights by
`reload_weights`, after which the cache is reset.

Nothing is believed: at the start and after every change each server samples a few tokens behind a fixed prompt and
behind one that it served before, and their log-probabilities are compared with those of the policy in this process. A
stale cache, a tied head that was left behind or a server of another model shows there, and the run stops. The workers
of a run hold no weights: they are told what the servers were given (`Served`), and what the policy says to a prompt.

A server that dies or hangs loses nothing: its requests go to another one, or wait until it is back and has the current
weights again. Where none comes back in time, `poll` raises and the run can be resumed.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import shutil
import tempfile
import time
import uuid
import weakref
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from turntree.core.completion import Completion, GenerationRequest, Sampling
from turntree.core.errors import InputError, TurntreeError
from turntree.core.progress import notice
from turntree.engine.answers import Answer, AnswerReader, Choice, TooSlow, Unusable, refusal, status_of, words_of
from turntree.engine.endpoint import Server, ServerEngine
from turntree.engine.limits import VllmConfig
from turntree.engine.requests import check_idle, hashes_of_prefixes

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

AnyServer = TypeVar("AnyServer", bound=Server)

_PROBE, _PROBED = 300, 8  # tokens of a probe: more than two blocks of any cache, and sampled behind it
_LONGEST = 1024  # tokens of a served prompt that is probed
_RETRIES = 2  # of what fails, before the server is asked whether it works
_BLOCK = 16  # tokens of a block of a prompt, by which the server that has it is remembered ...
_REMEMBERED = 2**19  # ... for this many blocks: 8 million tokens, which is more than servers keep
_SPREAD, _SLACK = 2.0, 8  # a server with so many times the requests of the idlest one, and these more, is passed over
_START = "start it with `turntree serve`"


@dataclass(frozen=True)
class _Weights:
    """What was sent to the servers: an adapter of that name, or (None) whole weights."""

    folder: Path
    adapter: str | None


@dataclass(frozen=True)
class Served:
    """What the servers of a run sample from, for the engines of its workers: the weights that were sent (None: those
    that servers start with), what a server drew behind `prompt`, and the log-probability of the policy's likeliest
    token in each of these places, which hardly depends on rounding."""

    version: int
    weights: _Weights | None
    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    largest: tuple[float, ...]
    tolerance: float
    max_context: int
    mixture: tuple[int, int, int]
    known: int  # tokens of the model


class VllmServer(Server):
    """One server of a run and what is known of it: the name of the model that it was started with (`base`), the
    fingerprint of the process behind the address (`boot`), the adapters that it was sent, the oldest first (`held`),
    and a prompt that it answered (`recent`). It is not `up` from a failure until it works again and has the current
    weights; `why` says what failed.
    """

    def __init__(self, url: str, config: VllmConfig) -> None:
        super().__init__(url, concurrency=config.concurrency, timeout=config.timeout, retries=_RETRIES)
        self.base, self.boot, self.why = "", cast(Any, None), ""
        self.up = True
        self.held: list[str] = []
        self.recent: tuple[int, ...] | None = None
        self.reviving: asyncio.Task[None] | None = None

    async def meet(self) -> int | None:
        """Learn the name of its model; returns its longest context, if it says it."""
        models = await self._models()
        own = next((row for row in models if row.get("parent") is None and isinstance(row.get("id"), str)), None)
        if own is None:
            raise InputError("lists no model", path=self.url, hint=_START)
        self.model = self.base = own["id"]
        return own.get("max_model_len")

    async def _models(self) -> list[dict[str, Any]]:
        """Its model and the adapters that it has."""
        listed = await self._administer("/v1/models")
        rows = listed.get("data") if isinstance(listed, dict) else None
        return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []

    async def install(self, weights: _Weights | None, keep: float) -> None:
        """Let it sample from these weights, or (None) from those that it has, with an empty cache. Of the adapters that
        it was sent, `keep` stay."""
        if weights is not None and weights.adapter is not None:
            if self.model != weights.adapter:
                await self._load(weights.adapter, weights.folder)
                self.model = weights.adapter
                self.held = [*(name for name in self.held if name != self.model), self.model]
                while len(self.held) > keep:
                    await self._unload(self.held.pop(0))
            return
        if weights is not None:
            rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(weights.folder)}}
            await self._change("/collective_rpc", rpc, "VLLM_SERVER_DEV_MODE=1")
        answer = await self._change("/reset_prefix_cache", {}, "VLLM_SERVER_DEV_MODE=1")
        if isinstance(answer, dict) and answer.get("success") is False:
            raise TurntreeError(f"{self.url}: the server keeps its cache; it must serve this run alone")

    async def _load(self, name: str, folder: Path) -> None:
        """Load an adapter, unless the server has it: from another process, or since an answer was lost."""
        if await self._has(name):
            return
        try:
            await self._change("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, "--lora-rank R")
        except InputError:
            if not await self._has(name):
                raise

    async def _has(self, name: str) -> bool:
        return any(row.get("id") == name for row in await self._models())

    async def _unload(self, adapter: str) -> None:
        try:
            await self._administer("/v1/unload_lora_adapter", {"lora_name": adapter})
        except Exception as error:  # it does not have it
            if status_of(error) is None:
                raise

    async def _change(self, path: str, body: dict[str, Any], needs: str) -> Any:
        """Raises `InputError` where the server does not offer this."""
        try:
            return await self._administer(path, body)
        except Exception as error:
            status = status_of(error)
            if status in (404, 405):
                problem = f"the server does not take new weights (HTTP {status} for {path})"
                raise InputError(problem, path=self.url, hint=f"{_START} ({needs})") from error
            if status is not None and (status < 500 or await self.healthy()):
                problem = f"the server refuses new weights ({path}: {words_of(error)})"
                hint = "it must see the folder of the weights: name a shared one with device.engine.folder"
                raise InputError(problem, path=self.url, hint=hint) from error
            raise

    async def _administer(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON answer of a path below the server's root, None for text."""
        if body is None:
            text = await self._client.get(self.root + path, cast_to=str, options={"timeout": 30.0})
        else:
            text = await self._client.post(self.root + path, cast_to=str, body=body, options={"timeout": 600.0})
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return None

    async def answers(self, probe: dict[str, Any]) -> bool:
        """Whether the same process still samples. A broken connection alone says nothing: servers close idle ones."""
        try:
            answer = await self.ask(probe, timeout=min(30.0, self._timeout))
        except Exception:  # whatever it was: a server that works answers this
            return False
        return self.boot is None or answer.system_fingerprint == self.boot


class Router:
    """Which of several servers a prompt goes to: the one that holds most of its keys and values, unless it is busier.

    Siblings have equal prompts, and a later turn extends an earlier one. A server that has computed a prompt computes
    only the rest of one that begins alike, so prompts are remembered by blocks, as the servers' own caches do. `choose`
    opens a request at a server, which is then taken from `open` again.
    """

    def __init__(self) -> None:
        self._homes: OrderedDict[int, Server] = OrderedDict()  # by the hash of a prefix; used last at the end
        self.open: Counter[Server] = Counter()

    def choose(self, prompt: tuple[int, ...], among: Sequence[AnyServer]) -> AnyServer:
        """Where at least half of a prompt was asked for before, the server of the longest such prefix; else, and where
        that one is much busier than others, the one with the fewest requests."""
        prefixes = hashes_of_prefixes(prompt, _BLOCK)
        chosen = idlest = min(among, key=lambda server: self.open[server])
        for count in range(len(prefixes), max(1, (len(prefixes) + 1) // 2) - 1, -1):
            home = next((server for server in among if server is self._homes.get(prefixes[count - 1])), None)
            if home is not None:
                chosen = home if self.open[home] <= _SPREAD * self.open[idlest] + _SLACK else idlest
                break
        for prefix in prefixes:
            self._homes[prefix] = chosen
            self._homes.move_to_end(prefix)
        while len(self._homes) > _REMEMBERED:
            self._homes.popitem(last=False)
        self.open[chosen] += 1
        return chosen


class VllmServers(ServerEngine):
    """An engine over vLLM servers that all sample from the same weights; subclasses know what the policy says."""

    def __init__(self, config: VllmConfig, tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int]) -> None:
        servers = self._servers = tuple(VllmServer(url, config) for url in config.urls)
        super().__init__(servers, AnswerReader(tokenizer, stop_ids), 0)
        self._config, self._router = config, Router()
        self._weights: _Weights | None = None
        self._tolerance, self._keep = 0.0, math.inf  # of adapters: all stay, unless it is the engine that sends them
        self._gone_since: float | None = None

    def _knows(self, tokens: int) -> None:
        self._reader.known = self._vocabulary = max(tokens, self._reader.known)

    # weights

    async def _spread(self) -> None:
        """Bring every server to the current weights. Raises `TurntreeError` where none is left."""
        await asyncio.gather(*[self._bring(server) for server in self._servers if server.up])
        await self._some_up()

    async def _bring(self, server: VllmServer) -> None:
        try:
            await self._settle(server)
        except TurntreeError:
            raise
        except Exception as error:  # the boundary to foreign software
            if not await self._is_lost(server, error):
                raise InputError(f"takes no weights ({words_of(error)})", path=server.url, hint=_START) from error
            self._lose(server, words_of(error))

    async def _settle(self, server: VllmServer) -> None:
        """Let it have the current weights. Raises `TurntreeError` where it has others then."""
        await server.install(self._weights, self._keep)
        await self._check(server)

    # checks

    async def _check(self, server: VllmServer) -> None:
        off = await self._difference(server)
        if not off <= self._tolerance:
            raise TurntreeError(
                f"{server.url} samples from other weights than the policy's: log-probabilities differ by {off:.2g} "
                f"(tolerance {self._tolerance:g}). Its cache or its head may be stale, or it serves another model or "
                "dtype; start it again with `turntree serve` and give the same command to resume"
            )

    async def _difference(self, server: VllmServer) -> float:
        """The largest difference between the log-probabilities of the server and of the policy."""
        raise NotImplementedError

    async def _drawn(self, server: VllmServer, prompt: tuple[int, ...], temperature: float) -> Choice:
        """A few tokens behind a prompt. The server's process is known by its fingerprint from then on."""
        answer = await server.ask(self._probe(prompt, temperature), timeout=min(60.0, self._config.timeout))
        server.boot, choice = answer.system_fingerprint, answer.choice
        if choice.ids is None or not len(choice.ids) == len(choice.largest) == _PROBED:
            hint = "use vLLM"
            raise InputError("the server reports no token ids with log-probabilities", path=server.url, hint=hint)
        return choice

    def _probe(self, prompt: tuple[int, ...], temperature: float = 1.0) -> dict[str, Any]:
        """A short request behind a prompt, whose blocks the server finds in its cache as it would for any other."""
        request = GenerationRequest(prompt_ids=prompt, sampling=Sampling(temperature=temperature), seed=0)
        return {**self._fields(request), "logprobs": 1, "max_tokens": _PROBED, "stop_token_ids": []}

    # one request

    async def _complete(self, request: GenerationRequest) -> Completion:
        fields = self._fields(request)
        while True:
            server = self._router.choose(request.prompt_ids, await self._some_up())
            try:
                async with server.places:
                    answer = await self._ask(server, fields)
            finally:
                self._router.open[server] -= 1
            if answer is None:
                continue
            completion = self._reader.read(request, answer, self.policy_version, self.max_context)
            if not (self.exact and self._reader.reported):
                problem = "the server does not report the id and the log-probability of every token"
                raise InputError(problem, path=server.url, hint="use vLLM")
            server.recent = request.prompt_ids
            return completion

    async def _ask(self, server: VllmServer, fields: dict[str, Any]) -> Answer | None:
        """The server's answer; None where it went away, or another process took its place. Raises what was wrong with
        the request alone."""
        if not server.up:
            return None
        try:
            answer = await server.ask(fields)
        except Exception as error:
            if not await self._is_lost(server, error):
                raise
            return self._lose(server, words_of(error))
        if answer.model not in (None, server.model):
            raise Unusable(f"asked for the model {server.model!r}, the server answers with {answer.model!r}")
        if answer.system_fingerprint != server.boot:
            return self._lose(server, "another process answers at its address")
        return answer

    # servers that come and go

    async def _some_up(self) -> list[VllmServer]:
        """The servers that are up, once there are any. Raises `TurntreeError` when none was for too long."""
        while True:
            if up := [server for server in self._servers if server.up]:
                self._gone_since = None
                return up
            if self._gone_since is None:
                self._gone_since = time.monotonic()
            if time.monotonic() - self._gone_since > self._config.patience:
                why = "; ".join(f"{server.url}: {server.why}" for server in self._servers)
                raise TurntreeError(
                    f"no server answered for {self._config.patience:g} s ({why}); nothing is lost: start one and give "
                    "the same command again to resume"
                )
            await asyncio.sleep(0.1)

    async def _is_lost(self, server: VllmServer, error: Exception) -> bool:
        """Whether an error is that of the server and not of one request."""
        import openai

        status = status_of(error)
        if status == 404:  # it was started again, without the adapter
            return server.model != server.base
        broken = isinstance(error, openai.APIConnectionError | TooSlow) if status is None else status >= 500
        return broken and not await server.answers(self._probe((0,)))

    def _lose(self, server: VllmServer, why: str) -> None:
        """The server went away: its requests look for another one, and it is called until it is back."""
        if not server.up:
            return
        server.up, server.why, server.recent = False, why, None
        notice(f"{server.url} went away ({why}); its requests wait for it or go to another server")
        server.reviving = asyncio.ensure_future(self._revive(server))

    async def _revive(self, server: VllmServer) -> None:
        """Call the server until it has the current weights again."""
        while not server.up:
            await asyncio.sleep(min(1.0, self._config.patience / 10))
            if not await server.healthy():
                continue
            weights = self._weights
            try:
                server.model = server.base
                await self._settle(server)
            except Exception as error:  # it is not ready, or not the server that it was
                server.why = words_of(error)
                continue
            if weights is self._weights:
                server.up, self._gone_since = True, None
                notice(f"{server.url} is back, with the weights of version {self.policy_version}")


class VllmEngine(VllmServers):
    """`core.protocols.StreamingEngine` over vLLM servers that sample from the weights of `model`.

    Raises `InputError` where a server cannot be reached, and `TurntreeError` where it samples from other weights and
    does not take new ones.
    """

    def __init__(
        self, config: VllmConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int]
    ) -> None:
        from turntree.engine.routes import mixture_of  # loads torch

        super().__init__(config, tokenizer, stop_ids)
        self._policy, self._reader.mixture = model, mixture_of(model)
        self._knows(model.config.get_text_config().vocab_size)  # rows above the tokenizer's may be drawn
        exact = all(p.dtype.itemsize >= 4 for p in model.parameters() if p.is_floating_point())
        self._tolerance = (1e-3 if exact else 0.25) if config.tolerance is None else config.tolerance
        self._keep, self._sent = 1, list[_Weights]()
        self._served: Served | None = None
        try:
            self._longest = min(self._context_of(server) for server in self._servers)
            self.max_context = min(self._longest, config.max_context or self._longest)
            self._folder = _fresh_folder(config.folder)
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            self._run(self._begin()).result()
        except BaseException as error:
            self.close()
            if isinstance(error, TurntreeError) or not isinstance(error, Exception):
                raise
            raise InputError(f"cannot be sampled from ({words_of(error)})", path=config.url, hint=_START) from error

    def _context_of(self, server: VllmServer) -> int:
        try:
            longest = self._run(server.meet()).result() or self._policy.config.get_text_config().max_position_embeddings
        except InputError:
            raise
        except Exception as error:
            if status_of(error) in (401, 403) and (refused := refusal(error, server.url)) is not None:
                raise refused from error
            hint = f"{_START}, or correct device.engine.url"
            raise InputError(f"no vLLM server answers ({words_of(error)})", path=server.url, hint=hint) from error
        if type(longest) is not int or longest <= _PROBED:
            raise InputError(f"says that its context holds {longest!r} tokens", path=server.url, hint=_START)
        return longest

    def keep(self, versions: int) -> None:
        """So many versions of an adapter stay at the servers, for workers that sample from earlier ones."""
        self._keep = versions

    def served(self) -> Served:
        """For the engines of workers."""
        assert self._served is not None, "what servers sample from is known when they are checked"
        return self._served

    def update_weights(self, model: Any, policy_version: int) -> None:
        """Send the weights to every server that is up, and check them there. A server that comes back later gets them
        then."""
        check_idle(self.in_flight)
        self._policy, self.policy_version = model, policy_version
        self._write()
        self._run(self._spread()).result()
        while len(self._sent) > self._keep:
            shutil.rmtree(self._sent.pop(0).folder, ignore_errors=True)

    def _write(self) -> None:
        self._weights = _written(self._policy, self._folder)
        self._sent.append(self._weights)

    async def _begin(self) -> None:
        """Bring the servers to the policy's weights, where they do not have them from the start. Raises `InputError`
        for one that reports log-probabilities before the temperature is applied."""
        off = [await self._difference(server) for server in self._servers]
        if getattr(self._policy, "_hf_peft_config_loaded", False) or max(off) > self._tolerance:
            await asyncio.to_thread(self._write)
            for server in self._servers:
                await server.install(self._weights, self._keep)
        for server in self._servers:
            await self._check(server)
            if await self._difference(server, 0.5) > 2 * self._tolerance:
                problem = "reports log-probabilities before the temperature is applied"
                hint = "start it with --logprobs-mode processed_logprobs (`turntree serve` does)"
                raise InputError(problem, path=server.url, hint=hint)

    async def _difference(self, server: VllmServer, temperature: float = 1.0) -> float:
        from turntree.engine.compatibility import score  # loads torch
        from turntree.engine.routes import replayed, routes_of

        worst, room = 0.0, self._longest - _PROBED
        draw = random.Random(0)
        fixed = tuple(draw.randrange(self._reader.vocabulary) for _ in range(min(_PROBE, room)))
        for number, prompt in enumerate((fixed, server.recent)):
            if prompt is None:
                continue
            prompt = prompt[: min(room, _LONGEST)]
            choice = await self._drawn(server, prompt, temperature)
            ids, statistics = self._reader.tokens(choice)
            routes = routes_of(self._policy, self._reader.routes(choice, len(prompt) + len(ids) - 1))
            with replayed(routes):
                scored, largest = await asyncio.to_thread(score, self._policy, prompt, ids, temperature)
            worst = max(worst, _largest([theirs for theirs, _ in statistics], scored))
            if not number and temperature == 1.0:
                told = self._weights, prompt, tuple(ids), tuple(largest), self._tolerance, self.max_context
                self._served = Served(self.policy_version, *told, self._reader.mixture, self._reader.known)
        return worst


class VllmFollower(VllmServers):
    """The engine of a worker: it holds no weights, and samples from what another process gave to the servers. One that
    is away when a worker begins is waited for, and one that was started again gets the weights here, too."""

    _served: Served

    def update_weights(self, model: Any, policy_version: int) -> None:
        """Of a `Served`, once each server was seen to have it."""
        check_idle(self.in_flight)
        self._served, self._weights, self.policy_version = model, model.weights, policy_version
        self._tolerance, self.max_context, self._reader.mixture = model.tolerance, model.max_context, model.mixture
        self._knows(model.known)
        self._run(self._spread()).result()

    async def _settle(self, server: VllmServer) -> None:
        if not server.base:
            await server.meet()
        server.model = (self._weights and self._weights.adapter) or server.base
        try:
            if await self._difference(server) <= self._tolerance:
                return
        except Exception as error:  # it does not have the adapter
            if status_of(error) != 404:
                raise
        server.model = server.base
        try:
            await server.install(self._weights, self._keep)
        except InputError:
            raise
        except TurntreeError:  # another worker was first, and samples from them already
            pass
        await self._check(server)

    async def _difference(self, server: VllmServer) -> float:
        """As far as the same tokens are drawn."""
        choice, served = await self._drawn(server, self._served.prompt, 1.0), self._served
        pairs = zip(self._reader.tokens(choice)[0], served.ids, strict=True)
        places = 1 + next((place for place, (theirs, ours) in enumerate(pairs) if theirs != ours), _PROBED - 1)
        return _largest(choice.largest[:places], served.largest[:places])


def _largest(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """The largest difference; infinity where one is no number."""
    off = [abs(one - other) for one, other in zip(theirs, ours, strict=True)]
    return max(each if each >= 0 else math.inf for each in off)


def _written(model: PreTrainedModel, above: Path) -> _Weights:
    """The weights in a new folder, as vLLM reads them. A tied head is written too, for servers that hold it apart."""
    from safetensors.torch import save_file

    from turntree.engine.checkpoint import share, write_weights
    from turntree.engine.tokenizer import quiet

    name = f"turntree-{uuid.uuid4().hex[:12]}"
    folder = above / name
    folder.mkdir()
    with quiet():
        write_weights(model, folder)
    if getattr(model, "_hf_peft_config_loaded", False):
        return _Weights(folder, name)
    if getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        head: Any = model.get_output_embeddings()
        save_file({"lm_head.weight": head.weight.detach().cpu().clone()}, folder / "tied.safetensors")
        share(folder)
    return _Weights(folder, None)


def _fresh_folder(above: str | None) -> Path:
    """A folder for weights on their way, which any server may read."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="turntree-weights-", dir=above)).absolute()
    except OSError as error:
        raise InputError(error.strerror or str(error), path=above, field="device.engine.folder") from error
    folder.chmod(0o755)
    return folder
