"""`turntree train online`: end-to-end GRPO on whole episodes, with the gate and the group filters as options."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from turntree.cluster.crew import Crew
from turntree.core import parts
from turntree.core.config import from_mapping, to_mapping
from turntree.core.cost import Cost
from turntree.core.errors import ConfigError
from turntree.core.labels import Credit
from turntree.core.messages import Message
from turntree.core.progress import notice, progress
from turntree.core.protocols import Brancher, Environment, Filter, task_of
from turntree.core.tree import RolloutTree
from turntree.engines.checkpoint import save_model
from turntree.environments.tasks import TRAIN, TaskSet, identity, open_tasks, same_tasks
from turntree.logs import rollouts, trees
from turntree.logs.trees import KeptTree
from turntree.observe import loggers
from turntree.observe.run import RunDirectory, open_run
from turntree.rollouts import rewards
from turntree.rollouts.groups import GrownGroup
from turntree.rollouts.live import require_whole_paths
from turntree.rollouts.players import require_steppable
from turntree.rollouts.rewards import RewardSum
from turntree.rollouts.scheduler import Scheduler, SchedulerConfig
from turntree.rollouts.spread import Listening, Spread, play_groups
from turntree.stages.cluster import on_ranks
from turntree.stages.config import TrainOnlineConfig
from turntree.stages.evaluate import EvaluateConfig, play
from turntree.stages.inside import open_inside
from turntree.stages.policy import Policy, load_policy, load_trained, policy_name
from turntree.stages.unrewarded import Beginning, reasons, require_rewards
from turntree.stages.workers import Follower, Published, open_crew, require_policy
from turntree.training.checkpoints import extent, resume
from turntree.training.head import vocabulary_size
from turntree.training.inside import Inside
from turntree.training.isolation import shares_prefixes
from turntree.training.online import Parts, TrainedOnline, train_online
from turntree.training.sharded import ALONE, Alone

GATE_LOG, HELD_OUT = "gate.jsonl", "held_out.jsonl"
SAID = ("success", "turns_per_episode")  # of held-out checks, beside what the domain counts for itself


@on_ranks
def run_train_online(
    config: TrainOnlineConfig, out: Path, *, overwrite: bool = False, group: Alone = ALONE
) -> dict[str, Any]:
    """Train; the policy lies in `out/model`, the curves in `out/metrics.jsonl`, every group that was played in
    `out/rollouts.jsonl` (what `turntree audit` and `turntree gate calibrate` read), whole trees in `out/trees.jsonl`,
    the gate's input and decisions in `out/gate.jsonl`, held-out outcomes by task in `out/held_out.jsonl`, the cost in
    `out/cost.json`."""
    config = parts.resolved(config)
    named = [parts.resolve("filters", part, field=f"filters.{i}") for i, part in enumerate(config.filters)]
    config = dataclasses.replace(config, filters=tuple(named))
    loggers.check(config.loggers)
    summed, filters = rewards.build_rewards(config.rewards), config.build_filters()
    config.build_gate()  # refuses one that would do nothing
    policy = load_policy(policy_name(config.model, config.environment), config.device)
    group.load = partial(load_trained, policy.source, config.device)
    # what cannot be is refused before there is a folder of the run, which the corrected command would not take
    require_whole_paths(policy.renderer, config.build_brancher(vocabulary_size(policy.model)))
    config.build_estimator()
    shared = _trains_on_trees(policy, config)
    logs = (rollouts.FILE_NAME, trees.FILE_NAME, GATE_LOG, HELD_OUT)
    splits = _splits(config)
    with contextlib.ExitStack() as stack:
        if summed is not None:
            stack.callback(summed.close)
        processes = None if config.cluster.workers else config.workers  # else the rollout workers start them
        opened = stack.enter_context(
            open_tasks(config.environment, splits, seed=config.task_seed, model=policy.source, workers=processes)
        )
        stepping = {
            "cluster.workers": config.cluster.workers,
            "train.local": config.train.local.judges,
            "gate": config.gate,
            "brancher": config.brancher,
        }
        for key, used in stepping.items():
            if used:
                require_steppable(opened.of(TRAIN), key)
        code = parts.identities(config)
        judging = {**_filters(config), **rewards.identity(config.rewards, summed)}
        inside = stack.enter_context(open_inside(config, policy))
        if inside is not None:
            judging["verifier"] = inside.verifier.name
        inputs = {**policy.identity, **code, **identity(config.environment, opened), **judging}
        train = config.train
        length = extent("train.iterations", train.iterations, train.optimizer, keep_trees=config.keep_trees)
        if train.max_off_policy_steps:
            length = dataclasses.replace(length, fixed="iterations are begun ahead (max_off_policy_steps)")
        run = stack.enter_context(
            open_run(out, "train online", to_mapping(config), inputs, overwrite=overwrite, logs=logs, extent=length)
        )
        crew = stack.enter_context(open_crew(__name__, config, policy.identity))
        trained = _train(run, policy, opened, config, summed, filters, inside, group, crew, shared)
        rows = run.metrics()
        require_rewards(rows)
    return {
        "model": str(run.model),
        "iterations": rows[-1]["step"],
        "reward_mean": rows[-1]["reward_mean"],
        "held_out_success": rows[-1].get("held_out_success"),
        "forks": rows[-1]["trees"]["forks"],
        "censored": reasons(rows),
        "rollouts": sum(sum(row.get("stops", {}).values()) for row in rows),
        "read": list(opened.read),
        "saved": trained.savings.counts(),
        "trees_bytes_per_trained_token": trees.bytes_per_trained_token(
            run.path, rows, config.train.iterations, config.keep_trees
        ),
        "cost": trained.cost.counts(),
    }


def _trains_on_trees(policy: Policy, config: TrainOnlineConfig) -> bool:
    """Whether trees are packed. Raises where an episode may be too long to train on, which would end the run hours
    later (`ConfigError`), and what `shares_prefixes` raises."""
    longest = min(config.train.rollouts.episodes.max_context, policy.engine.max_context)
    if longest > config.train.max_tokens:
        problem = f"{config.train.max_tokens} tokens are fewer than an episode may have ({longest})"
        hint = f"set it to {longest}, or train.rollouts.episodes.max_context to {config.train.max_tokens}"
        raise ConfigError(problem, field="train.max_tokens", hint=hint)
    return shares_prefixes(policy.model, longest, policy.prefixes, field="train.rollouts.episodes.max_context")


def _train(
    run: RunDirectory,
    policy: Policy,
    opened: TaskSet,
    config: TrainOnlineConfig,
    summed: RewardSum | None,
    filters: Sequence[Filter],
    inside: Inside | None,
    group: Alone,
    crew: Crew | None,
    shared: bool,
) -> TrainedOnline:
    """Train from the run's current state to its end, and write the results; the cost last."""
    reference = policy.reference() if config.train.loss.kl_coefficient > 0 else None  # before a checkpoint is loaded
    checkpoints, done = resume(run, config.checkpoints)
    brancher, tasks = config.build_brancher(vocabulary_size(policy.model)), opened.of(TRAIN)
    told = _Told()
    parts = Parts(
        policy.model,
        reference,
        policy.engine,
        policy.renderer,
        tasks,
        gate=config.build_gate(),
        brancher=brancher,
        estimator=config.build_estimator(),
        pool=opened.pool,
        rewards=summed,
        filters=filters,
        spread=None if crew is None else partial(_spread, crew, policy, tasks, brancher),
        inside=inside,
        shared=shared,
    )
    beginning = Beginning(config.train.iterations, run.metrics() if done else (), config.train.stop_without_gradient)
    with (
        loggers.following(run, config.loggers),
        progress((), "train online", total=config.train.iterations, initial=done) as bar,
    ):

        def log(row: dict[str, Any]) -> None:
            run.log({**row, "timing": {**row.get("timing", {}), **opened.figures()}})
            for said in (_never_forks(row), *beginning.said(row)):
                if said:
                    notice(said)
            if row["step"]:
                bar.update(row["step"] - bar.n)
                bar.set_postfix(
                    {key: row[key] for key in ("reward_mean", "groups_cut", "held_out_success") if key in row}
                )

        trained = train_online(
            parts,
            config.train,
            log=log,
            keep=lambda *played: _keep(run, config, told, *played),
            check=_check(run, policy, opened, config, told),
            checkpoints=checkpoints,
            group=group,
        )
    if said := beginning.at_the_end():
        notice(said)
    save_model(policy.model, policy.tokenizer, run.model)
    run.write_cost(trained.cost, checks=trained.checks)
    checkpoints.finish()
    return trained


