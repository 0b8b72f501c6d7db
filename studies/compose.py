"""`studies/run.py compose`: what each part is worth on one bill: success over everything that was spent.

An arm is a chain of stages, `pivot/grpo+dapo+gate`: PivotRL on an expert's states, then GRPO with two parts. Arms that
begin alike share their first stages, which are run once and billed to each. All arms of a seed start from one policy,
train on the same tasks, and are checked on the same held-out tasks in the same way. The bill has the profile and the
search for own states in it; checks are on nobody's bill (PivotRL, Figure 1, leaves the profile out).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from configs import ComposeConfig, chain, playing

from turntree.cli.results import edges, in_points
from turntree.core.config import Part, to_mapping
from turntree.core.errors import InputError
from turntree.experiments.paired import (
    arm_folder,
    claim_policy,
    held_out_outcomes,
    over_seeds,
    over_seeds_and_tasks,
    paired_outcomes,
    ratio_over_seeds,
    task_matrix,
    write_experiment,
)
from turntree.run.artifacts import PROFILE
from turntree.run.files import read_json, write_json
from turntree.run.folder import RunDirectory
from turntree.stages import profile, select
from turntree.stages.config import (
    CheckConfig,
    EpisodesCheckConfig,
    ProfileStageConfig,
    TrainOnlineConfig,
    TrainPivotConfig,
)
from turntree.stages.demonstrate import demonstrate
from turntree.stages.train_online import run_train_online
from turntree.stages.train_pivot import run_train_pivot

SCHEMA = "turntree.compose/1"
UNITS = ("turns", "decoded_tokens", "prefilled_tokens", "trained_tokens", "tool_calls", "seconds")
BILLS = ("decoded_tokens", "seconds")  # by which arms are compared at equal cost
TASKS_PER_SEED = 1000
Point = dict[str, float]


def run_compose(config: ComposeConfig, out: Path) -> dict[str, Any]:
    """Run what is not there yet, then compare; `out/summary.json` holds the curves and the comparisons. Raises
    `InputError` where `out` holds runs of another policy or configuration, except for its seeds and arms."""
    claim_policy(out, config.online)
    settings = {key: value for key, value in to_mapping(config).items() if key not in ("seeds", "arms")}
    if (file := out / "settings.json").exists() and read_json(file) != settings:
        raise InputError("holds results of another configuration", path=out, hint="use a new folder")
    write_json(file, settings)
    for seed in config.seeds:
        for arm in config.arms:
            model = config.online.model
            for name in _prefixes(arm):
                folder = arm_folder(out, seed, name)
                if not RunDirectory(folder).finished:
                    _stage(config, seed, name, model, out / f"seed{seed}", folder)
                model = str(RunDirectory(folder).model)
    summary = {"schema": SCHEMA, **summarise(config, out)}
    write_experiment(out, summary, config.seeds, config.arms)
    return summary


def _prefixes(arm: str) -> list[str]:
    """`a/b+c` as `a`, `a/b+c`: a stage is named by all that came before it."""
    stages = arm.split("/")
    return ["/".join(stages[: count + 1]) for count in range(len(stages))]


# stages


def _stage(config: ComposeConfig, seed: int, name: str, model: str, shared: Path, out: Path) -> None:
    stage, added = chain(name)[-1]
    if stage == "grpo":
        run_train_online(_online(config, seed, model, added), out)
        return
    episodes = config.online.train.episodes
    if stage == "pivot":
        states: dict[str, Any] = {"pivots": _pivots(config, seed, shared)}
    else:
        own = replace(config.own, max_turns=episodes.max_turns, count=config.online.count)
        states = {"states": "own", "own": own, "teacher": config.teacher, "verifier": config.verifier}
        states["environment"] = _environment(config, seed)
    training = TrainPivotConfig(
        **states,
        model=model,
        train=replace(config.pivot, seed=seed),
        check=CheckConfig(  # the limits of the other arms
            tasks=config.held_out,
            environment=config.online.environment,
            max_turns=episodes.max_turns,
            stops=False,
        ),
        device=config.online.device,
    )
    run_train_pivot(training, out)


def _environment(config: ComposeConfig, seed: int) -> Part:
    """Every seed trains on tasks of its own."""
    options, apart = config.online.environment.options, max(TASKS_PER_SEED, config.online.count)
    return Part(config.online.environment.name, {**options, "offset": options.get("offset", 0) + apart * seed})


def _pivots(config: ComposeConfig, seed: int, folder: Path) -> str:
    """The pivots of an expert's play of the training tasks, for the policy that all arms start from."""
    traces, measured, pivots = (folder / f"{name}.jsonl" for name in ("traces", "profile", "pivots"))
    if not measured.exists():
        played = _environment(config, seed)
        demonstrate(playing(config.demonstrator, played, config.online.count, seed=seed), traces)
        stage = ProfileStageConfig(
            traces=str(traces),
            model=config.online.model,
            limit=config.candidates,
            profile=replace(config.profile, seed=seed),
            device=config.online.device,
        )
        profile.run_profile(stage, measured)
    select.run_select(measured, replace(config.select, seed=seed), pivots)
    return str(pivots)


