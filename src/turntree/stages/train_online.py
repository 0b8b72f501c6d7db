"""`turntree train online`: end-to-end GRPO on whole episodes, with the gate and the group filters as options.

One step: `train.loop` (the order) -> `train.online` (what a step does) -> `rollout.service` (draws tasks, credits and
filters groups) -> `rollout.scheduler` (plays them) -> `credit.credit` -> `train.update` -> `pack.packing`,
`train.losses`, `train.optimizer`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from turntree.core import parts
from turntree.core.config import to_mapping
from turntree.core.errors import ConfigError, InputError
from turntree.core.labels import Credit
from turntree.core.messages import Message
from turntree.core.progress import notice
from turntree.core.protocols import Environment, task_of
from turntree.core.tree import RolloutTree
from turntree.engine.limits import EndpointConfig
from turntree.env.processes import ProcessPoolConfig
from turntree.env.tasks import DEV, TRAIN, TaskSet, identity, open_tasks, same_tasks
from turntree.logs import rollouts, trees
from turntree.logs.trees import KeptTree
from turntree.rollout import rewards
from turntree.rollout.groups import GrownGroup
from turntree.rollout.players import require_steppable
from turntree.rollout.scheduler import Scheduler
from turntree.rollout.service import EpisodeGroup, Parts, RolloutService
from turntree.rollout.spread import Listening, Spread, play_groups
from turntree.run import loggers
from turntree.run.folder import HELD_OUT, RunDirectory, open_run
from turntree.stages.config import TrainOnlineConfig
from turntree.stages.evaluate import opened_rewards
from turntree.stages.gradients import reasons, require_rewards
from turntree.stages.held_out import HeldOutTasks, SuccessCheck
from turntree.stages.policy import (
    Policy,
    Speaker,
    load_policy,
    load_renderer,
    open_reference,
    open_speaker,
    policy_name,
)
from turntree.stages.training import on_ranks, run_algorithm
from turntree.stages.workers import Published, check_servers, open_crew
from turntree.train.loop import Row
from turntree.train.online import OnlineGRPO
from turntree.train.ranks import SINGLE, ProcessGroup

GATE_LOG = "gate.jsonl"
_SHOWN = {"reward": "reward_mean", "success": "held_out_success"}
LOGS = (rollouts.FILE_NAME, trees.FILE_NAME, GATE_LOG, HELD_OUT)


@on_ranks
def run_train_online(
    config: TrainOnlineConfig, out: Path, *, overwrite: bool = False, group: ProcessGroup = SINGLE
) -> dict[str, Any]:
    """Train; the policy lies in `out/model`, that of the highest held-out success in `out/best`, the curves in
    `out/metrics.jsonl`, every group that was played in `out/rollouts.jsonl` (what `turntree audit` and `turntree gate
    calibrate` read), whole trees in `out/trees.jsonl`, the gate's input and decisions in `out/gate.jsonl`, held-out
    outcomes by task in `out/held_out.jsonl`, the cost in `out/cost.json`."""
    config = parts.resolved(config)
    named = [parts.resolve("filters", part, field=f"filters.{i}") for i, part in enumerate(config.filters)]
    config = replace(config, filters=tuple(named))
    loggers.check(config.loggers)
    filters, estimator = config.build_filters(), config.build_estimator()
    config.build_gate()  # one that could never cut is refused before the model is loaded
    policy = load_policy(policy_name(config.model, config.environment), config.device)
    reference, pulls = open_reference(config, policy)
    # what cannot be is refused before there is a folder of the run, which the corrected command would not take
    check_servers(config, policy)
    shared = _trains_on_trees(policy, config, group.size, reference)
    with contextlib.ExitStack() as stack:
        workers = None if config.cluster.workers else config.workers  # else the rollout workers start them
        opened, playing = stack.enter_context(_open_playing(config, policy, policy.source, policy.vocabulary, workers))
        _require_steppable(config, playing.tasks)
        inputs = {
            **policy.identity,
            **pulls,
            **parts.identities(config),
            **identity(config.environment, opened),
            **{f"filters.{i}": parts.identity("filters", part) for i, part in enumerate(config.filters)},
            **rewards.identity(config.rewards, playing.rewards),
        }
        run = stack.enter_context(
            open_run(out, "train online", to_mapping(config), inputs, overwrite=overwrite, logs=LOGS)
        )
        crew = stack.enter_context(open_crew(__name__, config, policy))
        weights = None if crew is None else Published(crew, policy, config.train.max_off_policy_steps)
        spread = None
        if weights is not None:
            spread = partial(Spread, weights.crew, tasks=playing.tasks, weights=weights, brancher=playing.brancher)
        learner = policy.trainee(shared, group, reference)
        components = replace(playing, policy=learner, filters=filters, estimator=estimator, spread=spread)
        algorithm = OnlineGRPO(components, config.train)
        overlap, success = _Overlap(), None
        if DEV in opened.tasks:
            tasks = _held_out(config, opened)
            success = SuccessCheck(run, policy, tasks, algorithm, partial(overlap.add, DEV))
        trained = run_algorithm(
            run,
            policy,
            algorithm,
            config,
            shown=_SHOWN if config.gate is None else {**_SHOWN, "cut": "groups_cut"},
            keep=partial(_keep, run, config, overlap),
            check=success,
            warnings=_never_forks,
        )
    rows = run.metrics()
    require_rewards(rows)
    last = rows[-1]
    return {
        "model": str(run.model),
        "iterations": last["step"],
        "reward_mean": last["reward_mean"],
        "held_out_success": last.get("held_out_success"),
        "success": None if success is None else success.result(policy.source),
        "stopped": trained.stopped,
        **{name: sum(row.get(name, 0) for row in rows) for name in ("groups", "groups_cut")},
        "gate_precision": last.get("gate_precision"),
        "forks": last["trees"]["forks"],
        "structural_saving": algorithm.account.structural_saving,
        **{name: reasons(rows, name) for name in ("groups_dropped", "prompts_skipped")},
        "censored": reasons(rows),
        "rollouts": sum(reasons(rows, "stops").values()),
        "read": list(opened.read),
        "cost": trained.cost.counts(),
    }


@contextlib.contextmanager
def _open_playing(
    config: TrainOnlineConfig, policy: Any, source: str, vocabulary: int, workers: ProcessPoolConfig | None
) -> Iterator[tuple[TaskSet, Parts[Any]]]:
    """The tasks, and what plays them, in the command and in its workers."""
    gate, brancher = config.build_gate(), config.build_brancher(vocabulary)
    tasks = config.check.wanted
    opening = partial(open_tasks, config.environment, seed=config.task_seed, model=source, workers=workers)
    with contextlib.ExitStack() as stack:
        functions = stack.enter_context(opened_rewards(config.rewards))
        try:
            opened = stack.enter_context(opening({TRAIN: config.count} | ({DEV: tasks} if tasks else {})))
        except InputError as error:
            if config.check.tasks is not None:
                raise
            opened = stack.enter_context(opening({TRAIN: config.count}))
            notice(f"success is not looked at: {error}")
        figures = opened.figures
        yield opened, Parts(policy, opened.of(TRAIN), gate, brancher, opened.pool, rewards=functions, timing=figures)


def _require_steppable(config: TrainOnlineConfig, tasks: Sequence[Environment]) -> None:
    stepping = {"cluster.workers": config.cluster.workers, "gate": config.gate, "brancher": config.brancher}
    for key, used in stepping.items():
        if used:
            require_steppable(tasks, key)


def _trains_on_trees(policy: Policy, config: TrainOnlineConfig, ranks: int, reference: Any) -> bool:
    """Whether trees are packed. Raises where an episode may be too long to train on, which would end the run hours
    later (`ConfigError`), and what `shares_prefixes` raises."""
    longest = min(config.train.max_context, policy.engine.max_context)
    if longest > config.train.max_tokens:
        problem = f"{config.train.max_tokens} tokens are fewer than an episode may have ({longest})"
        hint = f"set it to {longest}, or train.max_context to {config.train.max_tokens}"
        raise ConfigError(problem, field="train.max_tokens", hint=hint)
    return policy.trains_on_trees(longest, field="train.max_context", ranks=ranks, reference=reference)


@contextlib.contextmanager
def open_rollouts(config: TrainOnlineConfig, endpoint: EndpointConfig | None = None) -> Iterator[RolloutService]:
    """The rollouts of such a run, without an end, for another trainer (`turntree_interop.trl`): sampled from a server,
    where the trainer puts its weights, or from the policy in this process. Raises `ConfigError` for what only this
    command does."""
    config = parts.resolved(config)
    if config.cluster.workers:
        hint = "leave it out"
        raise ConfigError("goes with `turntree train online` only", field="cluster.workers", hint=hint)
    if config.train.credit.advantages == "reinforce_pp":
        problem = "compares over a batch, and another trainer gets its groups one by one"
        raise ConfigError(problem, field="train.credit.advantages", hint="use 'grpo' or 'rloo'")
    model = config.model if endpoint else policy_name(config.model, config.environment)
    with open_speaker(model, endpoint, config.device) as speaker:
        tokenizer, _ = load_renderer(endpoint.tokenizer if endpoint else model, config.device.renderer)
        with _open_playing(config, speaker, model, len(tokenizer), config.workers) as (_, playing):
            _require_steppable(config, playing.tasks)
            own = config.build_estimator() or config.train.estimator
            components = replace(playing, filters=config.build_filters())
            yield RolloutService(components, replace(config.train.played, last=None), own)


CONFIG = TrainOnlineConfig


@contextlib.contextmanager
def open_player(
    config: TrainOnlineConfig, policy: Policy | Speaker, settings: dict[str, Any]
) -> Iterator[Callable[[Any], Any]]:
    """What a worker of this stage plays a unit with (`stages.workers`)."""
    with _open_playing(config, policy, settings["model"], settings["vocabulary"], config.workers) as (_, playing):

        def play(unit: dict[str, Any]) -> dict[str, Any]:
            scheduler = Scheduler(
                policy.engine,
                policy.renderer,
                unit["rollouts"],
                pool=playing.pool,
                gate=playing.gate,
                brancher=None if playing.brancher is None else Listening(playing.brancher),
                rewards=playing.rewards,
            )
            return play_groups(scheduler, playing.tasks, unit)

        yield play


class _Overlap:
    """How the tasks of both splits began so far."""

    def __init__(self) -> None:
        self._openings: dict[str, dict[str, tuple[Message, ...]]] = {}
        self._warned = False

    def add(self, split: str, trees: Iterable[RolloutTree]) -> None:
        """Warn once of tasks that are in both under two ids."""
        self._openings.setdefault(split, {}).update({tree.task_id: tree[0].messages for tree in trees})
        if not self._warned and (same := same_tasks(self._openings)):
            notice(f"warning: {len(same)} held-out tasks tell what a task of training tells, so far ({same[0]})")
            self._warned = True


def _keep(
    run: RunDirectory,
    config: TrainOnlineConfig,
    overlap: _Overlap,
    iteration: int,
    groups: Sequence[EpisodeGroup],
    credits: Sequence[Credit | None],
) -> None:
    """Append the groups to the rollout log, their trees if the iteration's are kept, and the gate's last decisions."""
    overlap.add(TRAIN, (group.tree for group in groups))
    kept = [
        _kept_tree(f"{iteration}.{number}", iteration, group.grown, credit)
        for number, (group, credit) in enumerate(zip(groups, credits, strict=True))
    ]
    run.append(rollouts.FILE_NAME, (rollouts.group_to_json(tree.group()) for tree in kept))
    if trees.is_kept(iteration, config.train.iterations, config.keep_trees):
        run.append(trees.FILE_NAME, (tree.to_json() for tree in kept))
    decisions = [
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
    run.append(GATE_LOG, decisions)


def _never_forks(row: Row) -> Iterator[str]:
    """For the first iteration, if the brancher had no turn to decide about."""
    found = row.get("branching") if row["step"] == 1 else None
    if found and not found["decisions"] and found["refills"] + found["unfilled_leaves"]:
        yield (
            "warning: step 1: no turn could fork: the brancher declined all, or none that follows a tool result is as "
            "long as it looks at (brancher.probe_tokens); rollouts that start anew take the place of branches"
        )


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
        task_type=task_of(group.task).task_type,
        tools=group.task.tools,
        cut=group.cut,
        meta=meta,
    )


def _held_out(config: TrainOnlineConfig, opened: TaskSet) -> HeldOutTasks:
    """They are played as those of the training are, but for the temperature."""
    train = config.train
    episodes = replace(train.episodes, sampling=replace(train.sampling, temperature=config.check.temperature))
    places = train.max_live_rollouts or HeldOutTasks.places
    return HeldOutTasks(config.environment, opened, episodes, config.check.stops, places)
