"""The configurations of the experiments, as plain values. Without torch: the command line reads them for help."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Literal

from turntree.core.completion import Sampling
from turntree.core.config import Part
from turntree.core.errors import ConfigError
from turntree.stages.config import EpisodesCheckConfig, TrainOnlineConfig
from turntree.train.config import LossConfig, OnlineConfig, OptimizerConfig

GateArm = Literal["none", "gate", "random"]
COMMAND = Sampling(temperature=1.0, max_tokens=24)  # a household command is some six tokens


def _gated() -> OnlineConfig:
    """The temperature is 0.5, because at 1 the rollouts of such a small policy hardly ever converge. The threshold is
    calibrated for the embedded policy."""
    return OnlineConfig(
        iterations=16,
        groups=8,
        check_every=8,
        max_turns=24,
        sampling=Sampling(temperature=0.5, max_tokens=24),
        loss=LossConfig(kl_coefficient=0.02, normalizer="constant", constant=5500.0),
        optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=3),
    )


@dataclass(frozen=True, kw_only=True)
class GateExperimentConfig(TrainOnlineConfig):
    """`turntree experiment gate`: the keys of `train online`, of which every arm is a run."""

    environment: Part = field(default_factory=lambda: Part("household", {"difficulty": "easy"}))
    """The environment of every arm."""
    train: OnlineConfig = field(default_factory=_gated)
    check: EpisodesCheckConfig = field(default_factory=lambda: EpisodesCheckConfig(tasks=100))
    gate: Part | None = field(default_factory=lambda: Part("divergence", {"turn": 8, "threshold": 0.64}))
    """That of the arm "gate"."""
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    """Every arm is run once with each."""
    arms: tuple[GateArm, ...] = ("none", "gate", "random")
    """What is compared."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, values in (("seeds", self.seeds), ("arms", self.arms)):
            if not values or len(set(values)) < len(values):  # a repeated seed narrows intervals
                raise ConfigError("must be there, and each once", field=name)
        if self.gate is None:
            raise ConfigError("is missing", field="gate", hint="the arm 'gate' needs one")
        if "none" not in self.arms:
            raise ConfigError("needs the arm 'none'", field="arms")
        if "random" in self.arms and "gate" not in self.arms:
            raise ConfigError("needs the arm 'gate', whose rate it matches", field="arms")

    @property
    def online(self) -> TrainOnlineConfig:
        arm = TrainOnlineConfig(**{each.name: getattr(self, each.name) for each in fields(TrainOnlineConfig)})
        return replace(arm, check=replace(arm.check, stops=False))
