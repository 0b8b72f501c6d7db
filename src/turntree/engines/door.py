"""What the entry points of `turntree.engines` name. Torch is imported when an engine is built."""

from __future__ import annotations

from typing import Any

from turntree.core.protocols import StreamingEngine
from turntree.engines.limits import EngineConfig, VllmConfig


def hf(policy: Any, config: EngineConfig) -> StreamingEngine:
    """`HFEngine` over the model of `policy`, which is updated in place."""
    from turntree.engines.hf import HFEngine

    return HFEngine(policy.model, policy.renderer.stop_ids, config)


def vllm(policy: Any, config: VllmConfig) -> StreamingEngine:
    """`VllmEngine` with the weights of `policy`."""
    from turntree.engines.vllm import VllmEngine

    return VllmEngine(config, policy.model, policy.tokenizer, policy.renderer.stop_ids)
