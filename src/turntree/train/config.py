"""Configuration of training, as plain values. It does not import torch, so that the command line starts fast.

The line of text below a field is its documentation: `turntree config` and `--help` show it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Literal

from turntree.core.completion import Sampling
from turntree.core.config import FIXED, Above0, Amount, Between, Bounded, Count, Positive, Share
from turntree.core.errors import ConfigError
from turntree.credit.config import CreditConfig
from turntree.credit.credit import CreditRule
from turntree.rollout.groups import GroupConfig, SchedulerConfig
from turntree.rollout.live import EpisodeConfig
from turntree.rollout.local import CutTurns
from turntree.rollout.service import Iterations
from turntree.train.loss_config import LossConfig


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Bounded):
    """AdamW without weight decay, which would pull a post-trained policy away from its start without evidence from
    data."""

    learning_rate: Above0 = 1e-5
    """AdamW's step size. The embedded tiny policies want 3e-4 to 5e-4."""
    betas: tuple[float, float] = field(default=(0.9, 0.95), metadata=FIXED)
    """Decay rates of AdamW's moments. With 0.95 a large gradient fades within about twenty steps, which suits runs of
    tens to hundreds of steps."""
    eps: float = field(default=1e-8, metadata=FIXED)
    """Added to the denominator of AdamW."""
    weight_decay: Amount = 0.0
    """Decoupled weight decay."""
    warmup_steps: Count = 0
    """Steps over which the learning rate rises linearly."""
    schedule: Literal["constant", "cosine"] = "constant"
    """After warm-up: hold the learning rate, or lower it to `final_fraction` of it at the last step."""
    final_fraction: float = field(default=0.1, metadata=FIXED)
    """For "cosine": the learning rate at the last step as a fraction of `learning_rate`."""
    max_grad_norm: Above0 = 1.0
    """Gradients with a larger norm are scaled down to this norm."""

    def require_steps(self, total: int | None, field: str = "schedule") -> None:
        """Raise `ConfigError` where no step is left for the learning rate to fall."""
        if self.schedule == "cosine" and (total is None or total <= self.warmup_steps):
            problem = (
                f"'cosine' needs a number of steps above warmup_steps ({self.warmup_steps}), and there are {total}"
            )
            raise ConfigError(problem, field=field, hint="take fewer warmup_steps, or 'constant'")

    def factor(self, step: int, total_steps: int | None = None) -> float:
        """The fraction of `learning_rate` used by step `step` (the first is 0) of `total_steps`."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.schedule == "constant" or total_steps is None:
            return 1.0
        progress = min(1.0, (step - self.warmup_steps) / max(1, total_steps - 1 - self.warmup_steps))
        return self.final_fraction + (1 - self.final_fraction) * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Bounded):
    """When to save checkpoints. With both intervals 0, a killed run starts over. No result depends on these, so they
    may differ when a run is resumed."""

    every: Count = 10
    """Steps between two checkpoints (0: never)."""
    every_seconds: Amount = field(default=300.0, metadata=FIXED)
    """Save at the end of a step if the last checkpoint is this old (0: never)."""
    keep: Positive = field(default=2, metadata=FIXED)
    """How many of the newest checkpoints are kept while the run is unfinished."""


@dataclass(frozen=True, kw_only=True)
class LoRAConfig(Bounded):
    """Low-rank adaptation (Hu et al. 2021). There is no dropout: a policy must score as it samples."""

    rank: Positive = 16
    """Rank of the adapter's two matrices."""
    alpha: Positive = 32
    """alpha over rank scales the adapter."""
    targets: tuple[str, ...] = ("all-linear",)
    """Names of linear modules, or "all-linear": all except the head, and the experts and router of a mixture. Experts
    by the name of their stacked weights (mlp.experts.gate_up_proj), which every pass then adds up anew."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.targets:
            raise ConfigError("names no module", field="lora.targets", hint='for example ["q_proj", "v_proj"]')


@dataclass(frozen=True, kw_only=True)
class SFTConfig(Bounded):
    """Supervised fine-tuning on the assistant turns of traces."""

    epochs: Positive = 2
    """Passes over the traces."""
    batch: Positive = 16
    """Traces of one optimizer step."""
    max_tokens: Positive = 8192
    """Most padded positions of one forward pass. Longer examples are left out, and counted."""
    seed: int = 0
    """Seed of the order of the traces."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def steps(self, examples: int) -> int:
        """Optimizer steps for this number of examples."""
        return math.ceil(examples / self.batch) * self.epochs


