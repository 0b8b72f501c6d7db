"""`turntree experiment cost`: PivotRL against end-to-end GRPO, success over what was spent (PivotRL, Figure 1).

Both start from the same policy and are measured on the same held-out games in the same way. PivotRL's cost includes its
profile; the cost of its demonstrations is reported separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from turntree.core.config import Part
from turntree.experiments.config import CostExperimentConfig
from turntree.experiments.paired import (
    arm_folder,
    held_out_outcomes,
    over_seeds,
    over_seeds_and_tasks,
    paired_outcomes,
    ratio_over_seeds,
    task_matrix,
    write_experiment,
)
from turntree.observe.files import read_table
from turntree.observe.run import RunDirectory
from turntree.profiling import profile as profiling
from turntree.stages import profile, select
from turntree.stages.demonstrate import demonstrate
from turntree.stages.profile import ProfileStageConfig
from turntree.stages.train_online import run_train_online
from turntree.stages.train_pivot import CheckConfig, TrainPivotConfig, run_train_pivot

METHODS = ("pivotrl", "grpo")
UNITS = ("turns", "decoded_tokens", "trained_tokens", "seconds")
RATIOS = ("ratios", "ratios_in_training")
GAMES_PER_SEED = 1000


def run_cost_experiment(config: CostExperimentConfig, out: Path) -> dict[str, Any]:
    """Run what is not there yet, then compare; `out/summary.json` holds the curves and the ratios."""
    for seed in config.seeds:
        folder = out / f"seed{seed}"
        if not RunDirectory(folder / "pivotrl").finished:
            _pivotrl(config, seed, folder)
        if not RunDirectory(folder / "grpo").finished:
            _grpo(config, seed, folder)
    summary = summarise(config, out)
    write_experiment(out, summary, config.seeds, METHODS)
    return summary


def _environment(config: CostExperimentConfig, seed: int) -> Part:
    """Every seed trains on games of its own."""
    options = config.online.environment.options
    return Part(config.online.environment.name, {**options, "offset": options.get("offset", 0) + GAMES_PER_SEED * seed})


def _demonstrator(config: CostExperimentConfig, seed: int) -> Part:
    """The demonstrator, which plays the GRPO arm's games."""
    options = {**_environment(config, seed).options}
    games = {"source": options.pop("games", "generated"), "split": "train", "count": config.online.count}
    games |= {key: options[key] for key in ("offset", "difficulty") if key in options}
    return Part(config.demonstrator.name, {**config.demonstrator.options, "games": games, "seed": seed})


def _pivotrl(config: CostExperimentConfig, seed: int, folder: Path) -> None:
    traces, measured, pivots = (folder / f"{name}.jsonl" for name in ("traces", "profile", "pivots"))
    if not measured.exists():
        demonstrate(_demonstrator(config, seed), traces)
        stage = ProfileStageConfig(
            traces=str(traces),
            model=config.online.model,
            limit=config.candidates,
            profile=replace(config.profile, seed=seed),
            device=config.online.device,
        )
        profile.run_profile(stage, measured)
    select.run_select(measured, replace(config.select, seed=seed), pivots)
    episodes = config.online.train.rollouts.episodes
    check = CheckConfig(tasks=config.held_out, environment=config.online.environment, max_turns=episodes.max_turns)
    training = TrainPivotConfig(
        pivots=str(pivots),
        model=config.online.model,
        train=replace(config.train, seed=seed),
        check=check,
        device=config.online.device,
    )
    run_train_pivot(training, folder / "pivotrl")


def _grpo(config: CostExperimentConfig, seed: int, folder: Path) -> None:
    online = replace(
        config.online,
        environment=_environment(config, seed),
        held_out_count=config.held_out,
        held_out_temperature=config.train.sampling.temperature,
        train=replace(config.online.train, seed=seed),
    )
    run_train_online(online, folder / "grpo")


# the comparison


