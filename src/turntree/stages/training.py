"""What the stages that train have in common: the ranks, and the run from its checkpoint to its results."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from turntree.core.errors import ConfigError
from turntree.core.foreign import package
from turntree.core.progress import notice, progress
from turntree.run import loggers
from turntree.run.folder import RunDirectory
from turntree.stages.config import ReinforcedTraining, Training
from turntree.stages.gradients import GradientWatch
from turntree.stages.policy import Policy
from turntree.train.checkpoints import resume
from turntree.train.loop import Algorithm, Check, Keep, RolloutAlgorithm, Row, Trained, train
from turntree.train.ranks import SINGLE


def run_algorithm(
    run: RunDirectory,
    policy: Policy,
    algorithm: Algorithm,
    config: Training,
    *,
    shown: Mapping[str, str],
    keep: Keep = lambda step, groups, credits: None,
    check: Check | None = None,
    warnings: Callable[[Row], Iterable[str]] = lambda row: (),
) -> Trained:
    """Train from the run's current state to its end, and write the model and last the cost, which marks the run as
    finished. `warnings` are those of a row; the bar shows the last of its figures `shown`, by short names."""
    checkpoints, done = resume(run, config.checkpoints)
    watch = None
    taught = isinstance(config, ReinforcedTraining) and config.reference is not None  # all groups have a gradient
    if isinstance(algorithm, RolloutAlgorithm) and not taught:
        watch = GradientWatch(algorithm.steps, run.metrics() if done else ())
    stage, figures = run.identity["stage"], Row()
    with loggers.following(run, config.loggers), progress((), stage, total=algorithm.steps, initial=done) as bar:

        def log(row: Row) -> None:
            run.log(row)
            for warning in (*warnings(row), *(watch.warnings(row) if watch else ())):
                notice(warning)
            if row["step"]:
                figures.update((name, row[key]) for name, key in shown.items() if row.get(key) is not None)
                bar.set_postfix(figures, refresh=False)  # in a file a line of its own
                bar.update(row["step"] - bar.n)

        trained = train(algorithm, log, check, keep, checkpoints)
    if watch and (warning := watch.at_the_end()):
        notice(warning)
    if trained.stopped:
        notice(f"stopped early: {trained.stopped}")
    policy.save(run.model)
    run.write_cost(trained.cost, checks=trained.checks, bill=policy.bill(trained.cost + trained.checks))
    return trained


def on_ranks(stage: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """`stage(config, out, overwrite=..., group=...)` on all ranks that a launcher started: rank 0 runs it, the others
    take part in its updates, and all return its result. A carrier trains on its own machines, without ranks."""

    @functools.wraps(stage)
    def run(config: Any, out: Path, *, overwrite: bool = False) -> dict[str, Any]:
        if isinstance(config, ReinforcedTraining) and config.cluster.workers:
            package("ray", "ray", "cluster.workers")
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
