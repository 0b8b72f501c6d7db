"""The workers of a stage: they build its policy, tasks and judges from its configuration, as the command does.

A stage that plays on workers has `CONFIG`, the class of its configuration, and `open_player(config, policy, settings)`,
a context manager over what plays a unit. Configurations travel as in `config.json`, so a worker loads parts by their
names. Where servers have the weights, a worker holds none.
"""

from __future__ import annotations

import contextlib
import importlib
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turntree.core.config import from_mapping, to_mapping
from turntree.core.errors import ConfigError, InputError
from turntree.core.labels import Rewards
from turntree.core.tree import RolloutTree
from turntree.engine.vllm import VllmEngine
from turntree.rollout.cluster.config import WorkersConfig
from turntree.rollout.cluster.pool import UnitLost, WorkerPool
from turntree.rollout.cluster.worker import fetched
from turntree.rollout.spread import lost, unlabelled
from turntree.stages.config import TrainOnlineConfig
from turntree.stages.policy import Policy, Speaker, load_policy, open_served

Unit = dict[str, Any]
VLLM = "vllm"


@contextlib.contextmanager
def open_crew(stage: str, config: Any, policy: Policy, **settings: Any) -> Iterator[WorkerPool | None]:
    """The workers of the stage in module `stage`; None where rollouts run in this process. They must load this policy.
    `settings` are what they need beside the stage's configuration."""
    cluster: WorkersConfig = config.cluster
    if not cluster.workers:
        yield None
        return
    gpus = 1.0 if config.device.name.startswith("cuda") and config.device.engine.name != VLLM else 0.0
    identity = {"policy": dict(policy.identity), "model": policy.source, "vocabulary": policy.vocabulary}
    needed = {"stage": stage, "config": to_mapping(config), **identity, **settings}
    with WorkerPool(f"{__name__}:worker", needed, cluster, gpus=gpus) as crew:
        yield crew


def check_servers(config: TrainOnlineConfig, policy: Policy) -> None:
    """Raise `ConfigError` where the command would replace the weights of a server while workers sample from it. An
    adapter has a name of its own in every version, so a server holds several."""
    if config.device.engine.name != VLLM or not config.train.max_off_policy_steps:
        return
    from turntree.train.lora import has_adapter  # loads torch, which a carrier does without

    if not has_adapter(policy.model):
        hint = "train an adapter (device.lora), of which servers hold several"
        problem = "with --engine vllm a server holds one set of whole weights"
        raise ConfigError(problem, field="train.max_off_policy_steps", hint=hint)


@contextlib.contextmanager
def worker(settings: dict[str, Any]) -> Iterator[Callable[[Unit], Any]]:
    """What a worker of `open_crew` holds."""
    stage = importlib.import_module(settings["stage"])
    config = from_mapping(stage.CONFIG, settings["config"])
    served = config.device.engine.name == VLLM
    policy = open_served(settings["model"], config.device) if served else load_policy(settings["model"], config.device)
    require_policy(settings, policy.identity)
    version: int | None = None  # of the weights that were sent last; without any, those that were loaded
    with stage.open_player(config, policy, settings) as play:

        def play_unit(unit: Unit) -> Any:
            nonlocal version
            if unit.get("version") == version:
                policy.engine.clear_cache()  # a unit must not depend on what was played before
            else:
                version = unit["version"]
                take_on(policy, unit)  # which empties the caches, too
            return play(unit)

        yield play_unit


def require_policy(settings: Mapping[str, Any], identity: Mapping[str, str]) -> None:
    """Raise `InputError` unless a worker has loaded the policy of the command, as far as its identity is known."""
    if differing := [name for name, value in settings["policy"].items() if identity.get(name, value) != value]:
        where = f"a worker on {socket.gethostname()}"
        problem = f"{where} has loaded another policy than the command (its {', '.join(differing)})"
        raise InputError(problem, field="model", hint="all machines must see the same files")


def results(
    crew: WorkerPool, units: Sequence[tuple[Unit, Sequence[str]]]
) -> Iterator[list[tuple[RolloutTree, Rewards]]]:
    """The groups of each unit, which comes with their ids, in order. A group whose workers were lost is a censored
    leaf."""
    futures = [(crew.submit(unit), ids) for unit, ids in units]
    for future, ids in futures:
        try:
            values = future.result()
        except UnitLost as error:
            values = [lost(group_id, str(error)) for group_id in ids]
        yield [unlabelled(value) for value in values]


# weights


@dataclass
class Published:
    """The weights of the command's policy, for the units of a crew: put into the cluster once a version, or what was
    sent to servers. Units are played with those of up to `ahead` updates before."""

    crew: WorkerPool
    policy: Policy
    ahead: int = 0
    _last: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        if isinstance(self.policy.engine, VllmEngine):
            self.policy.engine.keep(1 + self.ahead)

    def __call__(self) -> dict[str, Any]:
        engine = self.policy.engine
        if isinstance(engine, VllmEngine):
            return {"version": engine.policy_version, "served": engine.served()}
        from safetensors.torch import save  # loads torch, which a carrier does without

        from turntree.train.sharded import parameters_of

        version = engine.policy_version
        if self._last.get("version") != version:
            held = {name: value.detach().contiguous() for name, value in parameters_of(self.policy.model).items()}
            self._last = {"version": version, "weights": self.crew.share(save(held))}
        return self._last


def take_on(policy: Policy | Speaker, unit: Unit) -> None:
    """Give a worker's policy the weights that the unit names."""
    if not isinstance(policy, Policy):
        policy.engine.update_weights(unit["served"], unit["version"])
        return
    import torch
    from safetensors.torch import load

    from turntree.train.sharded import parameters_of

    sent = load(fetched(unit["weights"]))
    with torch.no_grad():
        for name, value in parameters_of(policy.model).items():
            value.copy_(sent[name])
    policy.engine.update_weights(policy.model, unit["version"])