@dataclass(frozen=True, kw_only=True)
class ReinforcedConfig(Bounded):
    """Options that both kinds of training on rollouts share."""

    groups: Positive = 16
    """Tasks (states) of one iteration (step), each played `group_size` times."""
    group_size: Annotated[int, Between(2)] = 8
    """Rollouts of one task (state), the paper's G."""
    sampling: Sampling = field(default_factory=lambda: Sampling(max_tokens=256))
    updates: Positive = 1
    """Passes over one batch of rollouts."""
    minibatch: Positive | None = None
    """Groups of one optimizer step (ARPO as released: 16 of 128). Default: the whole batch."""
    max_tokens: Positive = 8192
    """Most token positions of one forward pass."""
    seed: int = 0
    """Of every draw."""
    credit: CreditConfig = field(default_factory=CreditConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    @property
    def step_rollouts(self) -> int:
        return self.groups * self.group_size

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.minibatch is not None and self.optimizer.schedule == "cosine":
            hint = "use 'constant' with minibatch: how many groups are trained on is known at each step only"
            raise ConfigError("needs a number of steps", field="optimizer.schedule", hint=hint)
        if self.sampling.temperature == 0:  # greedy play
            hint = "use temperature > 0"
            raise ConfigError("training needs samples of the policy itself", field="sampling", hint=hint)
        self.loss.estimator(self.credit)  # refuses what does not go together


@dataclass(frozen=True, kw_only=True)
class PivotConfig(ReinforcedConfig):
    """GRPO on one-turn groups (PivotRL, Algorithm 1)."""

    steps: Positive = 40
    """Training steps, the paper's K_train."""
    groups: Positive = 32
    """States of one step, the paper's B."""
    per_trace: Positive = 1
    """States that a step draws in each trace: what they share is prefilled and trained on once (1: in any trace)."""
    check_every: Count | None = None
    """Steps between held-out checks (0: only before the first and after the last step). Default: a quarter of the
    steps."""
    loss: LossConfig = field(default_factory=lambda: LossConfig(kl_coefficient=0.02))
    cut_turns: CutTurns = "fail"
    """Reward of a turn that the token limit cut: 0 (fail), or the verifier's verdict on its text (judge)."""

    def __post_init__(self) -> None:
        if self.credit.advantages == "remax":
            raise ConfigError("plays a greedy episode", field="credit.advantages", hint="use it in `train online`")
        super().__post_init__()
        self.optimizer.require_steps(self.steps * self.updates, "optimizer.schedule")


@dataclass(frozen=True, kw_only=True)
class OnlineConfig(ReinforcedConfig, GroupConfig, EpisodeConfig):
    """GRPO on whole episodes."""

    iterations: Positive = 40
    """Batches of episodes, each followed by its updates."""
    check_every: Count = 10
    """Iterations between held-out checks (0: only before the first and after the last)."""
    max_turns: Positive = 16
    """Longest episode."""
    turn_rewards: dict[str, float] = field(default_factory=dict[str, float])
    """Rewards of turns, beside that of the episode: weights of what the environment says after each turn, by name. That
    is "progress" (what `Observation.progress` gained), or one of its metrics. Their unit is that of the episodes'
    advantages (`credit.comparisons.turn_advantages`)."""
    turn_discount: Share = 0.5
    """Weight of a reward one turn later in the credit of a turn. At 1 the gradient is that of their sum; below, a turn
    answers more for what follows at once."""
    max_off_policy_steps: Count = 0
    """Iterations whose rollouts are played by the workers while earlier ones are trained on: each is sampled with the
    weights of this many updates before its turn (0: synchronous)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, weight in self.turn_rewards.items():
            if not math.isfinite(weight):
                raise ConfigError("must be a finite number", field=f"turn_rewards.{name}")
        self.optimizer.require_steps(self.iterations * self.updates, "optimizer.schedule")

    @property
    def estimator(self) -> CreditRule:
        rule = self.loss.estimator(self.credit)
        return replace(rule, turn_rewards=self.turn_rewards, turn_discount=self.turn_discount)

    @property
    def episodes(self) -> EpisodeConfig:
        return EpisodeConfig(**{each.name: vars(self)[each.name] for each in fields(EpisodeConfig)})

    @property
    def rollouts(self) -> SchedulerConfig:
        groups = {each.name: vars(self)[each.name] for each in fields(GroupConfig)}
        groups["greedy_first"] = self.credit.advantages == "remax"  # its baseline
        return SchedulerConfig(episodes=self.episodes, **groups)

    @property
    def played(self) -> Iterations:
        """What the rollouts of a run depend on."""
        ahead = self.max_off_policy_steps
        return Iterations(groups=self.groups, rollouts=self.rollouts, seed=self.seed, ahead=ahead, last=self.iterations)
