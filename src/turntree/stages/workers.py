"""What a rollout worker holds: the policy, the tasks and the judges of a stage, built from its configuration as the
command builds them. Configurations travel as in `config.json`, so a worker loads parts by their names, like a command.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import load, save

from turntree.cluster.crew import Crew
from turntree.core.config import from_mapping, to_mapping
from turntree.environments.tasks import TRAIN, open_tasks
from turntree.rollouts import rewards
from turntree.rollouts.scheduler import Scheduler
from turntree.rollouts.spread import Listening, play_groups
from turntree.stages.cluster import ClusterConfig
from turntree.stages.config import Device, TrainOnlineConfig
from turntree.stages.policy import Policy, load_policy, policy_name
from turntree.training.checkpoints import trainable
from turntree.training.head import vocabulary_size

Play = Callable[[dict[str, Any]], Any]


@contextlib.contextmanager
def open_crew(kind: str, config: Any, cluster: ClusterConfig, device: Device) -> Iterator[Crew | None]:
    """The workers of a stage, which build `kind` (a function of this module) from its configuration; None where
    rollouts run in this process."""
    if not cluster.workers:
        yield None
        return
    gpus = 1.0 if device.name.startswith("cuda") else 0.0
    with Crew(f"{__name__}:{kind}", {"config": to_mapping(config)}, cluster, gpus=gpus) as crew:
        yield crew


# weights


@dataclass
class Published:
    """The weights of the command's policy, for the units of a crew: put into the cluster once a version."""

    crew: Crew
    policy: Policy
    _last: dict[str, Any] = field(default_factory=dict[str, Any])

    def __call__(self) -> dict[str, Any]:
        version = self.policy.engine.policy_version
        if self._last.get("version") != version:
            held = {name: value.contiguous() for name, value in trainable(self.policy.model).items()}
            self._last = {"version": version, "weights": self.crew.share(save(held))}
        return self._last


@dataclass
class _Sampler:
    """A worker's policy, which takes on the weights that a unit names."""

    policy: Policy
    version: int | None = None  # of the weights that it was sent; None: those that it loaded

    def take_on(self, unit: dict[str, Any]) -> None:
        """Sample with the unit's weights, from empty caches: a unit must not depend on what was played before."""
        engine = self.policy.engine
        if unit.get("version") == self.version:
            engine.weights_changed(engine.policy_version)
            return
        import ray

        sent = load(ray.get(unit["weights"]))
        held = trainable(self.policy.model)
        with torch.no_grad():
            for name, value in held.items():
                value.copy_(sent[name])
        self.version = unit["version"]
        engine.update_weights(self.policy.model, unit["version"])


# what the workers of a stage build


@contextlib.contextmanager
def online(settings: dict[str, Any]) -> Iterator[Play]:
    """Groups of `turntree train online`."""
    config = from_mapping(TrainOnlineConfig, settings["config"])
    policy = load_policy(policy_name(config.model, config.environment), config.device)
    splits = {TRAIN: config.count, config.held_out_split: config.held_out_count}
    rollouts = settled(config)
    summed, gate = rewards.build_rewards(config.rewards), config.build_gate()
    brancher = config.build_brancher(vocabulary_size(policy.model))
    sampler = _Sampler(policy)
    with open_tasks(
        config.environment, splits, seed=config.task_seed, model=policy.source, workers=config.workers
    ) as opened:

        def play(unit: dict[str, Any]) -> Any:
            sampler.take_on(unit)
            scheduler = Scheduler(
                policy.engine,
                policy.renderer,
                rollouts,
                pool=opened.pool,
                gate=gate,
                brancher=None if brancher is None else Listening(brancher),
                rewards=summed,
            )
            return play_groups(scheduler, opened.of(TRAIN), unit)

        yield play


def settled(config: TrainOnlineConfig) -> Any:
    """The scheduler's configuration with the defaults that depend on the rest of the run."""
    counts = config.estimator is not None or config.train.credit.leaf_weights != "path_weighted"
    return config.train.rollouts.of_training(
        config.train.groups, branching=config.brancher is not None, counts_refills=counts
    )
