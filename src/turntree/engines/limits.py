"""How much an engine may take on at once, and the engine that is registered with these limits as options. Without
torch, so that configurations can be read without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from turntree.core import parts
from turntree.core.errors import ConfigError
from turntree.core.protocols import StreamingEngine


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The limits of `HFEngine`. The defaults suit models of up to a few hundred million parameters."""

    max_batch_rows: int = 256
    """Requests decoded at once."""
    max_prefill_tokens: int = 4096
    """Padded tokens of one prefill call."""
    max_kept_tokens: int = 2**19
    """Memory of kept sequences, in token slots (0 keeps nothing)."""
    max_context: int | None = None
    """Longest prompt plus completion, in tokens (default: the model's); a completion that reaches it is cut."""

    def __post_init__(self) -> None:
        for name in ("max_batch_rows", "max_prefill_tokens", "max_context"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{value} is too small", field=name, hint="use at least 1")
        if self.max_kept_tokens < 0:
            raise ConfigError(f"{self.max_kept_tokens} is negative", field="max_kept_tokens", hint="0 keeps nothing")


@parts.described_by(EngineConfig)
def hf(
    policy: Any,
    *,
    max_batch_rows: int = EngineConfig.max_batch_rows,
    max_prefill_tokens: int = EngineConfig.max_prefill_tokens,
    max_kept_tokens: int = EngineConfig.max_kept_tokens,
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
