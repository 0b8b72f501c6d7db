"""The registered engines: their settings (how much `hf` may take on at once, the servers of `vllm`), and what builds
them. Torch is imported when an engine is built, so that configurations can be read without it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from turntree.core.config import FIXED, Above0, Amount, Bounded, Count, Positive, require_url
from turntree.core.cost import Cost
from turntree.core.errors import ConfigError, InputError
from turntree.core.progress import notice
from turntree.core.protocols import StreamingEngine

Prefixes = Literal["auto", "shared", "repeated"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Bounded):
    """The limits of the engine `hf`. The defaults suit models of up to a few hundred million parameters."""

    max_batch_rows: Positive = 256
    """Requests decoded at once."""
    max_prefill_tokens: int = field(default=4096, metadata=FIXED)
    """Padded tokens of one prefill call."""
    max_context: Positive | None = None
    """Longest prompt plus completion, in tokens (default: the model's); a completion that reaches it is cut."""


@dataclass(frozen=True, kw_only=True)
class VllmConfig(Bounded):
    """The servers of the engine `vllm`, which `turntree serve` starts; a key, if they need one, is OPENAI_API_KEY."""

    url: str
    """The address of the vLLM server (http://host:8000), or several, separated by commas; all serve the same model."""
    folder: str | None = None
    """A folder that the servers see under the same path: new weights pass through it (default: a temporary one)."""
    concurrency: Positive = 64
    """Requests in flight at one server; others wait."""
    timeout: Above0 = 600.0
    """Seconds after which a request counts as failed, retries included."""
    patience: Above0 = 600.0
    """Seconds to wait for a server that went away. Then the run stops and can be resumed."""
    tolerance: Amount | None = None
    """Most by which log-probabilities of server and trainer may differ after a change of weights. Default: 0.001 for
    float32 weights, 0.25 for others."""
    max_context: Positive | None = None
    """Longest prompt plus completion, in tokens (default: the server's)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for url in self.urls:
            require_url(url, "engine.url", "write http://host:port")
        if len(set(self.urls)) < len(self.urls):
            raise ConfigError("names a server twice", field="engine.url")

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(url.strip().rstrip("/") for url in self.url.split(","))


@dataclass(frozen=True, kw_only=True)
class EndpointConfig(Bounded):
    """A server that speaks OpenAI's completions API; a key, where one is needed, is OPENAI_API_KEY."""

    url: str
    """Sample from this server of --model, such as vLLM: the base of its API (http://host:8000/v1)."""
    tokenizer: str
    """With --endpoint: the tokenizer of the served model, a folder or a name on the Hub."""
    max_context: Count = 0
    """Longest prompt plus completion, in tokens (0: what the tokenizer's folder says)."""
    concurrency: Positive = 32
    """Requests in flight."""
    retries: Count = 3
    """How often a failed request is repeated, with growing pauses."""
    timeout: Above0 = 120.0
    """Seconds after which a request counts as failed, retries included."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_url(self.url, "endpoint")


@dataclass(frozen=True, kw_only=True)
class Prices(Bounded):
    """What a server's tokens cost, in a currency of the user, for a million of them."""

    prefill: Amount = 0.0
    """Tokens of prompts."""
    sample: Amount = 0.0
    """Sampled tokens."""
    train: Amount = 0.0
    """Tokens of rows that are trained on, in every pass."""

    def bill(self, cost: Cost) -> dict[str, float]:
        """What a cost comes to: each kind of token and their total. Tokens that are scored are prompts."""
        parts = {
            "prefill": self.prefill * (cost.prefilled_tokens + cost.scored_tokens) / 1e6,
            "sample": self.sample * cost.decoded_tokens / 1e6,
            "train": self.train * cost.trained_tokens / 1e6,
        }
        return {**parts, "total": sum(parts.values())}


@dataclass(frozen=True, kw_only=True)
class TinkerConfig(Bounded):
    """A server of Tinker's API, which samples and trains; its key is TINKER_API_KEY."""

    url: str | None = None
    """The address of the server (default: TINKER_BASE_URL, else the service of Thinking Machines)."""
    base_model: str | None = None
    """The name by which the server knows the base of --model (default: that of --model)."""
    timeout: Above0 = 600.0
    """Seconds after which a request without an answer ends the run, which can be resumed."""
    prices: Prices = field(default_factory=Prices)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.url is not None:
            require_url(self.url, "url", "write http://host:port")


def hf(policy: Any, config: EngineConfig) -> StreamingEngine:
    """Samples from the model of `policy`, which is updated in place: `HFEngine`, which shares prefixes, and
    `PlainEngine` for a model that cannot, if `policy.prefixes` leaves the choice to us."""
    from turntree.engine.hf import HFEngine
    from turntree.engine.plain import PlainEngine

    if policy.prefixes != "repeated":
        try:
            return HFEngine(policy.model, policy.renderer.stop_ids, config)
        except InputError as error:
            if policy.prefixes == "shared":
                raise
            advice = f" (device.engine.max_context: {error.hint})" if error.field == "max_context" else ""
            notice(f"sampling prefills every turn's prompt as a whole: {error.problem}{advice}")
    return PlainEngine(policy.model, policy.renderer.stop_ids, config)


def vllm(policy: Any, config: VllmConfig) -> StreamingEngine:
    """`VllmEngine` with the weights of `policy`, `VllmFollower` for one that has none."""
    from turntree.engine.vllm import VllmEngine, VllmFollower

    if policy.model is None:
        return VllmFollower(config, policy.tokenizer, policy.renderer.stop_ids)
    return VllmEngine(config, policy.model, policy.tokenizer, policy.renderer.stop_ids)
