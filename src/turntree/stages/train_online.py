"""`turntree train online`: end-to-end GRPO on whole episodes, with the gate and the group filters as options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turntree.branching.config import BranchConfig, build_brancher
from turntree.core.config import to_mapping
from turntree.core.cost import Cost
from turntree.core.errors import ConfigError
from turntree.core.labels import Credit
from turntree.core.protocols import Gate
from turntree.engines.checkpoint import save_model
from turntree.environments.processes import ProcessPoolConfig
from turntree.gates.compose import RandomGate
from turntree.gates.config import GateConfig, build_gate
from turntree.logs import rollouts, trees
from turntree.logs.trees import KeptTree
from turntree.observe.run import RunDirectory, open_run, progress
from turntree.rollouts.groups import GrownGroup
from turntree.stages.arena import Arena, open_arena
from turntree.stages.evaluate import EvaluateConfig, play
from turntree.stages.policy import Device, Policy, load_policy
from turntree.stages.questions import QuestionsConfig
from turntree.stages.tasks import GamesConfig
from turntree.training.checkpoints import CheckpointConfig, resume
from turntree.training.head import vocabulary_size
from turntree.training.isolation import check_path_isolation
from turntree.training.online import OnlineConfig, Parts, TrainedOnline, train_online

GATE_LOG, HELD_OUT = "gate.jsonl", "held_out.jsonl"


@dataclass(frozen=True, kw_only=True)
class RandomCutConfig:
    """The control of an experiment: cuts a share `rate` of the groups that reach `turn`, whatever they do."""

    turn: int = 10
    rate: float = 0.2


@dataclass(frozen=True, kw_only=True)
class TrainOnlineConfig:
    """`games` are trained on; `held_out`, which should be of another split, are played `held_out_samples` times at
    `held_out_temperature` (0: greedily) every `train.check_every` iterations. With `questions` these are asked instead
    of any game. `gate` and `random_cut` exclude each other. `branching` needs `train.rollouts.initial_rollouts` below
    the group size. `environments` says where games are stepped: in worker processes, which are killed and rebuilt where
    they hang or die, or (`workers` 0) in this one; that changes no result. `keep_trees`: of how many iterations, spread
    evenly, whole trees are written (None: all; 0: none)."""

    model: str = "default"
    games: GamesConfig = field(default_factory=lambda: GamesConfig(split="train", count=400))
    held_out: GamesConfig = field(default_factory=lambda: GamesConfig(split="dev", count=100))
    held_out_temperature: float = 0.0
    held_out_samples: int = 1
    questions: QuestionsConfig | None = None
    train: OnlineConfig = field(default_factory=OnlineConfig)
    branching: BranchConfig | None = None
    gate: GateConfig | None = None
    random_cut: RandomCutConfig | None = None
    keep_trees: int | None = None
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    device: Device = field(default_factory=Device)
    environments: ProcessPoolConfig = field(default_factory=lambda: ProcessPoolConfig(workers=0))

    def __post_init__(self) -> None:
        self.device.check_trainable()
        if self.held_out_samples < 1:
            raise ConfigError("must be at least 1", field="held_out_samples")
        trees.check_keep(self.keep_trees)
        if self.gate is not None and self.random_cut is not None:
            raise ConfigError("excludes gate", field="random_cut", hint="set one of them to null")
        self._check_branching()

    def _check_branching(self) -> None:
        rollouts, branching = self.train.rollouts, self.branching
        if (branching is not None) != (rollouts.initial < rollouts.group_size):
            raise ConfigError(
                f"{rollouts.initial} of {rollouts.group_size} rollouts begin independently, with"
                + ("out a brancher" if branching is None else " a brancher that has none left to add"),
                field="train.rollouts.initial_rollouts",
                hint="set it below group_size together with branching, or neither",
            )
        if branching is None:
            return
        if branching.splits_turns and self.train.loss.ratio == "action":
            raise ConfigError(
                "'action' takes the ratio of whole turns, and branches share a part of one",
                field="train.loss.ratio",
                hint="use ratio 'token', or branching.probe_tokens 1",
            )
        if branching.biased and self.train.credit.leaf_weights == "path_weighted":
            raise ConfigError(
                f"forks of {branching.rule!r} are chosen by what came after them, which biases path weights",
                field="train.credit.leaf_weights",
                hint="use 'unit'",
            )

    def build_gate(self) -> Gate | None:
        if self.random_cut is not None:
            return RandomGate(turn=self.random_cut.turn, rate=self.random_cut.rate, seed=self.train.seed)
        return None if self.gate is None else build_gate(self.gate, self.train.seed)


def run_train_online(config: TrainOnlineConfig, out: Path, *, overwrite: bool = False) -> dict[str, Any]:
    """Train; the policy lies in `out/model`, the curves in `out/metrics.jsonl`, every group that was played in
    `out/rollouts.jsonl` (what `turntree audit` and `turntree gate calibrate` read), whole trees in `out/trees.jsonl`,
    what the gate saw and said in `out/gate.jsonl`, held-out outcomes by task in `out/held_out.jsonl`, the bill in
    `out/cost.json`."""
    policy = load_policy(config.model, config.device)
    check_path_isolation(policy.model)
    logs = (rollouts.FILE_NAME, trees.FILE_NAME, GATE_LOG, HELD_OUT)
    with (
        open_arena(config.held_out, config.questions, train=config.games, workers=config.environments) as arena,
        open_run(
            *(out, "train online", to_mapping(config), {**policy.identity, **arena.contents}),
            overwrite=overwrite,
            logs=logs,
        ) as run,
    ):
        trained = _train(run, policy, arena, config)
        rows = run.metrics()
    return {
        "model": str(run.model),
        "iterations": rows[-1]["step"],
        "reward_mean": rows[-1]["reward_mean"],
        "held_out_success": rows[-1].get("held_out_success"),
        "forks": rows[-1]["trees"]["forks"],
        "questions": list(arena.read),
        "saved": trained.savings.counts(),
        "trees_bytes_per_trained_token": trees.bytes_per_trained_token(
            run.path, rows, config.train.iterations, config.keep_trees
        ),
        "cost": trained.cost.counts(),
    }


def _train(run: RunDirectory, policy: Policy, arena: Arena, config: TrainOnlineConfig) -> TrainedOnline:
    """Train from where the run stands to its end, and write what it made; the bill last."""
    reference = policy.reference() if config.train.loss.kl_coefficient > 0 else None  # before a checkpoint is loaded
    checkpoints, done = resume(run, config.checkpoints)
    parts = Parts(
        policy.model,
        reference,
        policy.engine,
        policy.renderer,
        arena.tasks,
        gate=config.build_gate(),
        brancher=None if config.branching is None else build_brancher(config.branching, vocabulary_size(policy.model)),
        pool=arena.pool,
    )
    with progress((), "train online", total=config.train.iterations, initial=done) as bar:

        def log(row: dict[str, Any]) -> None:
            run.log({**row, "timing": {**row.get("timing", {}), **arena.figures()}})
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
            check=_check(run, policy, arena, config),
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
    meta: dict[str, Any] = {}
    if (said := group.decision) is not None:
        meta["gate"] = {"audited": said.audited, "reason": said.reason, "numbers": dict(said.numbers)}
    return KeptTree(
        id=name,
        iteration=iteration,
        tree=group.tree,
        rewards=group.rewards,
        credit=credit,
        task_type=getattr(group.task, "task_type", None),
        tools=group.task.tools,
        cut=group.cut,
        meta=meta,
    )


def _check(run: RunDirectory, policy: Policy, arena: Arena, config: TrainOnlineConfig):
    """Play of the held-out tasks, their outcomes kept task by task."""
    episodes = config.train.rollouts.episodes
    settings = EvaluateConfig(
        max_turns=episodes.max_turns,
        max_tokens=episodes.sampling.max_tokens,
        max_context=episodes.max_context,
        games=config.held_out,
        skills_per_kind=0,
    )

    def check(iteration: int) -> tuple[dict[str, Any], Cost]:
        summary, cost = play(
            policy, arena.held_out, settings, config.held_out_temperature, config.held_out_samples, quiet=True
        )
        keep_held_out(run, iteration, summary)
        held_out = {name: summary[name] for name in ("success", "invalid_share", "turns_per_episode")}
        return {f"held_out_{name}": value for name, value in held_out.items()}, cost

    return check


def keep_held_out(run: RunDirectory, iteration: int, summary: dict[str, Any]) -> None:
    """Append what every held-out task gave at the check after `iteration`."""
    rows = [{"iteration": iteration, "task": row["task"], "rewards": row["rewards"]} for row in summary["outcomes"]]
    run.append(HELD_OUT, rows)
