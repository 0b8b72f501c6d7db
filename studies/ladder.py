"""`python studies/run.py ladder`: what is there to win by choosing *where* to fork?

A frozen policy, one step: no training. Before anything is billed, every moment at which a rollout could fork is forked
many times, and the variance of reward between these children is kept. Rollouts draw by (seed, iteration, task, sample,
turn), so the billed arms meet the same moments again, and an oracle may look their variances up. The children that it
saw are never those that it is billed for: the first branch of a fork is left out of what is known. So the oracle knows
the variance, not the outcome, and its forks are as unbiased as a coin's.

The arms fork by the same pace and budget (`decide.branching.rules.Paced`). If the oracle is worth no more than a coin,
no rule that guesses the variance can be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from configs import LadderArm, LadderConfig
from numpy.typing import NDArray
from premise import ForkSeen, against_variance
from theory_spaces import Group, Vector, cosine, gradient_of

from turntree.core.config import to_mapping
from turntree.core.errors import InputError
from turntree.core.outcome import is_zero_variance
from turntree.core.progress import notice
from turntree.core.protocols import BranchDecision, Brancher, Environment, ForkMoment
from turntree.core.tree import NodeKind, RolloutTree
from turntree.credit.config import CreditConfig
from turntree.decide.branching.rules import EntropyBrancher, Paced, RandomBrancher, bounded, drawn
from turntree.env.tasks import TRAIN, TaskSet, identity, open_tasks
from turntree.experiments.paired import claim, over_seeds
from turntree.rollout.accounting import account
from turntree.rollout.scheduler import Scheduler, SchedulerConfig
from turntree.run.files import read_json, write_json
from turntree.stages.policy import Policy, load_policy, policy_name
from turntree.train.config import LossConfig

SCHEMA = "turntree.ladder/1"
_CREDITS = {  # ARPO's soft estimator, and the unbiased one
    "cosine": CreditConfig(),
    "cosine_paths": CreditConfig(leaf_weights="path_weighted", comparison="starts", advantages="rloo"),
}
_BILLED = 2  # children of a measured fork that a billed arm may draw: the incumbent and its first branch
Place = tuple[str, int, int]  # task, sample, turn


def run_ladder(config: LadderConfig, out: Path) -> dict[str, Any]:
    """Measure seed by seed, then compare; `out/summary.json` holds the result, `out/seedN.json` a seed. Seeds that are
    there are not measured again. Raises `InputError` where they are of another configuration or policy."""
    policy = load_policy(policy_name(config.model, config.environment), replace(config.device, prefixes="shared"))
    splits = {TRAIN: config.iterations * config.groups}
    with open_tasks(config.environment, splits, seed=config.task_seed, model=policy.source) as opened:
        made_from = {"policy_hash": policy.hash, "tasks": identity(config.environment, opened)}
        claim(out, {**to_mapping(config), "seeds": [], **made_from})
        stage = _Stage(config, policy, opened)
        true = _reference(stage, out)
        for seed in config.seeds:
            if not (out / f"seed{seed}.json").exists():
                notice(f"ladder: seed {seed}")
                write_json(out / f"seed{seed}.json", _seed(stage, seed, true))
    rows = [read_json(out / f"seed{seed}.json") for seed in config.seeds]
    summary = {"schema": SCHEMA, "policy_hash": policy.hash, "config": to_mapping(config), **summarise(config, rows)}
    write_json(out / "summary.json", summary)
    return summary


@dataclass(frozen=True)
class _Stage:
    config: LadderConfig
    policy: Policy
    opened: TaskSet

    def tasks(self, iteration: int) -> Sequence[Environment]:
        groups = self.config.groups
        return self.opened.of(TRAIN)[iteration * groups : (iteration + 1) * groups]

    def play(
        self, brancher: Brancher | None, size: int, seed: int, iteration: int, refills: bool = True
    ) -> list[Group]:
        """The groups of an iteration, with `size` leaves each."""
        half = self.config.group_size // 2
        rollouts = SchedulerConfig(
            episodes=self.config.episodes,
            group_size=size,
            initial_rollouts=half if brancher else None,
            refills=refills,
            max_live_rollouts=128,
        )
        policy = self.policy
        scheduler = Scheduler(policy.engine, policy.renderer, rollouts, pool=self.opened.pool, brancher=brancher)
        return [
            (grown.tree, grown.rewards)
            for grown in scheduler.run(self.tasks(iteration), seed=seed, iteration=iteration)
        ]

    def gradient(self, groups: Sequence[Group], credit: CreditConfig | None = None) -> Vector:
        loss = LossConfig(normalizer="constant", constant=2000.0, kl_coefficient=0.0, old_logprobs="engine")
        return gradient_of(self.policy, groups, loss, credit)


def _reference(stage: _Stage, out: Path) -> Vector:
    """The gradient of mean reward on the tasks that are billed, from independent rollouts and RLOO, which is
    unbiased."""
    config, file = stage.config, out / "reference.npy"
    if not file.exists():
        unbiased = CreditConfig(advantages="rloo")
        parts = [
            stage.gradient(stage.play(None, config.reference, config.reference_seed, iteration), unbiased)
            for iteration in range(1, config.iterations)
        ]
        whole = file.with_name("reference.part.npy")  # a kill leaves no half of it
        np.save(whole, np.sum(parts, axis=0))
        whole.replace(file)
    return np.load(file)


# branchers


class ForkAt(Brancher):
    """Forks every independent rollout at one turn, into many: how moments are measured."""

    def __init__(self, turn: int, branches: int, shared: int) -> None:
        self.turn, self.branches, self.shared = turn, branches, shared
        self.splits_turns = shared > 0

    def decide(self, moment: ForkMoment) -> BranchDecision | None:
        if moment.turn != self.turn or len(moment.entropies[-1]) <= self.shared or len(moment.key) > 1:
            return None
        return bounded(moment, self.branches, "measured", {}, shared=self.shared)


class OracleBrancher(Paced):
    """Forks where a known value of the moment is highest, at the pace of the others: among the moments of a turn, or
    (`pooled`) of all turns. Equal values are told apart by a coin."""

    def __init__(self, values: Mapping[Place, float], *, branches: int, shared: int, pooled: bool = False) -> None:
        super().__init__(branches=branches, probe_tokens=shared + 1)
        self.values, self.shared, self.pooled = values, shared, pooled

    def decide(self, moment: ForkMoment) -> BranchDecision | None:
        known = self.values.get((moment.task_id, moment.key[0], moment.turn))
        if known is None or len(moment.key) > 1 or len(moment.entropies[-1]) <= self.shared:
            return None
        value = known + 1e-6 * drawn(moment)
        self.tell(moment, value)
        rate = self.paced(moment, self.branches)
        threshold = 0.0 if rate is None else self.threshold(0 if self.pooled else moment.turn, rate)
        numbers = {"value": value}
        if value > threshold:
            return bounded(moment, self.branches, "highest value", numbers, shared=self.shared)
        return BranchDecision(branches=1, reason="lower value", numbers=numbers)


class Foresight(OracleBrancher):
    """Knows the whole rollout: forks it once, at its best moment. Which that is depends on what is sampled later, so
    its forks are biased. It bounds what a rule with one fork a rollout can reach."""

    biased = True

    def decide(self, moment: ForkMoment) -> BranchDecision | None:
        task, sample = moment.task_id, moment.key[0]
        if len(moment.key) > 1 or len(moment.entropies[-1]) <= self.shared:
            return None
        own = {turn: value for (name, start, turn), value in self.values.items() if (name, start) == (task, sample)}
        if not own or moment.turn != max(own, key=lambda turn: (own[turn], -turn)):
            return None
        return bounded(moment, self.branches, "the best of the rollout", {}, shared=self.shared)


def brancher_of(
    arm: LadderArm, config: LadderConfig, values: Mapping[Place, float], vocabulary: int
) -> Brancher | None:
    shared = config.probe_tokens - 1
    match arm:
        case "none":
            return None
        case "coin":
            return RandomBrancher(rate=None, probe_tokens=shared + 1)
        case "entropy":
            return EntropyBrancher(vocabulary=vocabulary, probe_tokens=config.probe_tokens)
        case "oracle":
            return OracleBrancher(values, branches=2, shared=shared)
        case "oracle_pooled":
            return OracleBrancher(values, branches=2, shared=shared, pooled=True)
        case "worst":
            return OracleBrancher({place: -value for place, value in values.items()}, branches=2, shared=shared)
        case "foresight":
            return Foresight(values, branches=2, shared=shared)


# a seed


def _seed(stage: _Stage, seed: int, true: Vector) -> dict[str, Any]:
    config = stage.config
    moments = [row for iteration in range(config.iterations) for row in measured(stage, seed, iteration)]
    if not moments:
        hint = "take a policy that calls tools, in an environment that answers them"
        raise InputError("no rollout comes to a moment at which it could fork", field="environment", hint=hint)
    values = {(row["task"], row["sample"], row["turn"]): row["variance"] for row in moments}
    arms: dict[str, Any] = {}
    for arm in config.arms:
        batches = billed(stage, seed, brancher_of(arm, config, values, stage.policy.model.config.vocab_size))
        arms[arm] = figures([group for batch in batches for group in batch], values)
        for name, credit in _CREDITS.items():
            gradient = np.sum([stage.gradient(batch, credit) for batch in batches], axis=0)
            arms[arm][name] = cosine(gradient, true)
    return {"arms": arms, "moments": moments}


def billed(stage: _Stage, seed: int, brancher: Brancher | None) -> list[list[Group]]:
    """What an arm plays, by iteration, without the first one, which sets its pace."""
    size = stage.config.group_size
    return [stage.play(brancher, size, seed, iteration) for iteration in range(stage.config.iterations)][1:]


def measured(stage: _Stage, seed: int, iteration: int) -> Iterator[dict[str, Any]]:
    """Every moment of an iteration's independent rollouts, forked into children that are not billed: their reward
    variance (unbiased, without the incumbent and the first branch), and what a predictor may know there."""
    config = stage.config
    branches, half = config.children + _BILLED, config.group_size // 2
    for turn in range(2, config.episodes.max_turns + 1):
        brancher = ForkAt(turn, branches, config.probe_tokens - 1)
        found = 0
        for tree, rewards in stage.play(brancher, half * branches, seed, iteration, refills=False):
            for row in _forked(tree, rewards):
                found += 1
                yield row | {"task": tree.task_id, "iteration": iteration, "turn": turn}
        if not found:
            return


def _first_leaf(tree: RolloutTree, node: int) -> int:
    """The leaf that first children lead to: of a fork, the rollout that was forked."""
    while children := tree.children(node):
        node = children[0]
    return node


def _forked(tree: RolloutTree, rewards: Any) -> Iterator[dict[str, Any]]:
    starts = list(tree.starts())
    for point in tree.branch_points():
        children = tree.children(point)
        found = [rewards.of(_first_leaf(tree, child)) for child in children]
        known = [reward for reward in found[_BILLED:] if reward is not None]
        if len(known) < 2:
            continue
        path = tree.path(point)
        start = next(node.id for node in path if node.sampled)
        yield {
            "sample": starts.index(start),
            "variance": float(np.var(known, ddof=1)),
            "rewards": known,
            "features": features(tree, point, children[0]),
        }


def features(tree: RolloutTree, point: int, incumbent: int) -> dict[str, float]:
    """What is known at a moment before the turn is sampled beyond its probe."""
    path = tree.path(point)
    turns = [node for node in path if node.sampled]
    before = [node for node in turns if node.id != point]
    calls = [call for node in before if node.message for call in node.message.tool_calls]
    asked = [(call.name, str(call.arguments)) for call in calls]
    results = [node.message for node in path if node.kind is not NodeKind.PROMPT and not node.sampled and node.message]
    probe = [*((tree[point].entropies or ()) if tree[point].sampled else ()), *(tree[incumbent].entropies or ())[:1]]
    others = [tree[start] for start in tree.starts() if start != turns[0].id]
    alike = [node.token_ids == turns[0].token_ids for node in others]
    return {
        "probe_entropy": float(np.mean(probe)),
        "first_entropy": float(np.mean((turns[0].entropies or (0.0,))[: len(probe)])),
        "turn_before_entropy": float(np.mean(before[-1].entropies or (0.0,))) if before else 0.0,
        "after_python": float(bool(results) and results[-1].name == "python"),
        "calls": float(len(calls)),
        "repeats": float(len(asked) - len(set(asked))),
        "failed_results": float(sum("error" in (result.content or "")[:20] for result in results)),
        "sibling_agreement": float(np.mean(alike)) if alike else 0.0,
    }


def figures(groups: Sequence[Group], values: Mapping[Place, float]) -> dict[str, Any]:
    """What an arm's trees hold. `variance` is that between the two children of a fork, half their squared difference;
    `known` the variance that was measured at the moment that was forked."""
    totals = [account(tree) for tree, _ in groups]
    calls = sum(one.calls_fresh for one in totals)
    forks: list[tuple[int, float, float | None]] = []
    for tree, rewards in groups:
        starts = list(tree.starts())
        for point in tree.branch_points():
            children = tree.children(point)
            pair = [rewards.of(_first_leaf(tree, child)) for child in children]
            if len(pair) != 2 or pair[0] is None or pair[1] is None:
                continue
            turn = tree[children[0]].turn
            start = next(node.id for node in tree.path(children[0]) if node.sampled)
            forks.append((turn, (pair[0] - pair[1]) ** 2 / 2, values.get((tree.task_id, starts.index(start), turn))))
    variances = [variance for _, variance, _ in forks]
    mixed = sum(not is_zero_variance(list(rewards.scored().values())) for _, rewards in groups)
    known = [value for _, _, value in forks if value is not None]
    return {
        "groups": len(groups),
        "calls": calls,
        "tokens": sum(one.tokens_fresh for one in totals),
        "leaves": sum(one.leaves for one in totals),
        "refills": sum(one.refills for one in totals),
        "forks": len(forks),
        "forks_by_turn": dict(sorted(Counter(str(turn) for turn, _, _ in forks).items())),
        "children_differ": float(np.mean([variance > 1e-8 for variance in variances])) if forks else None,
        "fork_variance": float(np.mean(variances)) if forks else None,
        "known_variance": float(np.mean(known)) if known else None,
        "variance_per_1000_calls": 1000 * sum(variances) / max(1, calls),
        "mixed_groups": mixed / len(groups),
    }


# the comparison

_COMPARED = (
    "children_differ",
    "fork_variance",
    "variance_per_1000_calls",
    "mixed_groups",
    "cosine",
    "cosine_paths",
    "calls",
)


def summarise(config: LadderConfig, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means of every arm with t intervals over seeds (of rollouts: the tasks are the same), and paired differences from
    the coin."""
    arms: dict[str, Any] = {}
    differences: dict[str, Any] = {}
    for arm in config.arms:
        ones = [row["arms"][arm] for row in rows]
        numbers = [key for key in ones[0] if any(isinstance(one[key], float | int) for one in ones)]
        arms[arm] = {key: over_seeds([one[key] for one in ones if one[key] is not None]) for key in numbers}
        turns = sum((Counter(one["forks_by_turn"]) for one in ones), Counter[str]())
        arms[arm]["forks_by_turn"] = {turn: count / turns.total() for turn, count in sorted(turns.items())}
        if arm != "coin" and "coin" in config.arms:
            pairs = {
                key: [(row["arms"][arm].get(key), row["arms"]["coin"].get(key)) for row in rows] for key in _COMPARED
            }
            found = {key: [one - coin for one, coin in each if None not in (one, coin)] for key, each in pairs.items()}
            differences[f"{arm} - coin"] = {key: over_seeds(each) for key, each in found.items() if each}
    moments = [row for seed, each in zip(config.seeds, rows, strict=True) for row in _of_seed(each["moments"], seed)]
    return {
        "seeds": list(config.seeds),
        "arms": arms,
        "differences": differences,
        "moments": _spread(moments),
        "predictors": predictors(moments),
    }


