"""`turntree experiment branching`: are forks where entropy rises better than random forks, and than none?

Matched seeds, the same tasks in the same order from the same weights, the same loss divided by a constant. The causal
question compares `entropy` with `random`, which forks as often, at the same turns and budgets, but at random. The cost
question compares either with `grpo_calls`, which spends as many tool calls on independent rollouts.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from turntree.core.config import Part
from turntree.experiments.config import BRANCHING_SCHEMA, BranchingArm, BranchingExperimentConfig
from turntree.experiments.paired import (
    Outcomes,
    arm_folder,
    claim_policy,
    held_out_checks,
    mean,
    over_seeds_and_tasks,
    paired_outcomes,
    run_or_reuse,
    task_matrix,
    write_experiment,
)
from turntree.run.folder import RunDirectory
from turntree.stages.config import TrainOnlineConfig

COMPARED: tuple[tuple[BranchingArm, BranchingArm], ...] = (
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


def run_branching_experiment(config: BranchingExperimentConfig, out: Path) -> dict[str, Any]:
    """Run what is not there yet, then compare; `out/summary.json` holds the result."""
    claim_policy(out, config.online, {})
    for seed in config.seeds:
        for arm in sorted(config.arms, key=lambda arm: arm == "grpo_calls"):  # it needs the others
            run_or_reuse(configured_arm(config, out, seed, arm), arm_folder(out, seed, arm))
    summary = {"schema": BRANCHING_SCHEMA, **summarise(config, out)}
    write_experiment(out, summary, config.seeds, config.arms)
    return summary


def configured_arm(config: BranchingExperimentConfig, out: Path, seed: int, arm: BranchingArm) -> TrainOnlineConfig:
    online = replace(config.online, train=replace(config.online.train, seed=seed))
    brancher, rollouts = online.brancher, online.train.rollouts.of_training(online.train.groups, branching=True)
    assert brancher is not None
    alike = {name: brancher.options[name] for name in ("branches", "probe_tokens", "alpha") if name in brancher.options}
    coin = replace(online, brancher=Part("random", alike))
    match arm:
        case "entropy":
            return online
        case "random":
            return coin
        case "entropy_starts":
            starts = replace(online.train.credit, comparison="starts")
            return replace(online, train=replace(online.train, credit=starts))
        case "entropy_paths":
            return _path_weighted(online)
        case "random_paths":
            return _path_weighted(coin)
        case "arpo_released":
            released = {name: value for name, value in alike.items() if name == "branches"}
            return replace(online, brancher=Part("arpo_released", released))
        case "tree_grpo":
            trees = replace(online.train.credit, comparison="trees")
            posthoc = Part("posthoc", {"expansions": rollouts.group_size // rollouts.initial - 1})
            return replace(online, brancher=posthoc, train=replace(online.train, credit=trees))
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
    rollouts = train.rollouts.of_training(train.groups, branching=True)
    constant = train.loss.constant * rollouts.initial / rollouts.group_size
    return replace(online, train=replace(train, credit=credit, loss=replace(train.loss, constant=constant)))


def _independent(online: TrainOnlineConfig, size: int) -> TrainOnlineConfig:
    rollouts = replace(online.train.rollouts, group_size=size, initial_rollouts=None)
    return replace(online, brancher=None, train=replace(online.train, rollouts=rollouts))


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
    curves = {
        arm: [
            _curve(rows, held_out_checks(arm_folder(out, seed, arm)))
            for seed, rows in zip(config.seeds, by_seed, strict=True)
        ]
        for arm, by_seed in runs.items()
    }
    pairs = [pair for pair in COMPARED if set(pair) <= set(config.arms)]
    return {
        "seeds": list(config.seeds),
        "base_success": [rows[0]["held_out_success"] for rows in next(iter(runs.values()))],
        "arms": {arm: _reached(curves[arm]) | _totals(runs[arm], runs.get("grpo")) for arm in config.arms},
        "to_target": [_to_target({arm: runs[arm][i] for arm in config.arms}) for i in range(len(config.seeds))],
        "differences": {f"{one} - {other}": _differences(curves[one], curves[other]) for one, other in pairs},
    }


Curve = Sequence[tuple[float, Outcomes]]


def _curve(rows: Sequence[Mapping[str, Any]], checks: Mapping[int, Outcomes]) -> Curve:
    """(fresh calls, success by task) at every check."""
    spent = {row["step"]: calls(row) if row["step"] else 0.0 for row in rows}
    return [(spent[step], tasks) for step, tasks in sorted(checks.items())]


def _reached(curves: Sequence[Curve]) -> dict[str, Any]:
    ends, starts = [curve[-1][1] for curve in curves], [curve[0][1] for curve in curves]
    return {
        "held_out_success": _share(ends),
        "mean_over_checks": _share([area(curve) for curve in curves]),
        "gain": paired_outcomes(ends, starts),
    }


def _share(by_seed: Sequence[Outcomes]) -> dict[str, Any]:
    (success,), _ = task_matrix(by_seed)
    return over_seeds_and_tasks(success)


def _differences(mine: Sequence[Curve], theirs: Sequence[Curve]) -> dict[str, Any]:
    """Matched calls: when both had made the calls that the cheaper one made in all."""
    same = [min(one[-1][0], other[-1][0]) for one, other in zip(mine, theirs, strict=True)]
    at_calls = [[at(curve, spent) for curve, spent in zip(curves, same, strict=True)] for curves in (mine, theirs)]
    areas = [[area(curve) for curve in curves] for curves in (mine, theirs)]
    return {
        "matched_steps": paired_outcomes(*[[curve[-1][1] for curve in curves] for curves in (mine, theirs)]),
        "matched_calls": paired_outcomes(*at_calls)["by_seed"],
        "mean_over_checks": paired_outcomes(*areas)["by_seed"],
    }


def at(curve: Curve, spent: float) -> dict[str, float]:
    """Success by task after `spent` calls, between two checks on a line."""
    for (before, low), (after, high) in itertools.pairwise(curve):
        if spent <= after:
            part = (spent - before) / (after - before) if after > before else 1.0
            return {task: low[task] + (high[task] - low[task]) * part for task in low.keys() & high.keys()}
    return dict(curve[-1][1])


def area(curve: Curve) -> dict[str, float]:
    """Mean success by task over the checks after the first: less noisy than the last one."""
    checks = [tasks for _, tasks in curve[1:]]
    shared = set(checks[0]).intersection(*checks[1:])
    return {task: sum(tasks[task] for tasks in checks) / len(checks) for task in shared}


def _totals(runs: Sequence[list[dict[str, Any]]], base: Sequence[list[dict[str, Any]]] | None) -> dict[str, Any]:
    last = [rows[-1] for rows in runs]
    trees = [row["trees"] for row in last]
    iterations = [row for rows in runs for row in rows if row["step"]]
    known = [row["branching"] for row in iterations if "branching" in row]
    return {
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