@contextlib.contextmanager
def worker(settings: dict[str, Any]) -> Iterator[Callable[[dict[str, Any]], Any]]:
    """What a rollout worker of this stage holds (`stages.workers`)."""
    config = from_mapping(TrainOnlineConfig, settings["config"])
    policy = load_policy(policy_name(config.model, config.environment), config.device)
    require_policy(settings, policy.identity)
    splits = _splits(config)
    brancher, follower = config.build_brancher(vocabulary_size(policy.model)), Follower(policy)
    summed, gate = rewards.build_rewards(config.rewards), config.build_gate()
    with open_tasks(
        config.environment, splits, seed=config.task_seed, model=policy.source, workers=config.workers
    ) as opened:

        def play(unit: dict[str, Any]) -> dict[str, Any]:
            follower.take_on(unit)
            scheduler = Scheduler(
                policy.engine,
                policy.renderer,
                from_mapping(SchedulerConfig, unit["rollouts"]),
                pool=opened.pool,
                gate=gate,
                brancher=None if brancher is None else Listening(brancher),
                rewards=summed,
            )
            return play_groups(scheduler, opened.of(TRAIN), unit)

        with contextlib.ExitStack() as stack:
            if summed is not None:
                stack.callback(summed.close)
            yield play


def _spread(
    crew: Crew, policy: Policy, tasks: Sequence[Environment], brancher: Brancher | None, rollouts: SchedulerConfig
) -> Spread:
    return Spread(crew, rollouts, tasks, Published(crew, policy), brancher)


