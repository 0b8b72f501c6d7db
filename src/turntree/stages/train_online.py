"""`turntree train online`: end-to-end GRPO on whole episodes, with the gate and the group filters as options."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from turntree.branching.config import build_brancher
from turntree.core import parts
from turntree.core.config import to_mapping
from turntree.core.cost import Cost
from turntree.core.protocols import Environment
from turntree.engines.checkpoint import save_model
from turntree.environments.tasks import TRAIN, TaskSet, identity, open_tasks
from turntree.logs.groups import LoggedGroup
from turntree.logs.rollouts import FILE_NAME, append_groups, group_from_tree
from turntree.observe.files import writing
from turntree.observe.run import RunDirectory, notice, open_run, progress
from turntree.rollouts.groups import GrownGroup
from turntree.stages.config import TrainOnlineConfig
from turntree.stages.evaluate import EvaluateConfig, play
from turntree.stages.policy import Policy, load_policy, policy_name
from turntree.training.checkpoints import resume
from turntree.training.drift import too_still
from turntree.training.head import vocabulary_size
from turntree.training.isolation import check_path_isolation
from turntree.training.online import Parts, TrainedOnline, train_online

GATE_LOG, BRANCH_LOG, HELD_OUT = "gate.jsonl", "branches.jsonl", "held_out.jsonl"
SAID = ("success", "turns_per_episode")  # of held-out checks, beside what the domain counts for itself


def run_train_online(config: TrainOnlineConfig, out: Path, *, overwrite: bool = False) -> dict[str, Any]:
    """Train; the policy lies in `out/model`, the curves in `out/metrics.jsonl`, every group that was played in
    `out/rollouts.jsonl` (what `turntree audit` and `turntree gate calibrate` read), what the gate saw and said in
    `out/gate.jsonl`, the brancher in `out/branches.jsonl`, held-out outcomes by task in `out/held_out.jsonl`, the bill
    in `out/cost.json`."""
    config = parts.resolved(config)
    policy = load_policy(policy_name(config.model, config.environment), config.device)
    check_path_isolation(policy.model)
    logs = (FILE_NAME, GATE_LOG, BRANCH_LOG, HELD_OUT)
    splits = {TRAIN: config.count, config.held_out_split: config.held_out_count}
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(
            open_tasks(config.environment, splits, seed=config.task_seed, model=policy.source, workers=config.workers)
        )
        inputs = {**policy.identity, **identity(config.environment, opened)}
        run = stack.enter_context(
            open_run(out, "train online", to_mapping(config), inputs, overwrite=overwrite, logs=logs)
        )
        trained = _train(run, policy, opened, config)
        rows = run.metrics()
    return {
        "model": str(run.model),
        "iterations": rows[-1]["step"],
        "reward_mean": rows[-1]["reward_mean"],
        "held_out_success": rows[-1].get("held_out_success"),
        "forks": rows[-1]["trees"]["forks"],
        "read": list(opened.read),
        "saved": trained.savings.counts(),
        "cost": trained.cost.counts(),
    }


def _train(run: RunDirectory, policy: Policy, opened: TaskSet, config: TrainOnlineConfig) -> TrainedOnline:
    """Train from where the run stands to its end, and write what it made; the bill last."""
    reference = policy.reference() if config.train.loss.kl_coefficient > 0 else None  # before a checkpoint is loaded
    checkpoints, done = resume(run, config.checkpoints)
    parts = Parts(
        policy.model,
        reference,
        policy.engine,
        policy.renderer,
        opened.of(TRAIN),
        gate=config.build_gate(),
        brancher=None if config.branching is None else build_brancher(config.branching, vocabulary_size(policy.model)),
        pool=opened.pool,
    )
    with progress((), "train online", total=config.train.iterations, initial=done) as bar:

        def log(row: dict[str, Any]) -> None:
            run.log({**row, "timing": {**row.get("timing", {}), **opened.figures()}})
            if reference is not None and (warning := too_still(row, config.train.iterations)):
                notice(warning)
            if row["step"]:
                bar.update()
                bar.set_postfix(
                    {key: row[key] for key in ("reward_mean", "groups_cut", "held_out_success") if key in row}
                )

        trained = train_online(
            parts,
            config.train,
            log=log,
            keep=lambda iteration, groups: _keep(run.path, iteration, groups),
            check=_check(run.path, policy, opened.of(config.held_out_split), config),
            checkpoints=checkpoints,
        )
    save_model(policy.model, policy.tokenizer, run.model)
    run.write_cost(trained.cost, checks=trained.checks)
    checkpoints.clear()
    return trained


def _keep(folder: Path, iteration: int, groups: Sequence[GrownGroup]) -> None:
    """Append the groups to the rollout log, and what the gate last said of them to its own."""
    logged = [
        group_from_tree(
            group.tree,
            group.rewards,
            id=f"{iteration}.{number}",
            iteration=iteration,
            task_type=getattr(group.task, "task_type", None),
        )
        for number, group in enumerate(groups)
    ]
    append_groups(folder / FILE_NAME, logged)
    said = [
        {
            "iteration": iteration,
            "group": row.id,
            "task": row.task,
            "cut": group.cut,
            "audited": group.decision.audited,
            "reason": group.decision.reason,
            "numbers": group.decision.numbers,
            "rewards": [rollout.reward for rollout in row.rollouts],
        }
        for group, row in zip(groups, logged, strict=True)
        if group.decision is not None
    ]
    _append(folder / GATE_LOG, said)
    _append(
        folder / BRANCH_LOG, [row for group, log in zip(groups, logged, strict=True) for row in _branched(group, log)]
    )


def _branched(group: GrownGroup, logged: LoggedGroup) -> Iterator[dict[str, Any]]:
    """What a brancher said of the group's turns, forks and passes, with the numbers that it saw."""
    for decision in group.tree.decisions:
        if decision.actor == "brancher":
            said = {"action": decision.action, "reason": decision.reason, "numbers": decision.numbers}
            yield {"iteration": logged.iteration, "group": logged.id, "task": logged.task, **said}


def _check(folder: Path, policy: Policy, tasks: Sequence[Environment], config: TrainOnlineConfig):
    """Play of the held-out tasks, their outcomes kept task by task."""
    episodes = config.train.rollouts.episodes
    settings = EvaluateConfig(
        max_turns=episodes.max_turns,
        max_tokens=episodes.sampling.max_tokens,
        max_context=episodes.max_context,
    )

    def check(iteration: int) -> tuple[dict[str, Any], Cost]:
        summary, cost = play(policy, tasks, settings, config.held_out_temperature, config.held_out_samples, quiet=True)
        keep_held_out(folder, iteration, summary)
        held_out = {name: value for name, value in summary.items() if name in SAID or name.endswith("_share")}
        return {f"held_out_{name}": value for name, value in held_out.items()}, cost

    return check


def keep_held_out(folder: Path, iteration: int, summary: dict[str, Any]) -> None:
    """Append what every held-out task gave at the check after `iteration`."""
    rows = [{"iteration": iteration, "task": row["task"], "rewards": row["rewards"]} for row in summary["outcomes"]]
    _append(folder / HELD_OUT, rows)


def _append(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with writing(path), path.open("a", encoding="utf-8") as handle:
        handle.writelines(json.dumps(row, allow_nan=False) + "\n" for row in rows)
