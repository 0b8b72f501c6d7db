"""Evaluate a policy: success on the tasks of an environment (sampled and greedy), and retention of other skills."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from turntree.cluster.crew import Crew, UnitLost
from turntree.core import parts, seeds
from turntree.core.completion import GenerationRequest, Sampling
from turntree.core.config import from_mapping, to_mapping
from turntree.core.cost import NO_COST, Cost
from turntree.core.errors import ConfigError, InputError
from turntree.core.labels import Rewards
from turntree.core.progress import progress
from turntree.core.protocols import Environment, task_of
from turntree.core.tree import NodeKind, RolloutTree
from turntree.core.verdict import Verdict, censored, most_frequent
from turntree.environments.pool import EnvironmentPool
from turntree.environments.tasks import identity, open_tasks
from turntree.logs.trees import KeptTree
from turntree.observe.files import write_json
from turntree.observe.jsonl import write_lines
from turntree.observe.statistics import wilson
from turntree.rollouts.live import EpisodeConfig
from turntree.rollouts.players import grow, require_rendered, require_steppable
from turntree.rollouts.rewards import RewardSum, build_rewards, figures
from turntree.rollouts.rewards import identity as reward_identity
from turntree.rollouts.spread import labelled, lost, numbered, unlabelled
from turntree.stages import skills
from turntree.stages.config import EvaluateConfig
from turntree.stages.policy import Policy, load_policy, policy_name
from turntree.stages.unrewarded import remedy
from turntree.stages.workers import open_crew, require_policy

_TASKS = 8  # that a worker plays in one batch
SCHEMA = "turntree.evaluation/1"


def evaluate(config: EvaluateConfig, out: Path | None = None) -> dict[str, Any]:
    """Play and write `out` (evaluation JSON); returns the same value. With `keep_trees` the trees of all episodes are
    written beside it, as `NAME.trees.jsonl` (without the `.json` of `out`). Raises `InputError`, after writing, where
    every episode was censored."""
    if config.keep_trees and out is None:
        raise ConfigError("needs an output file", field="keep_trees", hint="name one with --out")
    config = parts.resolved(config)
    policy = load_policy(policy_name(config.model, config.environment), config.device)
    kept: list[KeptTree] = []
    with open_crew(__name__, config, policy.identity) as crew:
        result = evaluate_policy(policy, config, kept, crew)
    if out is not None:
        write_json(out, result)
        if config.keep_trees:
            name = f"{out.name.removesuffix('.json')}.trees.jsonl"  # ev-0.5 and ev-0.7 have files of their own
            write_lines(out.with_name(name), (tree.to_json() for tree in kept))
    sampled = result["sampled"]
    if sampled["censored"] == len(sampled["outcomes"]) * config.samples > 0:
        why = sampled["censored_reasons"]
        raise InputError(f"no episode has an outcome ({most_frequent(why)})", hint=remedy(why))
    return result


def evaluate_policy(
    policy: Policy, config: EvaluateConfig, kept: list[KeptTree] | None = None, crew: Crew | None = None
) -> dict[str, Any]:
    """The evaluation as a value. The trees of its episodes are added to `kept`."""
    splits = {config.split: config.count}
    with (
        opened_rewards(config) as functions,
        open_tasks(config.environment, splits, seed=config.task_seed, model=policy.source) as opened,
    ):
        tasks = opened.of(config.split)
        if crew is not None:
            require_steppable(tasks, "cluster.workers")
        told: dict[str, Any] = {"kept": kept, "crew": crew, "pool": opened.pool, "functions": functions}
        sampled, cost = play(policy, tasks, config, config.temperature, config.samples, **told)
        result: dict[str, Any] = {
            "schema": SCHEMA,
            "config": to_mapping(config),
            "inputs": {
                **policy.identity,
                **parts.identities(config),
                **identity(config.environment, opened),
                **reward_identity(config.rewards, functions),
            },
            "policy_hash": policy.hash,
            "sampled": sampled,
        }
        if opened.read:
            result["read"] = list(opened.read)
        if config.greedy:
            result["greedy"], more = play(policy, tasks, config, 0.0, 1, **told)
            cost += more
    if config.skills_per_kind:
        result["retention"], more = retention(policy, config.skills_per_kind, config.seed)
        cost += more
    result["cost"] = {**cost.counts(), "timing": cost.timing()}
    return result


def play(
    policy: Policy,
    environments: Sequence[Environment],
    config: EvaluateConfig,
    temperature: float,
    samples: int,
    *,
    quiet: bool = False,
    kept: list[KeptTree] | None = None,
    crew: Crew | None = None,
    pool: EnvironmentPool | None = None,
    functions: RewardSum | None = None,
) -> tuple[dict[str, Any], Cost]:
    """Success over all episodes with Wilson intervals, overall and per task type, the mean reward, what `functions`
    give, and every outcome; the trees are added to `kept`. `unknown` episodes have a reward and no word on success.
    With `crew` the episodes are played by its workers, with the weights that they loaded."""
    sampling = Sampling(temperature=temperature, max_tokens=config.max_tokens)
    episodes = EpisodeConfig(
        max_turns=config.max_turns, max_context=config.max_context, cut_turns=config.cut_turns, sampling=sampling
    )
    what = "greedy episodes" if temperature == 0 else "sampled episodes"
    with progress((), what, total=len(environments) * samples, quiet=quiet) as bar:
        if crew is not None:
            grown = _spread(crew, environments, episodes, samples, config.seed, bar.update)
        else:
            grown = grow(
                environments,
                policy.engine,
                policy.renderer,
                episodes,
                group_size=samples,
                seed=config.seed,
                pool=pool,
                finished=bar.update,
                functions=functions,
                places=config.max_live_rollouts,
            )
    if kept is not None:
        kept += [_kept(temperature, *each) for each in zip(range(len(grown)), environments, grown, strict=True)]
    outcomes = [
        _outcome(environment, tree, rewards, samples)
        for environment, (tree, rewards) in zip(environments, grown, strict=True)
    ]
    verdicts = [verdict for _, rewards in grown for verdict in _of_rollouts(rewards, samples)]
    by_type: dict[str, list[list[float]]] = defaultdict(list)
    for outcome in outcomes:
        by_type[outcome["task_type"]].append(outcome["rewards"])
    turns = sum(outcome["turns"] for outcome in outcomes)
    summary = {
        "temperature": temperature,
        **_share([outcome["rewards"] for outcome in outcomes]),
        "by_task_type": {kind: _share(rewards) for kind, rewards in sorted(by_type.items())},
        **_metrics([tree for tree, _ in grown]),
        "reward_mean": _mean_or_none(verdict.reward for verdict in verdicts if verdict.reward is not None),
        **figures(verdicts),
        "turns_per_episode": turns / (len(outcomes) * samples),
        "censored": sum(outcome["censored"] for outcome in outcomes),
        "unknown": sum(outcome["unknown"] for outcome in outcomes),
        "censored_reasons": censored(verdicts),
        "outcomes": outcomes,
    }
    return summary, sum((tree.cost for tree, _ in grown), NO_COST)


@contextlib.contextmanager
def opened_rewards(config: EvaluateConfig) -> Iterator[RewardSum | None]:
    """The reward functions of an evaluation, closed after the block."""
    functions = build_rewards(config.rewards)
    try:
        yield functions
    finally:
        if functions is not None:
            functions.close()


@contextlib.contextmanager
def worker(settings: dict[str, Any]) -> Iterator[Callable[[dict[str, Any]], Any]]:
    """What a worker of this stage holds (`stages.workers`)."""
    config = from_mapping(EvaluateConfig, settings["config"])
    policy = load_policy(policy_name(config.model, config.environment), config.device)
    require_policy(settings, policy.identity)
    splits = {config.split: config.count}
    with (
        opened_rewards(config) as functions,
        open_tasks(config.environment, splits, seed=config.task_seed, model=policy.source) as opened,
    ):

        def play(unit: dict[str, Any]) -> list[dict[str, Any]]:
            policy.engine.weights_changed(policy.engine.policy_version)  # from empty caches: see `rollouts.spread`
            tasks = numbered(opened.of(config.split), unit["tasks"])
            episodes = from_mapping(EpisodeConfig, unit["episodes"])
            told: dict[str, Any] = {"group_size": unit["samples"], "seed": unit["seed"], "functions": functions}
            told |= {"places": config.max_live_rollouts}
            grown = grow(tasks, policy.engine, policy.renderer, episodes, pool=opened.pool, part=True, **told)
            return [labelled(*each) for each in grown]

        yield play


def _spread(
    crew: Crew,
    environments: Sequence[Environment],
    episodes: EpisodeConfig,
    samples: int,
    seed: int,
    finished: Callable[[int], object],
) -> list[tuple[RolloutTree, Rewards]]:
    """What `grow` gives, by the workers. A task whose workers were lost is a censored leaf."""
    size = crew.config.batch or _TASKS
    named = [(number, each.task_id) for number, each in enumerate(environments)]
    parts = [named[start : start + size] for start in range(0, len(named), size)]
    said = {"episodes": to_mapping(episodes), "samples": samples, "seed": seed}
    futures = [crew.submit({**said, "tasks": part}) for part in parts]
    grown: list[tuple[RolloutTree, Rewards]] = []
    for part, future in zip(parts, futures, strict=True):
        try:
            grown += [unlabelled(value) for value in future.result()]
        except UnitLost as error:
            grown += [unlabelled(lost(task_id, str(error))) for _, task_id in part]
        finished(samples * len(part))
    require_rendered(grown)  # `grow` sees its part only
    return grown


def _kept(temperature: float, number: int, environment: Environment, grown: tuple[RolloutTree, Rewards]) -> KeptTree:
    tree, rewards = grown
    return KeptTree(
        id=f"{'sampled' if temperature else 'greedy'}.{number}",
        iteration=0,
        tree=tree,
        rewards=rewards,
        task_type=task_of(environment).task_type,
        tools=tuple(environment.tools),
        meta={"temperature": temperature},
    )


def _of_rollouts(rewards: Rewards, samples: int) -> list[Verdict]:
    """One verdict a rollout. A task without a turn, or whose workers were lost, has one leaf for all its rollouts."""
    told = [verdict for _, verdict in sorted(rewards.verdicts.items())]
    return told * samples if len(told) == 1 else told


def _outcome(environment: Environment, tree: RolloutTree, rewards: Rewards, samples: int) -> dict[str, Any]:
    """An episode is scored where it came to an end, also where a reward function did not judge it. An environment or
    agent that says nothing about success leaves it unknown, whatever a reward function gives."""
    told = _of_rollouts(rewards, samples)
    scored = [verdict for verdict in told if verdict.success is not None]
    unknown = sum(verdict.success is None and verdict.reward is not None for verdict in told)
    return {
        "task": tree.task_id,
        "task_type": task_of(environment).task_type or "",
        "rewards": [float(bool(verdict.success)) for verdict in scored],  # success, independent of the task's reward
        "censored": len(told) - len(scored) - unknown,
        "unknown": unknown,
        "turns": sum(node.kind is NodeKind.COMPLETION for node in tree),
    }


def _metrics(trees: Sequence[RolloutTree]) -> dict[str, float]:
    """The environment's own numbers as `NAME_share`: the mean over all of its answers, 0 where one does not tell."""
    answers, told = 0, defaultdict[str, float](float)
    heard = (node for tree in trees for node in tree if node.kind is NodeKind.OBSERVATION)
    for node in (node for node in heard if node.tells):
        answers += 1
        for name, value in node.metrics.items():
            told[name] += value
    return {f"{name}_share": total / answers for name, total in sorted(told.items())}


