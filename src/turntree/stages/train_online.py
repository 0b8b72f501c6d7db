"""`turntree train online`: end-to-end GRPO on whole episodes, with the gate and the group filters as options."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turntree.core import parts
from turntree.core.config import Part, to_mapping
from turntree.core.cost import Cost
from turntree.core.errors import ConfigError
from turntree.core.labels import Credit
from turntree.core.protocols import Brancher, Environment, Estimator, Gate
from turntree.engines.checkpoint import save_model
from turntree.environments.processes import ProcessPoolConfig
from turntree.environments.tasks import DEFAULT, DEV, TEST, TRAIN, TaskSet, identity, open_tasks
from turntree.logs import rollouts, trees
from turntree.logs.trees import KeptTree
from turntree.observe import loggers
from turntree.observe.run import RunDirectory, open_run, progress
from turntree.rollouts import rewards
from turntree.rollouts.groups import GrownGroup
from turntree.rollouts.rewards import RewardSum
from turntree.stages.evaluate import EvaluateConfig, play
from turntree.stages.policy import Device, Policy, load_policy, policy_name
from turntree.training.checkpoints import CheckpointConfig, resume
from turntree.training.head import vocabulary_size
from turntree.training.isolation import check_path_isolation
from turntree.training.online import OnlineConfig, Parts, TrainedOnline, train_online

GATE_LOG, HELD_OUT = "gate.jsonl", "held_out.jsonl"
SAID = ("success", "turns_per_episode")  # of held-out checks, beside what the domain counts for itself


@dataclass(frozen=True, kw_only=True)
class TrainOnlineConfig:
    """`count` tasks of the split "train" of `environment` are trained on. `held_out_count` of another split are played
    `held_out_samples` times at `held_out_temperature` (0: greedily) every `train.check_every` iterations. `task_seed`
    is for environments that draw their tasks. `model` "default" is the environment's own policy.

    `gate`, `brancher` and `estimator` (None: that of `train.credit`) are parts (`core.parts`). A brancher needs
    `train.rollouts.initial_rollouts` below the group size. `workers` says where tasks are stepped: in worker processes,
    which are killed and rebuilt where they hang or die, or (`workers.workers` 0) in this one; no result changes.
    The weighted sum of `rewards` replaces the reward of the environment, in training only (`rollouts.rewards`).
    `keep_trees`: of how many iterations, spread evenly, whole trees are written (None: all; 0: none)."""

    model: str = "default"
    environment: Part = DEFAULT
    count: int = 400
    held_out_count: int = 100
    held_out_split: str = DEV
    held_out_temperature: float = 0.0
    held_out_samples: int = 1
    task_seed: int = 0
    train: OnlineConfig = field(default_factory=OnlineConfig)
    rewards: tuple[Part, ...] = ()
    gate: Part | None = None
    brancher: Part | None = None
    estimator: Part | None = None
    loggers: tuple[Part, ...] = ()
    keep_trees: int | None = None
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    device: Device = field(default_factory=Device)
    workers: ProcessPoolConfig = field(default_factory=lambda: ProcessPoolConfig(workers=0))

    def __post_init__(self) -> None:
        self.device.check_trainable()
        for name in ("count", "held_out_count", "held_out_samples"):
            if getattr(self, name) < 1:
                raise ConfigError("must be at least 1", field=name)
        if self.held_out_split == TRAIN:
            raise ConfigError("is what is trained on", field="held_out_split", hint=f"use {DEV!r} or {TEST!r}")
        trees.check_keep(self.keep_trees)
        rollouts = self.train.rollouts
        if (self.brancher is not None) != (rollouts.initial < rollouts.group_size):
            raise ConfigError(
                f"{rollouts.initial} of {rollouts.group_size} rollouts begin independently, with"
                + ("out a brancher" if self.brancher is None else " a brancher that has none left to add"),
                field="train.rollouts.initial_rollouts",
                hint="set it below group_size together with brancher, or neither",
            )

    def build_gate(self) -> Gate | None:
        return None if self.gate is None else parts.build("gates", self.gate, seed=self.train.seed)

    def build_brancher(self, vocabulary: int) -> Brancher | None:
        """For a policy over `vocabulary` tokens. Raises `ConfigError` where loss or credit do not go with it."""
        if self.brancher is None:
            return None
        brancher = parts.build("branchers", self.brancher, vocabulary=vocabulary, seed=self.train.seed)
        if getattr(brancher, "splits_turns", False) and self.train.loss.ratio == "action":
            raise ConfigError(
                "'action' takes the ratio of whole turns, and branches share a part of one",
                field="train.loss.ratio",
                hint="use ratio 'token', or brancher.probe_tokens 1",
            )
        if getattr(brancher, "biased", False) and self.train.credit.leaf_weights == "path_weighted":
            raise ConfigError(
                f"forks of {self.brancher.name!r} are chosen by what came after them, which biases path weights",
                field="train.credit.leaf_weights",
                hint="use 'unit'",
            )
        return brancher

    def build_estimator(self) -> Estimator | None:
        loss = self.train.loss
        context = {"normalizer": loss.normalizer, "per_rollout": loss.per_rollout_credit}
        return None if self.estimator is None else parts.build("estimators", self.estimator, **context)


def run_train_online(config: TrainOnlineConfig, out: Path, *, overwrite: bool = False) -> dict[str, Any]:
    """Train; the policy lies in `out/model`, the curves in `out/metrics.jsonl`, every group that was played in
    `out/rollouts.jsonl` (what `turntree audit` and `turntree gate calibrate` read), whole trees in `out/trees.jsonl`,
    what the gate saw and said in `out/gate.jsonl`, held-out outcomes by task in `out/held_out.jsonl`, the bill in
    `out/cost.json`."""
    config = parts.resolved(config)
    loggers.check(config.loggers)
    summed = rewards.build_rewards(config.rewards)
    policy = load_policy(policy_name(config.model, config.environment), config.device)
    check_path_isolation(policy.model)
    logs = (rollouts.FILE_NAME, trees.FILE_NAME, GATE_LOG, HELD_OUT)
    splits = {TRAIN: config.count, config.held_out_split: config.held_out_count}
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(
            open_tasks(config.environment, splits, seed=config.task_seed, model=policy.source, workers=config.workers)
        )
        code = parts.identities(config)
        inputs = {**policy.identity, **code, **identity(config.environment, opened), **rewards.identity(config.rewards)}
        run = stack.enter_context(
            open_run(out, "train online", to_mapping(config), inputs, overwrite=overwrite, logs=logs)
        )
        trained = _train(run, policy, opened, config, summed)
        rows = run.metrics()
    return {
        "model": str(run.model),
        "iterations": rows[-1]["step"],
        "reward_mean": rows[-1]["reward_mean"],
        "held_out_success": rows[-1].get("held_out_success"),
        "forks": rows[-1]["trees"]["forks"],
        "read": list(opened.read),
        "saved": trained.savings.counts(),
        "trees_bytes_per_trained_token": trees.bytes_per_trained_token(
            run.path, rows, config.train.iterations, config.keep_trees
        ),
        "cost": trained.cost.counts(),
    }


def _train(
    run: RunDirectory, policy: Policy, opened: TaskSet, config: TrainOnlineConfig, summed: RewardSum | None
) -> TrainedOnline:
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
        brancher=config.build_brancher(vocabulary_size(policy.model)),
        estimator=config.build_estimator(),
        pool=opened.pool,
        rewards=summed,
    )
    with (
        loggers.following(run, config.loggers),
        progress((), "train online", total=config.train.iterations, initial=done) as bar,
    ):

        def log(row: dict[str, Any]) -> None:
            run.log({**row, "timing": {**row.get("timing", {}), **opened.figures()}})
            if row["step"]:
                bar.update()
                bar.set_postfix(
                    {key: row[key] for key in ("reward_mean", "groups_cut", "held_out_success") if key in row}
                )

        trained = train_online(
            parts,
            config.train,
            log=log,
            keep=lambda *played: _keep(run, config, *played),
            check=_check(run, policy, opened.of(config.held_out_split), config),
            checkpoints=checkpoints,
        )
    save_model(policy.model, policy.tokenizer, run.model)
    run.write_cost(trained.cost, checks=trained.checks)
    checkpoints.clear()
    return trained


def _keep(
    run: RunDirectory,
    config: TrainOnlineConfig,
    iteration: int,
    groups: Sequence[GrownGroup],
    credits: Sequence[Credit | None],
) -> None:
    """Append the groups to the rollout log, their trees where the iteration's are kept, and what the gate last said."""
    kept = [
        _kept_tree(f"{iteration}.{number}", iteration, group, credit)
        for number, (group, credit) in enumerate(zip(groups, credits, strict=True))
    ]
    run.append(rollouts.FILE_NAME, (rollouts.group_to_json(tree.group()) for tree in kept))
    if trees.is_kept(iteration, config.train.iterations, config.keep_trees):
        run.append(trees.FILE_NAME, (tree.to_json() for tree in kept))
    said = [
        {
            "iteration": iteration,
            "group": tree.id,
            "task": tree.tree.task_id,
            "cut": tree.cut,
            **tree.meta["gate"],
            "rewards": [rollout.reward for rollout in tree.group().rollouts],
        }
        for tree in kept
        if "gate" in tree.meta
    ]
    run.append(GATE_LOG, said)