def _online(config: ComposeConfig, seed: int, model: str, added: Sequence[str]) -> TrainOnlineConfig:
    """The GRPO stage with its parts."""
    train = replace(config.online.train, seed=seed)
    if "branching" in added:
        train = replace(train, initial_rollouts=max(1, train.group_size // 2))
    return replace(
        config.online,
        model=model,
        environment=_environment(config, seed),
        check=EpisodesCheckConfig(tasks=config.held_out, temperature=config.pivot.sampling.temperature, stops=False),
        train=train,
        filters=tuple(Part(name) for name in ("greso", "dapo") if name in added),
        gate=config.gate if "gate" in added else None,
        brancher=config.brancher if "branching" in added else None,
    )


# the bill


def curve(out: Path, seed: int, arm: str) -> list[Point]:
    """Success on the held-out tasks at every check of an arm, and what had been spent by then in all of its stages.
    Seconds are those of engine, environments and updates.

    GRPO pays as it learns. A profile or a search is paid for before anything is learned, so in the stages pivot and own
    a point with the success of the check before stands at the cost of every check: whoever interpolates gets steps."""
    points: list[Point] = []
    spent = dict.fromkeys(UNITS, 0.0)
    for name in _prefixes(arm):
        stage = chain(name)[-1][0]
        if stage == "pivot":
            header, _ = PROFILE.stream(out / f"seed{seed}" / "profile.jsonl")
            bill, seconds = header["summary"]["cost"], sum(header["timing"].values())
            spent = {unit: spent[unit] + (seconds if unit == "seconds" else bill.get(unit, 0)) for unit in UNITS}
        rows = RunDirectory(arm_folder(out, seed, name)).metrics()
        for row in rows:
            if "held_out_success" in row and (row["step"] or not points):
                paid = {unit: spent[unit] + _spent(row, unit) for unit in UNITS}
                if stage != "grpo" and points:
                    points.append({"step": row["step"], "success": points[-1]["success"], **paid})
                points.append({"step": row["step"], "success": row["held_out_success"], **paid})
        spent = {unit: spent[unit] + _spent(rows[-1], unit) for unit in UNITS}
    return points


def _spent(row: dict[str, Any], unit: str) -> float:
    """What a run had spent after this row (nothing at step 0)."""
    if row["step"] == 0:
        return 0.0
    return row["timing"]["seconds"] if unit == "seconds" else row["spent"].get(unit, 0)


# the comparison


def summarise(config: ComposeConfig, out: Path) -> dict[str, Any]:
    """Each arm's curve in every seed; its last check; and against the first arm: the last checks, success at equal
    cost, and what either spent to reach the first arm's last success.

    Intervals are for other seeds and, where tasks are paired, other tasks. An arm that never reaches the target in a
    seed has no ratio there: `reached` counts the seeds that did.
    """
    first = config.arms[0]
    curves = {arm: [curve(out, seed, arm) for seed in config.seeds] for arm in config.arms}
    last = {arm: [held_out_outcomes(arm_folder(out, seed, arm)) for seed in config.seeds] for arm in config.arms}
    target = sum(points[-1]["success"] for points in curves[first]) / len(config.seeds)
    arms: dict[str, Any] = {}
    for arm in config.arms:
        (success,), _ = task_matrix(last[arm])
        arms[arm] = {
            "last": over_seeds_and_tasks(success),
            "best": over_seeds([max(point["success"] for point in points) for points in curves[arm]]),
            "spent": {unit: over_seeds([points[-1][unit] for points in curves[arm]]) for unit in UNITS},
            "to_target": {unit: to_target(curves[arm], curves[first], target, unit) for unit in UNITS},
        }
        if arm != first:
            arms[arm]["minus_first"] = paired_outcomes(last[arm], last[first])
            arms[arm]["at_equal_cost"] = {unit: at_equal_cost(curves[arm], curves[first], unit) for unit in BILLS}
    return {"seeds": list(config.seeds), "first": first, "target": target, "arms": arms, "curves": curves}


def to_target(mine: Sequence[list[Point]], first: Sequence[list[Point]], target: float, unit: str) -> dict[str, Any]:
    """What was spent to reach the target's success, as shares of what the first arm spent for it: `share_of_first` seed
    by seed, `share_of_mean` on the mean curves. Success between two checks is interpolated.

    A single curve of noisy checks crosses the target a little too early, in both arms alike."""
    reached = [
        (_cost(points, target, unit), _cost(theirs, target, unit)) for points, theirs in zip(mine, first, strict=True)
    ]
    shares = [one / other for one, other in reached if one and other]  # a start above the target has no logarithm
    one, other = (_cost(_mean_curve(curves, unit), target, unit) for curves in (mine, first))
    return {
        "reached": sum(one is not None for one, _ in reached),
        "share_of_first": ratio_over_seeds(shares) if shares else None,
        "share_of_mean": one / other if one is not None and other else None,
    }


def _cost(points: Sequence[Point], target: float, unit: str) -> float | None:
    """Where the curve first reaches the target; None where it does not, or where there is no curve."""
    for before, after in zip([*points[:1], *points], points, strict=False):
        if after["success"] >= target:
            rise = after["success"] - before["success"]
            part = (target - before["success"]) / rise if rise else 1.0
            return before[unit] + part * (after[unit] - before[unit])
    return None


def _mean_curve(curves: Sequence[Sequence[Point]], unit: str) -> list[Point]:
    """The seeds' mean cost and success at every check; empty where they were not checked at the same steps."""
    if len({tuple(point["step"] for point in points) for points in curves}) > 1:
        return []
    checks = zip(*curves, strict=True)
    return [{key: fmean(point[key] for point in check) for key in (unit, "success")} for check in checks]


def _success(points: Sequence[Point], cost: float, unit: str) -> float:
    """Success at this cost, interpolated; before the first check it is that of the policy at the start."""
    return float(np.interp(cost, [point[unit] for point in points], [point["success"] for point in points]))


def at_equal_cost(mine: Sequence[list[Point]], first: Sequence[list[Point]], unit: str) -> dict[str, Any]:
    """The difference in success where the arm that spent less ended, over seeds."""
    differences = []
    for points, theirs in zip(mine, first, strict=True):
        budget = min(points[-1][unit], theirs[-1][unit])
        differences.append(_success(points, budget, unit) - _success(theirs, budget, unit))
    return over_seeds(differences)


def lines(summary: dict[str, Any]) -> Iterator[str]:
    first, count = summary["first"], len(summary["seeds"])
    yield f"target: the last check of {first}, {summary['target']:.1%}; shares are of what {first} spent to reach it"
    for arm, row in summary["arms"].items():
        yield f"{arm}: ends at {edges(row['last'], '{:.1%}')}, best check {edges(row['best'], '{:.1%}')}"
        yield "  spent " + ", ".join(f"{unit} {found['mean']:,.0f}" for unit, found in row["spent"].items())
        for unit in ("decoded_tokens", "seconds"):
            found = row["to_target"][unit]
            share, mean = found["share_of_first"], found["share_of_mean"]
            told = [] if share is None else [f"{edges(share, '{:.2f}')} of the {unit}"]
            told += [] if mean is None else [f"{mean:.2f} of the {unit} on the mean curves"]
            yield ", ".join([f"  reaches the target in {found['reached']} of {count} seeds", *told])
        if arm != first:
            yield f"  minus {first}: {in_points(row['minus_first']['by_seed'])} at the end"
            for unit, found in row["at_equal_cost"].items():
                yield f"  minus {first} at equal {unit}: {in_points(found)}"
