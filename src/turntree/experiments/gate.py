"""`turntree experiment gate`: does stopping converged groups save budget, and what does it cost?

Matched seeds, three arms: `none`, `gate`, and `random`, which cuts as large a share of the groups that still run at the
same turn, whatever they do. All play the same tasks in the same order from the same weights, by default with a constant
normaliser, so that cutting cannot change the step size silently. With `train.loss.normalizer` "rollouts" a cut takes
the group out of the mean too: that is the paper's amplification, `grad_norm_ratio` beside `predicted_amplification`.
Comparisons are paired by seed, and by held-out task within a seed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from turntree.core.config import Part
from turntree.core.outcome import group_outcome
from turntree.experiments.config import GateArm, GateExperimentConfig
from turntree.experiments.paired import (
    arm_folder,
    claim_policy,
    held_out_outcomes,
    over_seeds,
    paired_outcomes,
    ratio_over_seeds,
    run_or_reuse,
    task_matrix,
    write_experiment,
)
from turntree.run.folder import RunDirectory
from turntree.run.means import mean
from turntree.run.statistics import clustered_wilson
from turntree.stages.config import TrainOnlineConfig
from turntree.stages.train_online import GATE_LOG

SCHEMA = "turntree.gate/1"


def run_gate_experiment(config: GateExperimentConfig, out: Path) -> dict[str, Any]:
    """Run what is not there yet, then compare; `out/summary.json` holds the result, `out/outcomes.jsonl` outcomes by
    task."""
    claim_policy(out, config.online)
    for seed in config.seeds:
        for arm in sorted(config.arms, key=lambda arm: arm == "random"):  # it needs what the gate cut
            run_or_reuse(_configured(config, out, seed, arm), arm_folder(out, seed, arm))
    summary = {"schema": SCHEMA, **summarise(config, out)}
    write_experiment(out, summary, config.seeds, config.arms)
    return summary


def _configured(config: GateExperimentConfig, out: Path, seed: int, arm: GateArm) -> TrainOnlineConfig:
    online = replace(config.online, train=replace(config.online.train, seed=seed))
    if arm == "gate":
        return online
    if arm == "none":
        return replace(online, gate=None)
    assert online.gate is not None
    return replace(online, gate=_random_gate(RunDirectory(arm_folder(out, seed, "gate")).rows(GATE_LOG)))


def _random_gate(decisions: Sequence[dict[str, Any]]) -> Part:
    """The control for a gate that left these rows in its log. It draws only among groups that still run at its turn, so
    its rate is over the groups that the gate measured, and not over those that were over by then (no numbers)."""
    cuts = [row["cut"] for row in decisions if row["cut"] is not None]
    measured = sum(row["cut"] is not None or bool(row["numbers"]) for row in decisions)
    return Part("random", {"turn": max(cuts, default=1), "rate": len(cuts) / measured if cuts else 0.0})


# the comparison

FIGURES: dict[str, Callable[[dict[str, Any]], float]] = {
    "turns": lambda row: row["spent"]["turns"],
    "decoded_tokens": lambda row: row["spent"]["decoded_tokens"],
    "trained_tokens": lambda row: row["spent"]["trained_tokens"],
    "seconds": lambda row: row["timing"]["seconds"],
}


def summarise(config: GateExperimentConfig, out: Path) -> dict[str, Any]:
    """Per arm the totals; per arm other than `none` the paired differences from it."""
    runs = {arm: [RunDirectory(arm_folder(out, seed, arm)).metrics() for seed in config.seeds] for arm in config.arms}
    held_out = {arm: [held_out_outcomes(arm_folder(out, seed, arm)) for seed in config.seeds] for arm in config.arms}
    return {
        "seeds": list(config.seeds),
        "arms": {arm: _totals(runs[arm], held_out[arm]) for arm in config.arms},
        "differences": {
            arm: _differences(runs[arm], runs["none"], held_out[arm], held_out["none"])
            | {"precision": precision(config.seeds, out, arm)}
            for arm in config.arms
            if arm != "none"
        },
    }


def _totals(runs: Sequence[list[dict[str, Any]]], held_out: Sequence[dict[str, float]]) -> dict[str, Any]:
    iterations = [row for rows in runs for row in rows if row["step"]]
    (played,), _ = task_matrix(held_out)
    low, high = clustered_wilson(played.sum(axis=0).tolist(), [len(played)] * played.shape[1])
    return {
        **{name: [figure(rows[-1]) for rows in runs] for name, figure in FIGURES.items()},
        "groups": sum(row["groups"] for row in iterations),
        "groups_cut": sum(row["groups_cut"] for row in iterations),
        "zero_variance_share": mean([row["zero_variance_share"] for row in iterations]),
        "grad_norm": mean([row.get("grad_norm") for row in iterations]),
        "dilution": mean([row.get("dilution") for row in iterations]),
        "predicted_amplification": mean([row["predicted_amplification"] for row in iterations]),
        "held_out_success": float(played.mean()),
        "held_out_interval": [low, high],
    }


def _differences(
    runs: Sequence[list[dict[str, Any]]],
    base: Sequence[list[dict[str, Any]]],
    held_out: Sequence[dict[str, float]],
    base_held_out: Sequence[dict[str, float]],
) -> dict[str, Any]:
    """Shares saved and the ratio of gradient norms, both over seeds, and success on the same held-out tasks."""
    pairs = list(zip(runs, base, strict=True))
    norms = [norm for rows, other in pairs if (norm := _norm_ratio(rows, other)) is not None]
    return {
        "saved": {
            name: over_seeds([1 - figure(rows[-1]) / figure(other[-1]) for rows, other in pairs])
            for name, figure in FIGURES.items()
        },
        "grad_norm_ratio": ratio_over_seeds(norms) if norms else None,
        **paired_outcomes(held_out, base_held_out),
    }


def _norm_ratio(rows: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> float | None:
    """For one seed: the geometric mean over iterations, which are not independent measurements."""
    logs = [
        math.log(one["grad_norm"] / two["grad_norm"])
        for one, two in zip(rows[1:], other[1:], strict=True)
        if one.get("grad_norm") and two.get("grad_norm")
    ]
    return math.exp(sum(logs) / len(logs)) if logs else None


def precision(seeds: Sequence[int], out: Path, arm: str) -> dict[str, Any]:
    """Of the groups that were cut: how many had no reward variance where the arm `none` played the same task in the
    same iteration to its end. The two policies differ after the first update, so this is the label of a matched group
    and not of the cut group itself; audited groups are labelled by themselves (`gate.jsonl`). The interval is over
    tasks. `recall` (paper, E.12): of all groups without variance in that arm, the share whose match was cut."""
    counts: dict[str, list[int]] = {}  # by task: cut, of these without variance and unmatched; without variance at all
    for seed in seeds:
        run = RunDirectory(arm_folder(out, seed, arm))
        labels = {
            place: group_outcome([r["reward"] for r in row["rollouts"]])
            for place, row in _places(RunDirectory(arm_folder(out, seed, "none")).rows("rollouts.jsonl"))
        }
        places = {row["id"]: place for place, row in _places(run.rows("rollouts.jsonl"))}
        cuts = [row for row in run.rows(GATE_LOG) if row["cut"] is not None]
        found = [(task, (0, 0, 0, int(outcome.zero_variance))) for (_, task, _), outcome in labels.items()]
        for row in cuts:
            outcome = labels.get(places[row["group"]])
            found.append(
                (row["task"], (1, int(outcome is not None and outcome.zero_variance), int(outcome is None), 0))
            )
        for task, more in found:
            counts[task] = [a + b for a, b in zip(counts.get(task, [0, 0, 0, 0]), more, strict=True)]
    cut, right, unknown, zero = (
        (sum(column) for column in zip(*counts.values(), strict=True)) if counts else (0, 0, 0, 0)
    )
    low, high = clustered_wilson([row[1] for row in counts.values()], [row[0] - row[2] for row in counts.values()])
    known = cut - unknown
    shares = {"precision": right / known if known else None, "recall": right / zero if zero else None}
    return {"cut": cut, "zero_variance": right, "unmatched": unknown, **shares, "low": low, "high": high}


def _places(rows: Iterable[dict[str, Any]]) -> Iterator[tuple[tuple[int, str, int], dict[str, Any]]]:
    """Groups with iteration, task, and how often the task came before in it: an epoch may end inside an iteration."""
    before = Counter[tuple[int, str]]()
    for row in rows:
        place = row["iteration"], row["task"]
        yield (*place, before[place]), row
        before[place] += 1
