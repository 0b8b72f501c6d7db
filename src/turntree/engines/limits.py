"""The settings of the registered engines: how much `hf` may take on at once, and the servers of `vllm`. Without torch,
so that configurations can be read without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from turntree.core import parts
from turntree.core.config import at_least
from turntree.core.errors import ConfigError
from turntree.core.protocols import StreamingEngine


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The limits of `HFEngine`. The defaults suit models of up to a few hundred million parameters."""

    max_batch_rows: int = 256
    """Requests decoded at once."""
    max_prefill_tokens: int = 4096
    """Padded tokens of one prefill call."""
    max_kept_tokens: int | None = None
    """Memory of kept sequences, in token slots (0 keeps nothing; default: as many as take 4 GiB, at most 524,288)."""
    max_context: int | None = None
    """Longest prompt plus completion, in tokens (default: the model's); a completion that reaches it is cut."""

    def __post_init__(self) -> None:
        at_least(self, max_batch_rows=1, max_prefill_tokens=1, max_context=1, max_kept_tokens=0)


@parts.described_by(EngineConfig)
def hf(
    policy: Any,
    *,
    max_batch_rows: int = EngineConfig.max_batch_rows,
    max_prefill_tokens: int = EngineConfig.max_prefill_tokens,
    max_kept_tokens: int | None = EngineConfig.max_kept_tokens,
    max_context: int | None = EngineConfig.max_context,
) -> StreamingEngine:
    """`HFEngine` over the model of `policy`, which is updated in place (entry point `hf` of `turntree.engines`)."""
    from turntree.engines.hf import HFEngine

    limits = EngineConfig(
        max_batch_rows=max_batch_rows,
        max_prefill_tokens=max_prefill_tokens,
        max_kept_tokens=max_kept_tokens,
        max_context=max_context,
    )
    return HFEngine(policy.model, policy.renderer.stop_ids, limits)


@dataclass(frozen=True, kw_only=True)
class VllmConfig:
    """The servers of the engine `vllm`, which `turntree serve` starts; a key, if they need one, is OPENAI_API_KEY."""

    url: str
    """The address of the vLLM server (http://host:8000), or several, separated by commas; all serve the same model."""
    folder: str | None = None
    """A folder that the servers see under the same path: new weights pass through it (default: a temporary one)."""
    concurrency: int = 64
    """Requests in flight at one server; others wait."""
    timeout: float = 600.0
    """Seconds after which a request counts as failed."""
    patience: float = 600.0
    """Seconds to wait for a server that went away. Then the run stops and can be resumed."""
    tolerance: float | None = None
    """Most by which log-probabilities of server and trainer may differ after a change of weights. Default: 0.001 for
    float32 weights, 0.25 for others."""
    top_logprobs: int = 5
    """Log-probabilities asked for at each token; entropies are estimated from them."""
    max_context: int | None = None
    """Longest prompt plus completion, in tokens (default: the server's)."""

    def __post_init__(self) -> None:
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ConfigError(f"{url!r} is not a URL", field="engine.url", hint="write http://host:port")
        if len(set(self.urls)) < len(self.urls):
            raise ConfigError("names a server twice", field="engine.url")
        if min(self.concurrency, self.top_logprobs) < 1 or min(self.timeout, self.patience) <= 0:
            raise ConfigError("impossible settings", field="engine", hint="concurrency >= 1, timeout and patience > 0")
        at_least(self, "engine.", max_context=1, tolerance=0)

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(url.strip().rstrip("/") for url in self.url.split(","))


@parts.described_by(VllmConfig)
def vllm(
    policy: Any,
    *,
    url: str,
    folder: str | None = VllmConfig.folder,
    concurrency: int = VllmConfig.concurrency,
    timeout: float = VllmConfig.timeout,
    patience: float = VllmConfig.patience,
    tolerance: float | None = VllmConfig.tolerance,
    top_logprobs: int = VllmConfig.top_logprobs,
    max_context: int | None = VllmConfig.max_context,
) -> StreamingEngine:
    """`VllmEngine` with the weights of `policy` (entry point `vllm` of `turntree.engines`)."""
    config = VllmConfig(
        url=url,
        folder=folder,
        concurrency=concurrency,
        timeout=timeout,
        patience=patience,
        tolerance=tolerance,
        top_logprobs=top_logprobs,
        max_context=max_context,
    )
    from turntree.engines.vllm import VllmEngine

    return VllmEngine(config, policy.model, policy.tokenizer, policy.renderer.stop_ids)
