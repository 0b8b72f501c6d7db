"""`turntree experiment branching`: is a fork where entropy rises worth more than one anywhere else, or none?

Matched seeds, the same tasks in the same order from the same weights, the same loss divided by a constant. The causal
question is `entropy` against `random`, which forks as often, at the same turns and budgets, by a coin; the economic
one is either against `grpo_calls`, which spends as many tool calls on independent rollouts.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from turntree.branching.config import BranchConfig
from turntree.core.errors import ConfigError
from turntree.observe.files import write_json
from turntree.observe.run import RunDirectory
from turntree.stages.paired import arm_folder, held_out_outcomes, mean, over_seeds, paired_outcomes, run_or_reuse
from turntree.stages.train_online import TrainOnlineConfig

Arm = Literal[
    "grpo",
    "grpo_half",
    "grpo_calls",
    "entropy",
    "entropy_starts",
    "entropy_paths",
    "random",
    "random_paths",
    "arpo_released",
    "tree_grpo",
]
ARMS: tuple[Arm, ...] = ("grpo", "entropy", "random", "entropy_starts", "entropy_paths", "grpo_calls")
COMPARED: tuple[tuple[Arm, Arm], ...] = (
    ("entropy", "random"),
    ("entropy", "grpo_calls"),
    ("entropy", "grpo"),
    ("random", "grpo_calls"),
    ("entropy_paths", "entropy"),
    ("entropy_paths", "entropy_starts"),
    ("entropy_starts", "entropy"),
    ("arpo_released", "entropy"),
    ("tree_grpo", "entropy"),
    ("entropy", "grpo_half"),
    ("grpo", "grpo_calls"),
)


@dataclass(frozen=True, kw_only=True)
class BranchingExperimentConfig:
    """`online` is the arm `entropy`; the others are written as their differences from it.

    `grpo`: as many leaves, all independent; `grpo_half`: the initial rollouts alone; `grpo_calls`: as many independent
    rollouts as make the tool calls that `entropy` made, found from the runs of the same seed. `random`: the paced coin.
    `entropy_starts`: the baseline of initial starts alone; `..._paths`: the same with path weights. `arpo_released` and
    `tree_grpo` as published. All others compare every leaf with every leaf (ARPO's soft estimator).
    """

    online: TrainOnlineConfig
    arms: tuple[Arm, ...] = ARMS
    seeds: tuple[int, ...] = (0, 1, 2, 3)

    def __post_init__(self) -> None:
        branching = self.online.branching
        if branching is None or branching.rule != "entropy":
            raise ConfigError("must be 'entropy': the other arms differ from it", field="online.branching.rule")
        if not branching.paced:
            raise ConfigError("must be true: 'random' keeps the same pace", field="online.branching.paced")
        if self.online.train.loss.normalizer != "constant":
            raise ConfigError(
                "lets the number of leaves change the step size",
                field="online.train.loss.normalizer",
                hint="use 'constant', with about the trained tokens of an iteration as online.train.loss.constant",
            )
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError("must be there, and each once", field="seeds")
        if not self.arms or len(set(self.arms)) < len(self.arms):
            raise ConfigError("must be there, and each once", field="arms")
        if "grpo_calls" in self.arms and not {"grpo", "entropy"} <= set(self.arms):
            raise ConfigError("needs the arms 'grpo' and 'entropy', whose calls it matches", field="arms")


def run_branching_experiment(config: BranchingExperimentConfig, out: Path) -> dict[str, Any]:
    """Run what is not there yet, then compare; `out/summary.json` holds the result."""
    for seed in config.seeds:
        for arm in sorted(config.arms, key=lambda arm: arm == "grpo_calls"):  # it needs the others
            run_or_reuse(configured_arm(config, out, seed, arm), arm_folder(out, seed, arm))
    summary = summarise(config, out)
    write_json(out / "summary.json", summary)
    return summary


def configured_arm(config: BranchingExperimentConfig, out: Path, seed: int, arm: Arm) -> TrainOnlineConfig:
    online = replace(config.online, train=replace(config.online.train, seed=seed))
    branching, rollouts = online.branching, online.train.rollouts
    assert branching is not None
    match arm:
        case "entropy":
            return online
        case "random":
            return replace(online, branching=replace(branching, rule="random", rate=None))
        case "entropy_starts":
            starts = replace(online.train.credit, comparison="starts")
            return replace(online, train=replace(online.train, credit=starts))
        case "entropy_paths":
            return _path_weighted(online)
        case "random_paths":
            return _path_weighted(replace(online, branching=replace(branching, rule="random", rate=None)))
        case "arpo_released":
            return replace(online, branching=BranchConfig(rule="arpo_released", branches=branching.branches))
        case "tree_grpo":
            trees = replace(online.train.credit, comparison="trees")
            posthoc = BranchConfig(rule="posthoc", expansions=rollouts.group_size // rollouts.initial - 1)
            return replace(online, branching=posthoc, train=replace(online.train, credit=trees))
        case "grpo":
            return _independent(online, rollouts.group_size)
        case "grpo_half":
            return _independent(online, rollouts.initial)
        case "grpo_calls":
            return _independent(online, _as_many_calls(config, out, seed))


def _path_weighted(online: TrainOnlineConfig) -> TrainOnlineConfig:
    """Path weights sum to the number of starts instead of leaves: the constant shrinks with them."""
    train = online.train
    credit = replace(train.credit, leaf_weights="path_weighted", comparison="starts")
    assert train.loss.constant is not None  # the configuration was checked
    constant = train.loss.constant * train.rollouts.initial / train.rollouts.group_size
    return replace(online, train=replace(train, credit=credit, loss=replace(train.loss, constant=constant)))


def _independent(online: TrainOnlineConfig, size: int) -> TrainOnlineConfig:
    rollouts = replace(online.train.rollouts, group_size=size, initial_rollouts=None)
    return replace(online, branching=None, train=replace(online.train, rollouts=rollouts))


def _as_many_calls(config: BranchingExperimentConfig, out: Path, seed: int) -> int:
    """The group size whose independent rollouts make the calls of the arm `entropy`."""
    spent = {arm: calls(RunDirectory(arm_folder(out, seed, arm)).metrics()[-1]) for arm in ("grpo", "entropy")}
    return max(2, round(config.online.train.rollouts.group_size * spent["entropy"] / spent["grpo"]))


# the comparison


def calls(row: Mapping[str, Any]) -> float:
    """Fresh tool calls so far."""
    return row["trees"]["calls_fresh"]


def summarise(config: BranchingExperimentConfig, out: Path) -> dict[str, Any]:
    """Per arm what it reached and spent; per pair the paired differences, at matched steps and at matched calls."""
    runs = {arm: [RunDirectory(arm_folder(out, seed, arm)).metrics() for seed in config.seeds] for arm in config.arms}
    held_out = {arm: [held_out_outcomes(arm_folder(out, seed, arm)) for seed in config.seeds] for arm in config.arms}
    base = {
        arm: [held_out_outcomes(arm_folder(out, seed, arm), iteration=0) for seed in config.seeds]
        for arm in config.arms
    }
    pairs = [pair for pair in COMPARED if set(pair) <= set(config.arms)]
    return {
        "seeds": list(config.seeds),
        "base_success": [rows[0]["held_out_success"] for rows in next(iter(runs.values()))],
        "arms": {
            arm: {**_totals(runs[arm], runs.get("grpo")), "gain": paired_outcomes(held_out[arm], base[arm])}
            for arm in config.arms
        },
        "to_target": [_to_target({arm: runs[arm][i] for arm in config.arms}) for i in range(len(config.seeds))],
        "differences": {
            f"{one} - {other}": {
                "matched_steps": paired_outcomes(held_out[one], held_out[other]),
                "matched_calls": over_seeds(
                    [_at_the_same_calls(*both) for both in zip(runs[one], runs[other], strict=True)]
                ),
                "mean_over_checks": over_seeds(
                    [area(a) - area(b) for a, b in zip(runs[one], runs[other], strict=True)]
                ),
            }
            for one, other in pairs
        },
    }


def _at_the_same_calls(mine: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> float:
    """The difference in success when both had made the calls that the cheaper one made in all."""
    spent = min(calls(mine[-1]), calls(theirs[-1]))
    return at(curve(mine), spent) - at(curve(theirs), spent)


def curve(rows: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """(fresh calls, success) at every check."""
    return [(calls(row) if row["step"] else 0.0, row["held_out_success"]) for row in rows if "held_out_success" in row]


def at(points: Sequence[tuple[float, float]], spent: float) -> float:
    """Success after `spent` calls, between two checks on a line."""
    for (before, low), (after, high) in itertools.pairwise(points):
        if spent <= after:
            return low + (high - low) * (spent - before) / (after - before)
    return points[-1][1]


def area(rows: Sequence[Mapping[str, Any]]) -> float:
    """Mean success over the checks after the first: less noisy than the last one."""
    return mean([success for _, success in curve(rows)[1:]]) or 0.0


def _totals(runs: Sequence[list[dict[str, Any]]], base: Sequence[list[dict[str, Any]]] | None) -> dict[str, Any]:
    last = [rows[-1] for rows in runs]
    trees = [row["trees"] for row in last]
    iterations = [row for rows in runs for row in rows if row["step"]]
    known = [row["branching"] for row in iterations if "branching" in row]
    return {
        "held_out_success": over_seeds([row["held_out_success"] for row in last]),
        "mean_over_checks": over_seeds([area(rows) for rows in runs]),
        "leaves": mean([sum(row["stops"].values()) / row["groups"] for row in iterations]),
        "calls": mean([calls(row) for row in last]),
        "decoded_tokens": mean([row["spent"]["decoded_tokens"] for row in last]),
        "prefilled_tokens": mean([row["spent"]["prefilled_tokens"] for row in last]),
        "trained_tokens": mean([row["spent"]["trained_tokens"] for row in last]),
        "rho": mean([row.get("rho") for row in iterations]),
        "seconds": mean([row["timing"]["seconds"] for row in last]),
        "structural_saving": mean([1 - row["calls_fresh"] / row["calls_chain"] for row in trees]),
        "forks_per_group": mean([row["trees"]["forks"] / _groups(rows) for row, rows in zip(last, runs, strict=True)]),
        "forks_by_turn": _forks_by_turn(known),
        "refilled_share": mean([row["refills"] / max(1, row["leaves"]) for row in trees]),
        "correlation_within_starts": mean([row["correlation_within_starts"] for row in known]),
        "effective_leaves": mean([row["effective_leaves"] for row in known]),
        "zero_variance_share": mean([row["zero_variance_share"] for row in iterations]),
        "held_out_turns": mean([row["held_out_turns_per_episode"] for row in last]),
        "drift": mean(
            [
                row["held_out_turns_per_episode"] / rows[-1]["held_out_turns_per_episode"]
                for row, rows in zip(last, base or (), strict=base is not None)
            ]
        ),
    }


def _groups(rows: Sequence[Mapping[str, Any]]) -> int:
    return sum(row["groups"] for row in rows if row["step"])


def _forks_by_turn(branching: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The share of forks at each turn."""
    counts = sum((Counter(row["forks_by_turn"]) for row in branching), Counter[str]())
    return {turn: count / counts.total() for turn, count in sorted(counts.items())}


def _to_target(runs: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """What each arm had spent when it first reached the highest success that all of them reach (nothing where one of
    them never rises above its start). Seconds are wall-clock: they say little where arms ran beside other work."""
    target = min(max(row["held_out_success"] for row in rows if "held_out_success" in row) for rows in runs.values())
    found: dict[str, Any] = {"success": target}
    if any(target <= rows[0]["held_out_success"] for rows in runs.values()):
        return {"success": None}
    for arm, rows in runs.items():
        row = next(row for row in rows if row.get("held_out_success", -1.0) >= target)
        spent = row["spent"]["decoded_tokens"]
        found[arm] = {"calls": calls(row), "decoded_tokens": spent, "seconds": row["timing"]["seconds"]}
    return found
