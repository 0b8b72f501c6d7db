"""PivotRL, Algorithm 1: GRPO on one-turn rollouts at selected states of expert traces."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from turntree.advantages.credit import soft_credit
from turntree.core import seeds
from turntree.core.completion import Sampling
from turntree.core.cost import NO_COST, Cost
from turntree.core.errors import ConfigError, InputError
from turntree.core.labels import Rewards
from turntree.core.protocols import Engine, Estimator, Renderer, TurnVerifier
from turntree.rollouts.local import Prompted, sample_local, score_local
from turntree.training.forward import with_reference_logprobs
from turntree.training.losses import LossConfig
from turntree.training.optimizer import Optimizer, OptimizerConfig
from turntree.training.packing import pack
from turntree.training.update import update_step


@dataclass(frozen=True, kw_only=True)
class PivotConfig:
    """`states` is the paper's B, `group_size` its G, `steps` its K_train. `check_every` steps the caller's held-out
    checks run (0: only before the first and after the last step)."""

    steps: int = 40
    states: int = 32
    group_size: int = 8
    updates: int = 1  # optimizer steps on one batch of rollouts
    max_tokens: int = 8192
    check_every: int = 0
    seed: int = 0
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=1.0, max_tokens=256))
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        if min(self.steps, self.states, self.updates, self.max_tokens) < 1 or self.group_size < 2:
            raise ConfigError("steps, states and updates must be at least 1, group_size at least 2", field="group_size")
        self.sampling.check_trainable()
        if self.sampling.temperature != self.loss.temperature:
            raise ConfigError("differs from sampling.temperature", field="loss.temperature", hint="make them equal")


@dataclass(frozen=True)
class Pivot:
    """A training state and why it is in the mix ("pivot", "anchor" or "random")."""

    prompted: Prompted
    kind: str
    role: str


Log = Callable[[dict[str, Any]], None]
Check = Callable[[int], dict[str, Any]]


def train_pivot(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    engine: Engine,
    renderer: Renderer,
    pivots: Sequence[Pivot],
    verifier: TurnVerifier,
    config: PivotConfig,
    *,
    log: Log,
    check: Check | None = None,
    estimator: Estimator = soft_credit,
) -> Cost:
    """Update `model` (which `engine` samples from) in place; returns what it cost. `log` gets one row a step,
    `check(step)` adds held-out figures to it. Same seed, same weights, where the stage is single-threaded."""
    if not pivots:
        raise InputError("there is no pivot to train on", hint="raise the threshold, or profile more candidates")
    optimizer = Optimizer(model.parameters(), config.optimizer, config.steps * config.updates)
    total = NO_COST
    if check is not None:
        log({"step": 0, **check(0)})
    for step, batch in enumerate(_batches(pivots, config), start=1):
        trees = sample_local(
            [pivot.prompted for pivot in batch],
            engine,
            renderer,
            config.sampling,
            config.group_size,
            seeds.derive(config.seed, "train", step),
        )
        rewards = [score_local(tree, p.prompted.state, verifier) for tree, p in zip(trees, batch, strict=True)]
        credits = [estimator(tree, labels) for tree, labels in zip(trees, rewards, strict=True)]
        started = time.perf_counter()
        packed = [part.to(model.device) for part in pack(trees, credits, max_tokens=config.max_tokens)]
        if config.loss.kl_coefficient > 0 and config.loss.kl == "k2":
            packed = with_reference_logprobs(reference, packed, temperature=config.loss.temperature)
        row: dict[str, Any] = {}
        for _ in range(config.updates):
            row = dict(update_step(model, reference, optimizer, packed, config.loss))
            total += Cost(trained_tokens=int(row["trained_tokens"]))
        engine.weights_changed(engine.policy_version + 1)
        total += Cost(training_seconds=time.perf_counter() - started)
        total = sum((tree.cost for tree in trees), total)
        row = {"step": step, **row, **_reward_metrics(batch, rewards), "turns": total.turns}
        if check is not None and (step == config.steps or (config.check_every and step % config.check_every == 0)):
            row |= check(step)
        log(row)
    return total


def _batches(pivots: Sequence[Pivot], config: PivotConfig) -> Iterator[list[Pivot]]:
    """`config.steps` minibatches from seeded epochs over the pivots (a state never twice before all were seen)."""
    queue: list[Pivot] = []
    epoch = 0
    for _ in range(config.steps):
        while len(queue) < config.states:
            order = list(pivots)
            seeds.generator(config.seed, "epoch", epoch).shuffle(order)
            queue += order
            epoch += 1
        yield queue[: config.states]
        del queue[: config.states]


def _reward_metrics(batch: Sequence[Pivot], rewards: Sequence[Rewards]) -> dict[str, Any]:
    """Mean reward, overall, by role and by kind of demonstrated action; mixed groups; censored rollouts."""
    by_role: dict[str, list[float]] = defaultdict(list)
    by_kind: dict[str, list[float]] = defaultdict(list)
    mixed, censored = 0, 0
    for pivot, labels in zip(batch, rewards, strict=True):
        scored = list(labels.scored().values())
        by_role[pivot.role] += scored
        by_kind[pivot.kind] += scored
        mixed += len(set(scored)) > 1
        censored += len(labels.verdicts) - len(scored)
    everything = [reward for scored in by_role.values() for reward in scored]
    return {
        "reward_mean": _mean(everything),
        "mixed_groups": mixed / len(batch),
        "censored": censored,
        "reward_by_role": {role: _mean(scored) for role, scored in sorted(by_role.items())},
        "reward_by_kind": {kind: _mean(scored) for kind, scored in sorted(by_kind.items())},
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
