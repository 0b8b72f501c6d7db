"""Evaluate a policy: success on held-out games or questions (sampled and greedy), and retention of other skills."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turntree.core import seeds
from turntree.core.completion import GenerationRequest, Sampling
from turntree.core.config import to_mapping
from turntree.core.cost import NO_COST, Cost
from turntree.core.errors import ConfigError
from turntree.core.labels import Rewards
from turntree.core.protocols import Environment
from turntree.core.tree import NodeKind, RolloutTree
from turntree.domains import skills
from turntree.domains.household.world import NOTHING_HAPPENS
from turntree.logs.trees import KeptTree
from turntree.observe.files import write_json
from turntree.observe.jsonl import write_lines
from turntree.observe.run import progress
from turntree.observe.statistics import wilson
from turntree.rollouts.episodes import EpisodeConfig, grow
from turntree.stages.arena import open_arena
from turntree.stages.policy import Device, Policy, load_policy
from turntree.stages.questions import QuestionsConfig
from turntree.stages.tasks import GamesConfig

SCHEMA = "turntree.evaluation/1"


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """`temperature` is that of the sampled episodes; `greedy` adds a greedy pass. `samples` episodes a game. With
    `questions` those held out of them are asked instead of any game. `keep_trees` writes all episodes, tokens
    included."""

    model: str = "default"
    games: GamesConfig = field(default_factory=GamesConfig)
    questions: QuestionsConfig | None = None
    samples: int = 1
    temperature: float = 1.0
    greedy: bool = True
    max_turns: int = 16
    max_tokens: int = 24
    max_context: int = 4096
    skills_per_kind: int = 100
    seed: int = 0
    keep_trees: bool = False
    device: Device = field(default_factory=Device)

    def __post_init__(self) -> None:
        if self.samples < 1 or self.max_turns < 1 or self.temperature <= 0 or self.skills_per_kind < 0:
            raise ConfigError("samples, max_turns and temperature must be above 0", field="samples")


def evaluate(config: EvaluateConfig, out: Path | None = None) -> dict[str, Any]:
    """Play and write `out` (evaluation JSON); returns the same value. With `keep_trees` the trees of all episodes are
    written beside it, as `NAME.trees.jsonl`."""
    if config.keep_trees and out is None:
        raise ConfigError("needs a file to lie beside", field="keep_trees", hint="name one with --out")
    policy = load_policy(config.model, config.device)
    kept: list[KeptTree] = []
    result = evaluate_policy(policy, config, kept)
    if out is not None:
        write_json(out, result)
        if config.keep_trees:
            write_lines(out.with_suffix(".trees.jsonl"), (tree.to_json() for tree in kept))
    return result


def evaluate_policy(policy: Policy, config: EvaluateConfig, kept: list[KeptTree] | None = None) -> dict[str, Any]:
    """The evaluation as a value. The trees of its episodes are added to `kept`."""
    with open_arena(config.games, config.questions) as arena:
        sampled, cost = play(policy, arena.held_out, config, config.temperature, config.samples, kept=kept)
        result: dict[str, Any] = {
            "schema": SCHEMA,
            "config": to_mapping(config),
            "policy_hash": policy.hash,
            "sampled": sampled,
        }
        if arena.read:
            result["questions"] = list(arena.read)
        if config.greedy:
            result["greedy"], more = play(policy, arena.held_out, config, 0.0, 1, kept=kept)
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
) -> tuple[dict[str, Any], Cost]:
    """Success over all episodes with Wilson intervals, overall and per task type, and every outcome; the trees are
    added to `kept`."""
    sampling = Sampling(temperature=temperature, max_tokens=config.max_tokens)
    episodes = EpisodeConfig(max_turns=config.max_turns, max_context=config.max_context, sampling=sampling)
    what = "greedy games" if temperature == 0 else "sampled games"
    with progress((), what, total=len(environments) * samples, quiet=quiet) as bar:
        grown = grow(
            environments,
            policy.engine,
            policy.renderer,
            episodes,
            group_size=samples,
            seed=config.seed,
            finished=bar.update,
        )
    if kept is not None:
        kept += [_kept(temperature, *each) for each in zip(range(len(grown)), environments, grown, strict=True)]
    outcomes = [
        _outcome(environment, tree, rewards) for environment, (tree, rewards) in zip(environments, grown, strict=True)
    ]
    by_type: dict[str, list[list[float]]] = defaultdict(list)
    for outcome in outcomes:
        by_type[outcome["task_type"]].append(outcome["rewards"])
    commands = sum(outcome["turns"] for outcome in outcomes)
    summary = {
        "temperature": temperature,
        **_share([outcome["rewards"] for outcome in outcomes]),
        "by_task_type": {kind: _share(rewards) for kind, rewards in sorted(by_type.items())},
        "invalid_share": sum(outcome["invalid"] for outcome in outcomes) / commands if commands else None,
        "turns_per_episode": commands / (len(outcomes) * samples),
        "censored": sum(outcome["censored"] for outcome in outcomes),
        "outcomes": outcomes,
    }
    return summary, sum((tree.cost for tree, _ in grown), NO_COST)


def _kept(temperature: float, number: int, environment: Environment, grown: tuple[RolloutTree, Rewards]) -> KeptTree:
    tree, rewards = grown
    return KeptTree(
        id=f"{'sampled' if temperature else 'greedy'}.{number}",
        iteration=0,
        tree=tree,
        rewards=rewards,
        task_type=getattr(environment, "task_type", None),
        tools=tuple(environment.tools),
        meta={"temperature": temperature},
    )


def _outcome(environment: Environment, tree: RolloutTree, rewards: Rewards) -> dict[str, Any]:
    answers = [node.message for node in tree if node.kind is NodeKind.OBSERVATION]
    scored = [verdict for _, verdict in sorted(rewards.verdicts.items()) if verdict.reward is not None]
    return {
        "task": tree.task_id,
        "task_type": getattr(environment, "task_type", ""),
        "rewards": [float(bool(verdict.success)) for verdict in scored],  # success, whatever a task pays for it
        "censored": len(rewards.verdicts) - len(scored),
        "turns": sum(node.kind is NodeKind.COMPLETION for node in tree),
        "invalid": sum(answer is not None and answer.content == NOTHING_HAPPENS for answer in answers),
    }


def _share(games: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Success over all episodes. The interval counts games, not episodes: samples of one game are not independent."""
    rewards = [reward for game in games for reward in game]
    scored = [game for game in games if game]
    low, high = wilson(sum(_mean(game) for game in scored), len(scored))
    return {"success": _mean(rewards) if rewards else None, "low": low, "high": high, "episodes": len(rewards)}


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


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)
