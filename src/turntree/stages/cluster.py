"""The ranks of a run."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from turntree.core.errors import ConfigError
from turntree.train.ranks import SINGLE


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