def summarise(config: CostExperimentConfig, out: Path) -> dict[str, Any]:
    """Each arm's curve at every check, and for each seed what either arm spent to reach the same success; the ratios
    over seeds (None where no seed has a matched success), and where the arms end.

    Intervals are for other seeds. Those of the ratios are t intervals of the logarithm over the seeds that have a
    matched success; those of the last check are for other games too. `best` is the largest of the checks and so a
    little too high, in both arms.
    """
    curves = {method: [curve(out / f"seed{seed}", method) for seed in config.seeds] for method in METHODS}
    found = [matched(*both) for both in zip(curves["pivotrl"], curves["grpo"], strict=True)]
    return {
        "seeds": list(config.seeds),
        "curves": curves,
        "matched": found,
        "ratios": {kind: _ratios([row[kind] for row in found if row[kind]]) for kind in RATIOS},
        "ends": _ends(config, out, curves),
    }


def _ratios(by_seed: Sequence[dict[str, float]]) -> dict[str, Any] | None:
    return {unit: ratio_over_seeds([row[unit] for row in by_seed]) for unit in UNITS} if by_seed else None


def _ends(
    config: CostExperimentConfig, out: Path, curves: dict[str, list[list[dict[str, float]]]]
) -> dict[str, dict[str, Any]]:
    last = {method: [held_out_outcomes(arm_folder(out, seed, method)) for seed in config.seeds] for method in METHODS}
    ends: dict[str, dict[str, Any]] = {}
    for method in METHODS:
        (success,), _ = task_matrix(last[method])
        best = [max(point["success"] for point in points) for points in curves[method]]
        ends[method] = {"last": over_seeds_and_tasks(success), "best": over_seeds(best)}
    return ends | {"pivotrl - grpo": paired_outcomes(last["pivotrl"], last["grpo"])}


def curve(folder: Path, method: str) -> list[dict[str, float]]:
    """Success on the held-out games and what had been spent by then, at every check. PivotRL's cost starts with its
    profile. Seconds are those of engine, environments and updates."""
    spent = dict.fromkeys(UNITS, 0.0)
    if method == "pivotrl":
        header, _ = read_table(folder / "profile.jsonl", profiling.SCHEMA)
        bill = header["summary"]["cost"]
        spent = {"turns": bill["turns"], "decoded_tokens": bill["decoded_tokens"], "trained_tokens": 0.0}
        spent["seconds"] = sum(header["timing"].values())
    points: list[dict[str, float]] = []
    for row in RunDirectory(folder / method).metrics():
        if "held_out_success" in row:
            paid = {unit: spent[unit] + _spent(row, unit) for unit in UNITS}
            points.append({"step": row["step"], "success": row["held_out_success"], **paid})
    return points


def _spent(row: dict[str, Any], unit: str) -> float:
    """What the run had spent after this row (nothing at step 0)."""
    if row["step"] == 0:
        return 0.0
    bill = row["spent"]
    return row["timing"]["seconds"] if unit == "seconds" else bill[unit]


def matched(pivotrl: Sequence[dict[str, float]], grpo: Sequence[dict[str, float]]) -> dict[str, Any]:
    """What either spent to first reach the highest success that both reached; GRPO over PivotRL as ratios.

    `ratios` includes the cost of PivotRL's profile; `ratios_in_training` leaves it out, as the paper's Figure 1 does.
    The highest common success is chosen after the fact and the curves are noisy, so one seed's ratio is a rough
    figure; None where an arm never rises above its start.
    """
    best = min(max(point["success"] for point in points) for points in (pivotrl, grpo))
    if best <= max(pivotrl[0]["success"], grpo[0]["success"]):
        return {"success": None, "ratios": None, "ratios_in_training": None}
    first = [next(point for point in points if point["success"] >= best) for points in (pivotrl, grpo)]
    trained = {unit: first[0][unit] - pivotrl[0][unit] for unit in UNITS}
    return {
        "success": best,
        "pivotrl": first[0],
        "grpo": first[1],
        "ratios": {unit: first[1][unit] / first[0][unit] for unit in UNITS},
        "ratios_in_training": {unit: first[1][unit] / trained[unit] for unit in UNITS},
    }