def _of_seed(moments: Sequence[Mapping[str, Any]], seed: int) -> Iterator[dict[str, Any]]:
    return ({**row, "seed": seed} for row in moments)


def _spread(moments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How unequal moments are: the share in which no two children differ, and the mean variance by turn."""
    variances = np.array([row["variance"] for row in moments])
    by_turn = {
        str(turn): float(np.mean([row["variance"] for row in moments if row["turn"] == turn]))
        for turn in sorted({row["turn"] for row in moments})
    }
    top = np.sort(variances)[::-1][: max(1, len(variances) // 3)]
    return {
        "moments": len(moments),
        "mean": float(variances.mean()),
        "none": float((variances < 1e-8).mean()),
        "upper_third": float(top.mean()),
        "by_turn": by_turn,
    }


def lines(result: Mapping[str, Any]) -> Iterable[str]:
    spread = result["moments"]
    yield (
        f"{spread['moments']:,} moments: variance between children {spread['mean']:.3f}, {spread['none']:.0%} without "
        f"any, {spread['upper_third']:.3f} in the upper third"
    )
    for arm, row in result["arms"].items():
        told = f"{arm:13s} {row['calls']['mean']:,.0f} calls, cosine with the true gradient {row['cosine']['mean']:.3f}"
        if "fork_variance" in row:
            told += (
                f", children differ {row['children_differ']['mean']:.1%}, variance {row['fork_variance']['mean']:.4f}"
            )
        yield told
    for pair, row in result["differences"].items():
        told = [
            f"{key} {_interval(one)}" for key, one in row.items() if key in ("fork_variance", "cosine", "cosine_paths")
        ]
        yield f"{pair}: " + ", ".join(told)
    for name in ("entropy", "learned", "history", "learned_with_history"):
        if found := result["predictors"][name]:
            low, high = found["spearman_interval"]
            told = f"rank correlation with the variance {found['spearman']:.2f} [{low:.2f}, {high:.2f}]"
            yield f"{name.replace('_', ' ')}: {told}"


def _interval(row: Mapping[str, Any]) -> str:
    told = f"{row['mean']:+.4f}"
    return told if row["low"] is None else f"{told} [{row['low']:+.4f}, {row['high']:+.4f}]"


# what can be known of a moment's variance before it is forked


def predictors(moments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What can be known of a moment's variance: rank correlation within turns, and the variance in the upper over the
    lower half (intervals over questions). Of entropy; of the question's own history, the mean variance of its moments
    under the other seeds; and of a Bayesian linear regression that never saw the question, on `features` alone
    (`learned`) and with the history."""
    names = sorted(moments[0]["features"])
    inputs = np.array([[row["features"][name] for name in names] for row in moments])
    turns = np.array([row["turn"] for row in moments])
    inputs = np.column_stack([inputs, turns, turns == 2, turns == 3])
    past = _history(moments)
    scores = {
        "entropy": np.array([row["features"]["probe_entropy"] for row in moments]),
        "learned": _held_out(moments, inputs),
        "history": past,
        "learned_with_history": _held_out(moments, np.column_stack([inputs, past])),
    }
    return {"features": names} | {name: _against(moments, score) for name, score in scores.items()}


def _history(moments: Sequence[Mapping[str, Any]]) -> NDArray[np.float64]:
    """Of each moment's question under the other seeds; the mean of all where there is nothing."""
    seen: dict[str, dict[int, list[float]]] = {}
    for row in moments:
        seen.setdefault(row["task"], {}).setdefault(row.get("seed", 0), []).append(row["variance"])
    overall = float(np.mean([row["variance"] for row in moments]))

    def elsewhere(row: Mapping[str, Any]) -> float:
        others = [one for seed, found in seen[row["task"]].items() if seed != row.get("seed", 0) for one in found]
        return float(np.mean(others)) if others else overall

    return np.array([elsewhere(row) for row in moments])


def _held_out(moments: Sequence[Mapping[str, Any]], inputs: NDArray[np.float64], folds: int = 5) -> NDArray[np.float64]:
    """Predictions for each fifth of the questions from the others."""
    spread = inputs.std(axis=0)
    inputs = np.column_stack([(inputs - inputs.mean(axis=0)) / np.where(spread > 0, spread, 1.0), np.ones(len(inputs))])
    variances = np.array([row["variance"] for row in moments])
    tasks = sorted({row["task"] for row in moments})
    fold = np.array([tasks.index(row["task"]) % folds for row in moments])
    found = np.zeros(len(moments))
    for number in range(folds):
        held = fold == number
        if held.any() and not held.all():
            found[held] = inputs[held] @ posterior(inputs[~held], variances[~held])
    return found


def posterior(inputs: NDArray[np.float64], targets: NDArray[np.float64], prior: float = 1.0) -> NDArray[np.float64]:
    """Mean weights of a Bayesian linear regression with normal prior and noise (Bishop 2006, 3.53); the noise has the
    variance of the targets."""
    noise = float(targets.var()) or 1.0
    precision = np.eye(inputs.shape[1]) / prior + inputs.T @ inputs / noise
    return np.asarray(np.linalg.solve(precision, inputs.T @ targets / noise), dtype=float)


def _against(moments: Sequence[Mapping[str, Any]], score: NDArray[np.float64]) -> dict[str, Any] | None:
    seen = [
        ForkSeen(row["task"], row["turn"], float(value), 0.0, tuple(row["rewards"]))
        for row, value in zip(moments, score, strict=True)
    ]
    found = against_variance(seen, resamples=500).get("entropy")
    return found if found and found["spearman"] is not None else None
