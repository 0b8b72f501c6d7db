"""The processes of a run. No torch: the command line reads it for help."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turntree.core.errors import ConfigError
from turntree.rollout.cluster.config import WorkersConfig
from turntree.train.ranks import SINGLE

_HINT = "set cluster.workers to the number of rollout workers"


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(WorkersConfig):
    """Where rollouts are played. No result depends on it beyond rounding, so a run may go on with other numbers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.address is not None and self.workers == 0:
            raise ConfigError("names a cluster, and nothing would run there", field="address", hint=_HINT)


def on_ranks(stage: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """`stage(config, out, overwrite=..., group=...)` on all ranks that a launcher started: rank 0 runs it, the others
    take part in its updates, and all return its result. A carrier trains on its own machines, without ranks."""

    @functools.wraps(stage)
    def run(config: Any, out: Path, *, overwrite: bool = False) -> dict[str, Any]:
        if config.device.carrier is not None:
            if os.environ.get("WORLD_SIZE", "") not in ("", "1"):
                problem = "trains on its own machines, and this is one of several ranks"
                raise ConfigError(problem, field="device.carrier", hint="start the command once, without a launcher")
            return stage(config, out, overwrite=overwrite, group=SINGLE)
        from turntree.train.launch import open_ranks
        from turntree.train.trainer import end, follow

        with open_ranks(config.device.name) as group:
            if group.rank > 0:
                return follow(group)
            result = stage(config, out, overwrite=overwrite, group=group)
            end(group, result)
            return result

    return run