def _kept_tree(name: str, iteration: int, group: GrownGroup, credit: Credit | None) -> KeptTree:
    said = group.decision
    return KeptTree(
        id=name,
        iteration=iteration,
        tree=group.tree,
        rewards=group.rewards,
        credit=credit,
        task_type=getattr(group.task, "task_type", None),
        tools=group.task.tools,
        cut=group.cut,
        meta={}
        if said is None
        else {"gate": {"audited": said.audited, "reason": said.reason, "numbers": dict(said.numbers)}},
    )


def _check(run: RunDirectory, policy: Policy, tasks: Sequence[Environment], config: TrainOnlineConfig):
    """Play of the held-out tasks, their outcomes kept task by task."""
    episodes = config.train.rollouts.episodes
    settings = EvaluateConfig(
        max_turns=episodes.max_turns,
        max_tokens=episodes.sampling.max_tokens,
        max_context=episodes.max_context,
    )

    def check(iteration: int) -> tuple[dict[str, Any], Cost]:
        summary, cost = play(policy, tasks, settings, config.held_out_temperature, config.held_out_samples, quiet=True)
        keep_held_out(run, iteration, summary)
        held_out = {name: value for name, value in summary.items() if name in SAID or name.endswith("_share")}
        return {f"held_out_{name}": value for name, value in held_out.items()}, cost

    return check


def keep_held_out(run: RunDirectory, iteration: int, summary: dict[str, Any]) -> None:
    """Append what every held-out task gave at the check after `iteration`."""
    rows = [{"iteration": iteration, "task": row["task"], "rewards": row["rewards"]} for row in summary["outcomes"]]
    run.append(HELD_OUT, rows)
