"""What the entry points of `turntree.engines` name. Torch is imported when an engine is built."""

from __future__ import annotations

from typing import Any

from turntree.core.errors import InputError
from turntree.core.progress import notice
from turntree.core.protocols import StreamingEngine
from turntree.engines.limits import EngineConfig, VllmConfig


def hf(policy: Any, config: EngineConfig) -> StreamingEngine:
    """Samples from the model of `policy`, which is updated in place: `HFEngine`, which shares prefixes, and
    `PlainEngine` for a model that cannot, if `policy.prefixes` leaves the choice to us."""
    from turntree.engines.hf import HFEngine
    from turntree.engines.plain import PlainEngine

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
    """`VllmEngine` with the weights of `policy`."""
    from turntree.engines.vllm import VllmEngine

    return VllmEngine(config, policy.model, policy.tokenizer, policy.renderer.stop_ids)