def _filters(config: TrainOnlineConfig) -> dict[str, str]:
    """The code of the filters, for the identity of the run."""
    return {f"filters.{i}": parts.identity("filters", part) for i, part in enumerate(config.filters)}


class _Told:
    """What the tasks of both splits told so far."""

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
    told: _Told,
    iteration: int,
    groups: Sequence[GrownGroup],
    credits: Sequence[Credit | None],
) -> None:
    """Append the groups to the rollout log, their trees if the iteration's are kept, and the gate's last decisions."""
    told.add(TRAIN, (group.tree for group in groups))
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


def _never_forks(row: dict[str, Any]) -> str | None:
    """For the first iteration, if the brancher had no turn to decide about; None for any other row."""
    found = row.get("branching") if row["step"] == 1 else None
    if not found or found["decisions"] or not found["refills"] + found["unfilled_leaves"]:
        return None
    return (
        "warning: step 1: no turn could fork: none that follows a tool result is as long as the brancher looks at "
        "(brancher.probe_tokens); rollouts that start anew take the place of branches"
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


def _splits(config: TrainOnlineConfig) -> dict[str, int]:
    held_out = {config.held_out_split: config.held_out_count} if config.held_out_count else {}
    return {TRAIN: config.count, **held_out}


def _check(run: RunDirectory, policy: Policy, opened: TaskSet, config: TrainOnlineConfig, told: _Told):
    """Play of the held-out tasks, their outcomes kept task by task; None where there are none."""
    if not config.held_out_count:
        return None
    episodes, tasks = config.train.rollouts.episodes, opened.of(config.held_out_split)
    temperature, samples = config.held_out_temperature, config.held_out_samples
    settings = EvaluateConfig(
        max_turns=episodes.max_turns,
        max_tokens=episodes.sampling.max_tokens,
        max_context=episodes.max_context,
        cut_turns=episodes.cut_turns,
        max_live_rollouts=config.train.rollouts.max_live_rollouts or EvaluateConfig.max_live_rollouts,
    )

    def check(iteration: int) -> tuple[dict[str, Any], Cost]:
        kept: list[KeptTree] = []
        summary, cost = play(policy, tasks, settings, temperature, samples, quiet=True, pool=opened.pool, kept=kept)
        told.add(config.held_out_split, (tree.tree for tree in kept))
        keep_held_out(run, iteration, summary)
        held_out = {name: value for name, value in summary.items() if name in SAID or name.endswith("_share")}
        return {f"held_out_{name}": value for name, value in held_out.items()}, cost

    return check


def keep_held_out(run: RunDirectory, iteration: int, summary: dict[str, Any]) -> None:
    """Append the outcome of every held-out task at the check after `iteration`."""
    rows = [{"iteration": iteration, "task": row["task"], "rewards": row["rewards"]} for row in summary["outcomes"]]
    run.append(HELD_OUT, rows)