def _share(games: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Mean success of the games. The interval counts games, not episodes: samples of one game are not independent."""
    scored = [_mean(game) for game in games if game]
    low, high = wilson(sum(scored), len(scored))
    success, episodes = _mean(scored) if scored else None, sum(map(len, games))
    return {"success": success, "low": low, "high": high, "episodes": episodes}


def retention(policy: Policy, per_skill: int, seed: int) -> tuple[dict[str, Any], Cost]:
    """Greedy exact-match accuracy on skills outside the training domain, with the chance level of each."""
    asked = list(skills.questions(seeds.derive(seed, "retention"), per_skill))
    sampling = Sampling(temperature=0.0, max_tokens=24)
    completions = policy.engine.generate(
        [
            GenerationRequest(prompt_ids=policy.renderer.prompt(question.messages), sampling=sampling, seed=0)
            for question in asked
        ]
    )
    right: dict[str, list[float]] = defaultdict(list)
    for question, completion in zip(asked, completions, strict=True):
        reply = policy.renderer.parse(completion.token_ids).content
        right[question.skill].append(float(skills.correct(question, reply)))
    chance = {skill.name: skill.chance for skill in skills.SKILLS}
    by_skill = {name: {"accuracy": _mean(r), "chance": chance[name], "questions": len(r)} for name, r in right.items()}
    summary = {
        "accuracy": _mean([row["accuracy"] for row in by_skill.values()]),
        "chance": _mean([row["chance"] for row in by_skill.values()]),
        "by_skill": by_skill,
    }
    return summary, sum((completion.cost for completion in completions), NO_COST)


def _mean_or_none(values: Iterable[float]) -> float | None:
    values = list(values)
    return _mean(values) if values else None


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)
