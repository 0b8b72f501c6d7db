"""The configurations of the studies, as plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from turntree.core import parts
from turntree.core.config import Part, at_least
from turntree.core.errors import ConfigError
from turntree.experiments.config import ANSWER
from turntree.rollouts.live import EpisodeConfig
from turntree.stages.config import Device, Playing

LadderArm = Literal["none", "coin", "entropy", "oracle", "oracle_pooled", "worst", "foresight"]


@dataclass(frozen=True, kw_only=True)
class PremiseConfig(Playing):
    """`studies/run.py premise`: training tasks whose rollouts are forked once, all of it once for each probe."""

    environment: Part = field(default_factory=lambda: Part("qa"))
    count: int = 150
    """Training tasks to play."""
    episodes: EpisodeConfig = ANSWER
    initial: int = 4
    """Rollouts of a task, each forked once."""
    children: int = 8
    """Rollouts that go on from a fork."""
    rate: float = 0.4
    """Chance of forking after a tool result."""
    probes: tuple[int, ...] = (1, 2, 3, 4)
    """Tokens of a turn that are seen before it forks."""
    seed: int = 0
    """Of every draw."""

    def __post_init__(self) -> None:
        if self.initial < 1 or self.children < 2 or not self.probes or min(self.probes) < 1:
            raise ConfigError("needs a rollout, 2 children and probes of at least 1 token", field="children")


def _on_cpu(device: Device) -> None:
    if device.name != "cpu":
        raise ConfigError("must be cpu: whole gradients are compared in numpy", field="device.name")


@dataclass(frozen=True, kw_only=True)
class TheoryConfig:
    """`studies/run.py theory`."""

    seed: int = 0
    """Of every draw."""
    instances: int = 2000
    """Random finite action spaces that every statement is checked on."""
    model: str = "default"
    """A folder in Hugging Face format, a name on the Hub, or a registered policy."""
    device: Device = field(default_factory=Device)
    verifier: Part = parts.DEFAULT
    """Judges the actions of the policy."""
    demonstrator: Part = field(
        default_factory=lambda: Part("household", {"games": {"split": "train", "count": 24, "difficulty": "easy"}})
    )
    """Whose traces the states come from."""
    candidates: int = 96
    """States that are sampled to find the mixed ones."""
    samples: int = 32
    """Rollouts at each, whose distinct actions become the action space of the state."""
    mixed: int = 12
    """States with reward variance, the first ones found; half as many without."""
    group_size: int = 8
    """Rollouts of a group."""
    draws: int = 2000
    """Batches that each variance is measured on."""
    steps: int = 20
    """Steps of PivotRL after which Theorem 3.3 is held against the trained policy."""

    def __post_init__(self) -> None:
        at_least(self, instances=2, candidates=2, samples=2, mixed=2, draws=2, steps=2, group_size=2)
        _on_cpu(self.device)


@dataclass(frozen=True, kw_only=True)
class LadderConfig(Playing):
    """`studies/run.py ladder`: a frozen policy."""

    environment: Part = field(default_factory=lambda: Part("qa"))
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4, 5)
    """Of the rollouts; the tasks are the same."""
    arms: tuple[LadderArm, ...] = ("coin", "entropy", "oracle", "oracle_pooled", "worst", "foresight")
    """Where rollouts fork. coin and entropy: as in `experiment branching`; oracle: where the measured variance is
    highest among the moments of a turn, oracle_pooled: of all turns; worst: lowest; foresight: once a rollout, at its
    best moment; none: nowhere, so that all leaves are independent."""
    iterations: int = 5
    """Batches of tasks; the first sets the pace and is not counted."""
    groups: int = 8
    """Tasks of a batch."""
    group_size: int = 8
    """Leaves of a task, half of which begin independently."""
    probe_tokens: int = 2
    """Entropies that a brancher looks at; branches share one token less."""
    children: int = 8
    """Children of every moment that are measured and not billed."""
    reference: int = 32
    """Independent rollouts of a task, for the true gradient."""
    reference_seed: int = 1000
    """Of these."""
    episodes: EpisodeConfig = ANSWER

    def __post_init__(self) -> None:
        _on_cpu(self.device)
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or self.reference_seed in self.seeds:
            raise ConfigError("must be there, each once, and not that of the reference", field="seeds")
        if self.iterations < 2:
            raise ConfigError("must be at least 2: the first sets the pace", field="iterations")
        if self.children < 2 or self.group_size < 4 or self.group_size % 2 or self.probe_tokens < 1:
            # of an odd number one rollout would fork twice, into a child that the oracle has measured
            raise ConfigError(
                "needs 2 children, an even number of leaves from 4, and a probe of 1 token", field="children"
            )
        if not self.arms or len(set(self.arms)) < len(self.arms):
            raise ConfigError("must be there, and each once", field="arms")
