"""What experiments of matched arms have in common: held-out outcomes by task, and paired comparisons of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turntree.core import parts
from turntree.core.config import to_mapping
from turntree.core.errors import InputError
from turntree.engine.checkpoint import load_model, policy_hash
from turntree.run.files import read_json, write_json
from turntree.run.folder import HELD_OUT, RunDirectory
from turntree.run.jsonl import write_lines
from turntree.run.statistics import crossed_interval, sign_flip, t_interval
from turntree.stages.policy import policy_name, resolve
from turntree.stages.train_online import TrainOnlineConfig, run_train_online


def arm_folder(out: Path, seed: int, arm: str) -> Path:
    return out / f"seed{seed}" / arm


def claim(out: Path, identity: Mapping[str, Any]) -> None:
    """Write down what the results of a folder were made from. Raises `InputError` where that is something else."""
    file = out / "identity.json"
    if file.exists() and read_json(file) != identity:
        raise InputError("holds results of another configuration or policy", path=out, hint="use a new folder")
    out.mkdir(parents=True, exist_ok=True)
    write_json(file, identity)


def claim_policy(out: Path, online: TrainOnlineConfig) -> None:
    """Claim a folder for the weights that all its arms start from."""
    policy = resolve(policy_name(online.model, online.environment))
    claim(out, {"policy_hash": policy_hash(load_model(policy, dtype=online.device.dtype))})


Outcomes = Mapping[str, float]
OUTCOMES = "outcomes.jsonl"


def held_out_outcomes(folder: Path) -> dict[str, float]:
    """Success by task at the last check of a run. Raises `InputError` where a run kept none."""
    checks = RunDirectory(folder).outcomes()
    if not checks:
        hint = "run this arm again in a new folder"
        raise InputError("has no outcomes by task", path=folder / HELD_OUT, hint=hint)
    return checks[max(checks)]


def write_experiment(out: Path, summary: Mapping[str, Any], seeds: Sequence[int], arms: Sequence[str]) -> None:
    """Write `out/summary.json`, and beside it the outcomes that its intervals can be computed from again:
    `out/outcomes.jsonl`, success by task with a row for each arm, seed and check."""
    rows = (
        {"arm": arm, "seed": seed, "check": check, "success": tasks}
        for seed, arm in itertools.product(seeds, arms)
        for check, tasks in RunDirectory(arm_folder(out, seed, arm)).outcomes().items()
    )
    write_lines(out / OUTCOMES, rows)
    write_json(out / "summary.json", summary)


def task_matrix(*arms: Sequence[Outcomes]) -> tuple[list[NDArray[np.float64]], int]:
    """Each arm's success as (seeds, tasks), over the tasks with an outcome in every seed of every arm, and how many
    tasks were left out. Raises `InputError` where no task is left."""
    runs = [outcomes for arm in arms for outcomes in arm]
    shared = sorted(set(runs[0]).intersection(*runs[1:]))
    if not shared:
        raise InputError("no held-out task has an outcome in every run", hint="play more held-out tasks")
    matrices = [np.array([[outcomes[task] for task in shared] for outcomes in arm], dtype=float) for arm in arms]
    return matrices, len(set().union(*runs)) - len(shared)


def paired_outcomes(mine: Sequence[Outcomes], theirs: Sequence[Outcomes]) -> dict[str, Any]:
    """The difference in success of two arms on the same tasks, seed by seed.

    `held_out_difference` is about these trained policies on other tasks: an interval and a sign-flip test over tasks,
    each task averaged over the seeds. `by_seed` is about training: other seeds and other tasks, with the differences of
    the seeds. Tasks without an outcome in one of the runs (censored) are left out and counted.
    """
    (one, two), left_out = task_matrix(mine, theirs)
    difference = one - two
    by_task = difference.mean(axis=0)
    over_tasks = t_interval(by_task)._asdict() | {"p_value": sign_flip(by_task)}
    return {
        "held_out_difference": over_tasks | {"tasks": len(by_task), "left_out": left_out},
        "by_seed": over_seeds_and_tasks(difference),
    }


def over_seeds_and_tasks(values_ST: NDArray[np.float64]) -> dict[str, Any]:
    """The crossed interval of a mean for other seeds and other tasks, with the mean of every seed."""
    return crossed_interval(values_ST)._asdict() | {"values": values_ST.mean(axis=1).tolist()}


def over_seeds(values: Sequence[float]) -> dict[str, Any]:
    """The t interval of the mean of one value a seed, with the values."""
    return t_interval(values)._asdict() | {"values": list(values)}


def ratio_over_seeds(values: Sequence[float]) -> dict[str, Any]:
    """The geometric mean of one ratio a seed with the t interval of its logarithm, and the ratios."""
    found = t_interval([math.log(value) for value in values])
    edges = {key: None if edge is None else math.exp(edge) for key, edge in found._asdict().items()}
    return edges | {"values": list(values)}


def run_or_reuse(config: TrainOnlineConfig, folder: Path) -> None:
    """Run an arm unless it is finished. Raises `InputError` where another configuration was run there."""
    config = parts.resolved(config)
    if not RunDirectory(folder).finished_with(to_mapping(config)):
        run_train_online(config, folder)
