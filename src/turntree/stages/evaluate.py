"""Evaluate a policy: success on the tasks of an environment (sampled and greedy), and forgetting of other skills."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from turntree.core import parts, seeds
from turntree.core.completion import GenerationRequest, Sampling
from turntree.core.config import Part, to_mapping
from turntree.core.cost import NO_COST, Cost
from turntree.core.errors import ConfigError, InputError
from turntree.core.labels import Rewards
from turntree.core.progress import progress
from turntree.core.protocols import Environment, task_of
from turntree.core.tree import NodeKind, RolloutTree
from turntree.core.verdict import Verdict, censored, most_frequent, tells_success
from turntree.env.tasks import identity, open_tasks
from turntree.logs.trees import KeptTree
from turntree.rollout.live import EpisodeConfig
from turntree.rollout.players import Setting, grow
from turntree.rollout.rewards import RewardSum, build_rewards, figures
from turntree.rollout.rewards import identity as reward_identity
from turntree.run.files import write_json
from turntree.run.jsonl import write_lines
from turntree.run.means import mean, wilson
from turntree.stages.config import EvaluateConfig
from turntree.stages.gradients import remedy
from turntree.stages.policy import Policy, load_policy, policy_name

SCHEMA = "turntree.evaluation/1"


def evaluate(config: EvaluateConfig, out: Path | None = None) -> dict[str, Any]:
    """Play and write `out` (evaluation JSON); returns the same value. With `keep_trees` the trees of all episodes are
    written beside it, as `NAME.trees.jsonl` (without the `.json` of `out`). Raises `InputError`, after writing, where
    every episode was censored."""
    if config.keep_trees and out is None:
        raise ConfigError("needs an output file", field="keep_trees", hint="name one with --out")
    config = parts.resolved(config)
    policy = load_policy(policy_name(config.model, config.environment), config.device)
    result, kept = evaluate_policy(policy, config)
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


def evaluate_policy(policy: Policy, config: EvaluateConfig) -> tuple[dict[str, Any], list[KeptTree]]:
    """The evaluation as a value, and the trees of its episodes."""
    splits = {config.split: config.count}
    with (
        opened_rewards(config.rewards) as functions,
        open_tasks(config.environment, splits, seed=config.task_seed, model=policy.source) as opened,
    ):
        setting = Setting(pool=opened.pool, functions=functions, places=config.max_live_rollouts)
        evaluator = Evaluator(policy, opened.of(config.split), setting, config.seed)
        episodes = EpisodeConfig(
            max_turns=config.max_turns,
            max_context=config.max_context,
            cut_turns=config.cut_turns,
            sampling=Sampling(temperature=config.temperature, max_tokens=config.max_tokens),
        )
        sampled = evaluator.play(episodes, config.samples)
        kept, cost = sampled.trees, sampled.cost
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
            "sampled": sampled.summary,
        }
        if opened.read:
            result["read"] = list(opened.read)
        if config.greedy:
            greedy = evaluator.play(replace(episodes, sampling=replace(episodes.sampling, temperature=0.0)), 1)
            result["greedy"] = greedy.summary
            kept, cost = kept + greedy.trees, cost + greedy.cost
    if config.skills_per_kind:
        result["retention"], more = forgetting(policy, config.skills_per_kind, config.seed)
        cost += more
    result["cost"] = {**cost.counts(), "timing": cost.timing()}
    return result, kept


Grown = list[tuple[RolloutTree, Rewards]]


@dataclass(frozen=True)
class Evaluation:
    """Success over all episodes with Wilson intervals, overall and per task type, the mean reward, what reward
    functions give, and every outcome. `unknown` episodes have a reward and no word on success."""

    summary: dict[str, Any]
    cost: Cost
    trees: list[KeptTree]


@dataclass(frozen=True)
class Evaluator:
    """Plays `tasks`."""

    policy: Policy
    tasks: Sequence[Environment]
    setting: Setting
    seed: int = 0

    def play(self, episodes: EpisodeConfig, samples: int, *, quiet: bool = False) -> Evaluation:
        temperature = episodes.sampling.temperature
        what = "greedy episodes" if temperature == 0 else "sampled episodes"
        with progress((), what, total=len(self.tasks) * samples, quiet=quiet) as bar:
            setting = replace(self.setting, finished=bar.update)
            engine, renderer = self.policy.engine, self.policy.renderer
            grown = grow(self.tasks, engine, renderer, episodes, group_size=samples, seed=self.seed, setting=setting)
        trees = [_kept(temperature, *each) for each in zip(range(len(grown)), self.tasks, grown, strict=True)]
        summary = {"temperature": temperature, **_summary(self.tasks, grown, samples)}
        return Evaluation(summary, sum((tree.cost for tree, _ in grown), NO_COST), trees)


def _summary(tasks: Sequence[Environment], grown: Grown, samples: int) -> dict[str, Any]:
    told = [_of_rollouts(rewards, samples) for _, rewards in grown]
    verdicts = [verdict for own in told for verdict in own]
    known = tells_success(verdicts)
    outcomes = [_outcome(task, tree, own, known) for task, (tree, _), own in zip(tasks, grown, told, strict=True)]
    by_type: dict[str, list[list[float]]] = defaultdict(list)
    for outcome in outcomes:
        by_type[outcome["task_type"]].append(outcome["rewards"])
    return {
        **_share([outcome["rewards"] for outcome in outcomes]),
        **at_k([outcome["rewards"] for outcome in outcomes], samples),
        "by_task_type": {kind: _share(rewards) for kind, rewards in sorted(by_type.items())},
        **_metrics([tree for tree, _ in grown]),
        "reward_mean": mean(verdict.reward for verdict in verdicts),
        **figures(verdicts),
        "turns_per_episode": sum(outcome["turns"] for outcome in outcomes) / (len(outcomes) * samples),
        "censored": sum(outcome["censored"] for outcome in outcomes),
        "unknown": sum(outcome["unknown"] for outcome in outcomes),
        "censored_reasons": censored(verdicts),
        "outcomes": outcomes,
    }


@contextlib.contextmanager
def opened_rewards(rewards: Sequence[Part]) -> Iterator[RewardSum | None]:
    """Reward functions, closed after the block."""
    functions = build_rewards(rewards)
    with contextlib.nullcontext() if functions is None else contextlib.closing(functions):
        yield functions


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


def _outcome(environment: Environment, tree: RolloutTree, told: Sequence[Verdict], known: bool) -> dict[str, Any]:
    """An episode is scored where it came to an end, also where a reward function did not judge it. An environment or
    agent that says nothing about success (`known`) leaves it unknown, whatever a reward function gives."""
    scored = [verdict for verdict in told if known and verdict.success is not None]
    unknown = sum((verdict.success is None or not known) and verdict.reward is not None for verdict in told)
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
    scored = [sum(game) / len(game) for game in games if game]
    low, high = wilson(sum(scored), len(scored))
    return {"success": mean(scored), "low": low, "high": high, "episodes": sum(map(len, games))}


def at_k(games: Sequence[Sequence[float]], samples: int) -> dict[str, dict[str, float]]:
    """Of several episodes a task, `pass_at_k`: that one of k succeeds (Chen et al. 2021), and `pass_hat_k`: that all k
    do (tau-bench), each by its unbiased estimate from the n episodes of a task with c successes, 1 - C(n - c, k) /
    C(n, k) and C(c, k) / C(n, k), as means over the tasks with k episodes or more. At k = 1 both are mean@n."""
    if samples < 2:
        return {}
    counts = [(len(game), round(sum(game))) for game in games]
    found: dict[str, dict[str, float]] = {"pass_at_k": {}, "pass_hat_k": {}}
    for k in range(1, samples + 1):
        whole = [(n, c, math.comb(n, k)) for n, c in counts if n >= k]
        if whole:
            found["pass_at_k"][str(k)] = sum(1 - math.comb(n - c, k) / ways for n, c, ways in whole) / len(whole)
            found["pass_hat_k"][str(k)] = sum(math.comb(c, k) / ways for _, c, ways in whole) / len(whole)
    return found


def forgetting(policy: Policy, per_skill: int, seed: int) -> tuple[dict[str, Any], Cost]:
    """Greedy exact-match accuracy on skills outside the training domain, with the chance level of each."""
    ask = parts.load("quizzes", parts.DEFAULT.name).target
    asked = list(ask(seeds.derive(seed, "retention"), per_skill))
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
        right[question.skill].append(float(question.correct(reply)))
    chance = {question.skill: question.chance for question in asked}
    by_skill = {
        name: {"accuracy": sum(r) / len(r), "chance": chance[name], "questions": len(r)} for name, r in right.items()
    }
    summary = {
        "accuracy": mean(row["accuracy"] for row in by_skill.values()),
        "chance": mean(row["chance"] for row in by_skill.values()),
        "by_skill": by_skill,
    }
    return summary, sum((completion.cost for completion in completions), NO_COST)
