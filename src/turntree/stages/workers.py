"""The workers of a stage: they build its policy, tasks and judges from its configuration, as the command does.

Each stage that can use them has a function `worker(settings)`, a context manager over what plays a unit. Configurations
travel as in `config.json`, so a worker loads parts by their names.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import load, save

from turntree.cluster.pool import WorkerPool
from turntree.cluster.worker import fetched
from turntree.core.config import to_mapping
from turntree.core.errors import InputError
from turntree.stages.cluster import ClusterConfig
from turntree.stages.policy import Policy
from turntree.training.sharded import parameters_of


@contextlib.contextmanager
def open_crew(stage: str, config: Any, identity: Mapping[str, str], **settings: Any) -> Iterator[WorkerPool | None]:
    """The workers of the stage in module `stage`; None where rollouts run in this process. They must load the policy
    of this `identity`. `settings` are what they need beside the stage's configuration."""
    cluster: ClusterConfig = config.cluster
    if not cluster.workers:
        yield None
        return
    gpus = 1.0 if config.device.name.startswith("cuda") else 0.0
    told = {"config": to_mapping(config), "policy": dict(identity), **settings}
    with WorkerPool(f"{stage}:worker", told, cluster, gpus=gpus) as crew:
        yield crew


def require_policy(settings: Mapping[str, Any], identity: Mapping[str, str]) -> None:
    """Raise `InputError` unless a worker has loaded the policy of the command."""
    if differing := [name for name, value in settings["policy"].items() if identity.get(name) != value]:
        where = f"a worker on {socket.gethostname()}"
        problem = f"{where} has loaded another policy than the command (its {', '.join(differing)})"
        raise InputError(problem, field="model", hint="all machines must see the same files")


# weights


@dataclass
class Published:
    """The weights of the command's policy, for the units of a crew: put into the cluster once a version."""

    crew: WorkerPool
    policy: Policy
    _last: dict[str, Any] = field(default_factory=dict[str, Any])

    def __call__(self) -> dict[str, Any]:
        version = self.policy.engine.policy_version
        if self._last.get("version") != version:
            held = {name: value.detach().contiguous() for name, value in parameters_of(self.policy.model).items()}
            self._last = {"version": version, "weights": self.crew.share(save(held))}
        return self._last


@dataclass
class Follower:
    """A worker's policy, which takes on the weights that a unit names."""

    policy: Policy
    version: int | None = None  # of the weights that it was sent last

    def take_on(self, unit: dict[str, Any]) -> None:
        """Sample with the unit's weights, from empty caches: a unit must not depend on what was played before."""
        engine = self.policy.engine
        if unit["version"] == self.version:
            engine.clear_cache()
            return
        sent = load(fetched(unit["weights"]))
        held = parameters_of(self.policy.model)
        with torch.no_grad():
            for name, value in held.items():
                value.copy_(sent[name])
        self.version = unit["version"]
        engine.update_weights(self.policy.model, unit["version"])
