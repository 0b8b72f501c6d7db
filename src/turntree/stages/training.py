"""What the stages that train have in common: their policy, the run from its checkpoint to its results, and held-out
tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from turntree.core.labels import Credit
from turntree.core.progress import notice, progress
from turntree.run import loggers
from turntree.run.folder import RunDirectory
from turntree.stages.config import Training
from turntree.stages.gradients import GradientWatch
from turntree.stages.policy import Policy
from turntree.train.checkpoints import resume
from turntree.train.loop import Algorithm, Checked, Hooks, RolloutAlgorithm, Row, Trained, train

Keep = Callable[[int, Sequence[Any], Sequence[Credit | None]], None]


def run_algorithm(
    run: RunDirectory,
    policy: Policy,
    algorithm: Algorithm,
    config: Training,
    *,
    shown: Sequence[str],
    keep: Keep = lambda step, groups, credits: None,
    check: Callable[[int, Row], Checked] | None = None,
    warnings: Callable[[Row], Iterable[str]] = lambda row: (),
) -> Trained:
    """Train from the run's current state to its end, and write the model and last the cost, which marks the run as
    finished. `warnings` are those of a row; the bar shows its figures `shown`."""
    checkpoints, done = resume(run, config.checkpoints)
    watch = None
    if isinstance(algorithm, RolloutAlgorithm):
        watch = GradientWatch(algorithm.steps, run.metrics() if done else (), algorithm.patience)
    stage = run.identity["stage"]
    with loggers.following(run, config.loggers), progress((), stage, total=algorithm.steps, initial=done) as bar:

        def log(row: Row) -> None:
            run.log(row)
            for warning in (*warnings(row), *(watch.warnings(row) if watch else ())):
                notice(warning)
            if row["step"]:
                bar.update(row["step"] - bar.n)
                bar.set_postfix({key: row[key] for key in shown if row.get(key) is not None})

        trained = train(algorithm, Hooks(log, check, keep, checkpoints))
    if watch and (warning := watch.at_the_end()):
        notice(warning)
    if trained.stopped:
        notice(f"stopped early: {trained.stopped}")
    policy.save(run.model)
    run.write_cost(trained.cost, checks=trained.checks, bill=policy.bill(trained.cost + trained.checks))
    return trained
