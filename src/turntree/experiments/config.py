"""The configurations of the experiments, as plain values. Without torch: the command line reads them for help."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from turntree.core.completion import Sampling
from turntree.core.config import Part
from turntree.core.errors import ConfigError
from turntree.pivots.select import SelectConfig
from turntree.rollout.live import EpisodeConfig
from turntree.rollout.scheduler import SchedulerConfig
from turntree.stages.config import OwnPathConfig, TrainOnlineConfig
from turntree.train.config import LossConfig, OnlineConfig, OptimizerConfig, PivotConfig

GateArm = Literal["none", "gate", "random"]
BranchingArm = Literal[
    "grpo",
    "grpo_half",
    "grpo_calls",
    "entropy",
    "entropy_starts",
    "entropy_paths",
    "random",
    "random_paths",
    "arpo_released",
    "tree_grpo",
]
BRANCHING_SCHEMA = "turntree.decide.branching/1"  # of its summary, which its page reads without torch
COMMAND = Sampling(temperature=1.0, max_tokens=24)  # a household command is some six tokens
ANSWER = EpisodeConfig(max_turns=10, max_context=1024, sampling=Sampling(temperature=1.0, max_tokens=48))


@dataclass(frozen=True, kw_only=True)
class SeededExperiment:
    """Arms that are compared seed by seed."""

    seeds: tuple[int, ...] = (0, 1, 2, 3)
    """Every arm is run once with each."""

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError("must be there, and each once: a repeated seed narrows intervals", field="seeds")


def check_constant(online: TrainOnlineConfig, changes: str) -> None:
    """Raise `ConfigError` unless the loss is divided by a constant; `changes` would otherwise change the step size."""
    if online.train.loss.normalizer != "constant":
        raise ConfigError(
            f"lets {changes} change the step size",
            field="online.train.loss.normalizer",
            hint="use 'constant', with about the trained tokens of an iteration as online.train.loss.constant",
        )


def online_config(
    environment: Part,
    episodes: EpisodeConfig,
    rate: float,
    *,
    iterations: int,
    check_every: int,
    loss: dict[str, Any],
    **settings: Any,
) -> TrainOnlineConfig:
    """The GRPO arm, as far as the experiments agree; `loss` are its settings beside the KL term."""
    return TrainOnlineConfig(
        environment=environment,
        train=OnlineConfig(
            iterations=iterations,
            groups=8,
            check_every=check_every,
            rollouts=SchedulerConfig(episodes=episodes),
            loss=LossConfig(kl_coefficient=0.02, **loss),
            optimizer=OptimizerConfig(learning_rate=rate, warmup_steps=3),
        ),
        **settings,
    )


def _gated() -> TrainOnlineConfig:
    """The temperature is 0.5, because at 1 the rollouts of such a small policy hardly ever converge. The threshold is
    calibrated for the embedded policy."""
    return online_config(
        Part("household", {"difficulty": "easy"}),
        EpisodeConfig(max_turns=24, sampling=Sampling(temperature=0.5, max_tokens=24)),
        2e-4,
        iterations=16,
        check_every=8,
        loss={"normalizer": "constant", "constant": 5500.0},
        gate=Part("divergence", {"checkpoints": [{"turn": 8, "threshold": 0.64}]}),
    )


@dataclass(frozen=True, kw_only=True)
class GateExperimentConfig(SeededExperiment):
    """`turntree experiment gate`."""

    online: TrainOnlineConfig = field(default_factory=_gated)
    """Every arm's configuration; its gate is that of the arm "gate"."""
    arms: tuple[GateArm, ...] = ("none", "gate", "random")
    """What is compared."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.online.gate is None:
            raise ConfigError("is missing", field="online.gate", hint="the arm 'gate' needs one")
        check_constant(self.online, "a cut")
        if "none" not in self.arms or len(set(self.arms)) < len(self.arms):
            raise ConfigError("needs the arm 'none', and every arm once", field="arms")
        if "random" in self.arms and "gate" not in self.arms:
            raise ConfigError("needs the arm 'gate', whose rate it matches", field="arms")


def household_selection() -> SelectConfig:
    """The vetted selection of the embedded household policy (docs/results/quickstart.md)."""
    return SelectConfig(threshold=1.0, max_per_kind=0.4, anchor_share=0.0, per_duplicate=0)


def household_own() -> OwnPathConfig:
    """The vetted search for own states of the embedded household policy (docs/results/own-states.md)."""
    chosen = SelectConfig(threshold=1.0, weight="both", max_per_kind=1.0, anchor_share=0.0)
    return OwnPathConfig(refresh=15, keep=0.5, tasks=192, greedy=0.5, max_turns=16, forks=2, measured=96, select=chosen)


def household_pivots(*, check_every: int, steps: int = 60) -> PivotConfig:
    """The vetted PivotRL settings of the embedded household policy (docs/results/quickstart.md)."""
    return PivotConfig(
        steps=steps,
        check_every=check_every,
        sampling=COMMAND,
        loss=LossConfig(kl_coefficient=0.02),
        optimizer=OptimizerConfig(learning_rate=5e-4, warmup_steps=3),
    )


def _branched() -> TrainOnlineConfig:
    return online_config(
        Part("qa"),
        ANSWER,
        5e-4,
        iterations=40,
        check_every=10,
        loss={"normalizer": "constant", "constant": 2000.0},
        brancher=Part("entropy", {"probe_tokens": 2}),
        held_out_count=300,
        held_out_temperature=1.0,
        held_out_samples=2,
    )


@dataclass(frozen=True, kw_only=True)
class BranchingExperimentConfig(SeededExperiment):
    """`turntree experiment branching`. All arms but `tree_grpo` and those on `starts` compare every leaf with every
    leaf (ARPO's soft estimator)."""

    online: TrainOnlineConfig = field(default_factory=_branched)
    """The arm "entropy"; the others are written as their differences from it."""
    arms: tuple[BranchingArm, ...] = ("grpo", "entropy", "random", "entropy_starts", "entropy_paths", "grpo_calls")
    """What is compared. grpo: as many leaves, all independent; grpo_half: the initial rollouts alone; grpo_calls: as
    many independent rollouts as make the tool calls of entropy; random: the paced coin; entropy_starts: the baseline
    of initial starts alone; entropy_paths, random_paths: the same with path weights; arpo_released, tree_grpo: as
    published."""

    def __post_init__(self) -> None:
        super().__post_init__()
        brancher = self.online.brancher
        if brancher is None or brancher.name != "entropy":
            raise ConfigError("must be 'entropy': the other arms differ from it", field="online.brancher.name")
        if not brancher.options.get("paced", True):
            raise ConfigError("must be true: 'random' keeps the same pace", field="online.brancher.paced")
        check_constant(self.online, "the number of leaves")
        if not self.arms or len(set(self.arms)) < len(self.arms):
            raise ConfigError("must be there, and each once", field="arms")
        if "grpo_calls" in self.arms and not {"grpo", "entropy"} <= set(self.arms):
            raise ConfigError("needs the arms 'grpo' and 'entropy', whose calls it matches", field="arms")
