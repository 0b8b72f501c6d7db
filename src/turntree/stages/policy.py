"""Load a policy with everything that speaks for it: weights, tokenizer, renderer, engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from turntree.core.errors import ConfigError
from turntree.engines.checkpoint import load_model, load_tokenizer, policy_hash
from turntree.engines.hf import HFEngine
from turntree.renderers.template import ChatRenderer

EMBEDDED = Path(__file__).resolve().parents[1] / "models" / "household_tiny"


@dataclass(frozen=True)
class Device:
    """Where and how to compute. One thread is the vetted setting for tiny models: on two threads the barriers of a
    small matrix product cost more than the product (measured: up to a hundred times)."""

    name: str = "cpu"
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    threads: int = 1

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ConfigError("must be at least 1", field="threads")

    def check_trainable(self) -> None:
        """Raise `ConfigError` unless the weights can hold a small update: near 0.02 a bfloat16 weight moves in steps
        of 1e-4, so that AdamW at the usual learning rates changes nothing."""
        if self.dtype != "float32":
            raise ConfigError(
                f"{self.dtype!r} weights round small updates away", field="device.dtype", hint="train in float32"
            )


@dataclass(frozen=True)
class Policy:
    """`hash` names the exact weights: a profile records it, training refuses another."""

    source: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    renderer: ChatRenderer
    engine: HFEngine
    hash: str


def resolve(source: str) -> Path:
    """The folder of a policy; "default" is the embedded one."""
    return EMBEDDED if source == "default" else Path(source)


def load_policy(source: str, device: Device) -> Policy:
    """Raises `InputError` in one line when the folder, its weights or its chat template are missing."""
    import torch

    torch.set_num_threads(device.threads)
    folder = resolve(source)
    tokenizer = load_tokenizer(folder)
    model = load_model(folder, dtype=device.dtype, device=device.name)
    renderer = ChatRenderer(tokenizer)
    return Policy(source, model, tokenizer, renderer, HFEngine(model, renderer.stop_ids), policy_hash(model))
