"""What the stages from traces to a policy are told, as plain values. Without torch: the command line reads it for help.

The line of text below a field is its documentation: `turntree config` and `--help` show it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from turntree.core.config import Part
from turntree.core.errors import ConfigError
from turntree.engines.endpoint import EndpointConfig
from turntree.engines.limits import EngineConfig
from turntree.environments.tasks import DEFAULT
from turntree.profiling.profile import ProfileConfig
from turntree.training.config import CheckpointConfig, LoRAConfig, PivotConfig, SFTConfig


@dataclass(frozen=True)
class Device:
    """Where and how to compute. One thread is the vetted setting for tiny models: on two threads the barriers of a
    small matrix product cost more than the product (measured: up to a hundred times)."""

    name: str = "cpu"
    """Of torch: cpu, cuda, cuda:1."""
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """Of the weights; training needs float32 or an adapter."""
    threads: int = 1
    """Of the processor."""
    attention: Literal["sdpa", "flex_attention"] = "sdpa"
    """Over packed trees; FlexAttention on CUDA only."""
    gradient_checkpointing: bool = False
    """Compute activations twice instead of keeping them."""
    lora: LoRAConfig | None = None
    """Train a fresh adapter instead of the weights."""
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ConfigError("must be at least 1", field="threads")

    def check_trainable(self) -> None:
        """Raise `ConfigError` unless the weights can hold a small update: near 0.02 a bfloat16 weight moves in steps
        of 1e-4, so that AdamW at the usual learning rates changes nothing. Adapters are float32 whatever the base."""
        if self.dtype != "float32" and self.lora is None:
            raise ConfigError(
                f"{self.dtype!r} weights round small updates away",
                field="device.dtype",
                hint="train in float32, or an adapter (device.lora)",
            )


@dataclass(frozen=True, kw_only=True)
class SFTStageConfig:
    """`turntree sft`."""

    traces: str
    """A traces file."""
    model: str = "default"
    """A folder in Hugging Face format, or an embedded tiny policy: 'default', 'qa'."""
    split: str = "train"
    """Which traces ('' for all)."""
    sft: SFTConfig = field(default_factory=SFTConfig)
    checkpoints: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(every=100))
    device: Device = field(default_factory=Device)

    def __post_init__(self) -> None:
        self.device.check_trainable()


@dataclass(frozen=True, kw_only=True)
class ProfileStageConfig:
    """`turntree profile`."""

    traces: str
    """A traces file."""
    model: str = "default"
    """A folder in Hugging Face format, or an embedded tiny policy: 'default', 'qa'. With an endpoint, the name that it
    serves."""
    verifier: str = "household"
    """household, tool_call (+messages=any+ignore_case), strict, or module:function of your own."""
    split: str = "train"
    """Which traces ('' for all)."""
    limit: int = 0
    """Profile the first candidates only, this many (0: all)."""
    reuse: str | None = None
    """An earlier profile of this policy: what it holds is not sampled again."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    endpoint: EndpointConfig | None = None
    """Sample from a server, such as vLLM."""
    device: Device = field(default_factory=Device)

    def __post_init__(self) -> None:
        if self.limit < 0:
            raise ConfigError("must not be negative", field="limit")


@dataclass(frozen=True, kw_only=True)
class RescoreConfig:
    """`turntree rescore`."""

    profile: str
    """The profile whose samples are judged anew."""
    verifier: str
    """household, tool_call (+messages=any+ignore_case), strict, or module:function of your own."""
    traces: str | None = None
    """Where the traces are now, if not where the profile says."""


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """Held-out figures during training. Pivot reward alone misleads (docs/results/quickstart.md)."""

    states: int = 0
    """Development candidates whose acceptance is measured, by kind of action (0: none)."""
    samples: int = 4
    """Rollouts of each of these states."""
    environment: Part = DEFAULT
    """Whose tasks are played."""
    tasks: int = 0
    """Tasks of the split "dev" that are played (0: none)."""
    task_seed: int = 0
    """For environments that draw their tasks."""
    max_turns: int = 16
    """Longest episode."""
    max_tokens: int = 24
    """Longest completion of one turn."""


@dataclass(frozen=True, kw_only=True)
class TrainPivotConfig:
    """`turntree train pivot`."""

    pivots: str
    """The pivots file of `turntree select`."""
    model: str = "default"
    """A folder in Hugging Face format, or an embedded tiny policy: 'default', 'qa'."""
    traces: str | None = None
    """Where the traces are now, if not where the profile says."""
    verifier: str | None = None
    """Default: that of the profile; code of your own is named again. "strict" is the baseline of Eq. 2."""
    allow_stale: bool = False
    """Accept pivots that were profiled with another policy, sampling or verifier: their means are then not those of
    the start."""
    train: PivotConfig = field(default_factory=PivotConfig)
    check: CheckConfig = field(default_factory=CheckConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    device: Device = field(default_factory=Device)

    def __post_init__(self) -> None:
        self.device.check_trainable()
