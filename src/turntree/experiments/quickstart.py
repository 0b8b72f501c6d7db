"""The main job end to end, side by side on held-out games: base, SFT, random turns and PivotRL on the same traces, and
pivots of the policy's own play of the same games.

PivotRL is the paper's: an expert's states, drawn alike. Own states, labelled by the expert and drawn by how much
success hangs on them, are turntree's (docs/results/own-states.md).
"""

from __future__ import annotations

import io
import multiprocessing
import platform
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from turntree.core.config import Part, at_least, to_mapping
from turntree.core.errors import TurntreeError
from turntree.experiments.config import COMMAND, household_own, household_pivots, household_selection
from turntree.pivots.profile import ProfileConfig
from turntree.report import results
from turntree.report.read import ARMS, QUICKSTART_SCHEMA, read_run
from turntree.report.wording import MINUS
from turntree.run.files import write_json
from turntree.run.folder import open_folder
from turntree.run.workers import die_with_parent, without_interrupts
from turntree.stages import evaluate, profile, select, sft, train_pivot
from turntree.stages.config import CheckConfig, SuccessConfig, TrainPivotConfig
from turntree.stages.demonstrate import demonstrate
from turntree.stages.evaluate import EvaluateConfig
from turntree.stages.profile import ProfileStageConfig
from turntree.stages.sft import SFTStageConfig
from turntree.train.optimizer import OptimizerConfig
from turntree.train.sft import SFTConfig

GAMES_PER_SEED = 1000  # so that every seed trains on games of its own
TITLES = {
    "base": "base",
    "sft": "SFT",
    "random": "random turns",
    "pivotrl": "PivotRL (the paper's, kinds capped)",
    "own": "own states, by importance (ours)",
}


# The vetted settings. All were chosen on development games; the test games were looked at once per seed
# (docs/results/quickstart.md).
GAMES = 700  # of a seed
SHARE_OF_DEV = 0.2  # of them, drawn by a hash
CANDIDATES = 5000  # most that are profiled
SFT = SFTConfig(epochs=3, optimizer=OptimizerConfig(learning_rate=3e-4))
PIVOTRL = household_pivots(check_every=20)
OWN_STEPS = 30  # training steps on own states; everything else is as in PIVOTRL
CHECK = CheckConfig(states=150, tasks=60, max_turns=16, max_tokens=COMMAND.max_tokens, stops=False)
TEST = EvaluateConfig(count=400, max_tokens=COMMAND.max_tokens, skills_per_kind=100)


@dataclass(frozen=True, kw_only=True)
class QuickstartConfig:
    """`turntree quickstart`."""

    seed: int = 0
    """Of every stage."""
    workers: int = 2
    """Stages that may run at the same time."""

    def __post_init__(self) -> None:
        at_least(self, seed=0, workers=1)


def run_quickstart(config: QuickstartConfig, out: Path, *, overwrite: bool = False) -> dict[str, Any]:
    """Run every stage into `out`, write `summary.json`, return the summary. Raises `InputError` where another process
    runs there, or another quickstart was run, unless `overwrite`."""
    with open_folder(out, "quickstart", to_mapping(config), overwrite=overwrite, free=("config.workers",)):
        (out / "summary.json").unlink(missing_ok=True)  # of an earlier run: it would not fit the new artifacts
        if overwrite:
            for name in ("profile.jsonl", "profile.jsonl.waves"):
                (out / name).unlink(missing_ok=True)
        return _run(config, out)


def _run(config: QuickstartConfig, out: Path) -> dict[str, Any]:
    started = time.perf_counter()
    demonstrate(demonstrator(config.seed), out / "traces.jsonl")
    begun = (_own, _profile_and_select, _base_and_sft)
    _together(config.workers, [(function, config.seed, out) for function in begun])
    _together(config.workers, [(_train_and_evaluate, config.seed, out, arm) for arm in ("pivotrl", "random")])
    summary = summarise(out)
    summary["wall_seconds"] = round(time.perf_counter() - started, 1)
    summary["report"] = str(out / "report.html")  # made from the finished directory by the command
    write_json(out / "summary.json", summary)
    return summary


def games_of(seed: int) -> dict[str, Any]:
    """Every seed trains on games of its own."""
    return {"count": GAMES, "offset": GAMES_PER_SEED * seed}


def demonstrator(seed: int) -> Part:
    return Part("household", {"games": games_of(seed), "dev": SHARE_OF_DEV, "slips": 0.2, "seed": seed})


Job = tuple[Any, ...]


def _together(workers: int, jobs: Sequence[Job]) -> None:
    """Run the jobs, each in a process of its own where there are workers enough. The first error is raised, and ends
    the other jobs, as an interrupt does."""
    if workers == 1:
        for function, *arguments in jobs:
            function(*arguments)
        return
    others = set(multiprocessing.active_children())
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=die_with_parent) as pool:
        try:
            with without_interrupts():
                waiting: list[Future[None]] = [pool.submit(function, *arguments) for function, *arguments in jobs]
            for future in as_completed(waiting):
                future.result()
        except BaseException as error:
            for worker in {*multiprocessing.active_children()} - others:
                worker.kill()
            if isinstance(error, BrokenProcessPool):
                raise TurntreeError("a worker was killed, perhaps for its memory; try --workers 1") from error
            raise


def _base_and_sft(seed: int, out: Path) -> None:
    _evaluate(seed, "default", out / "evaluation" / "base.json")
    traces, training = str(out / "traces.jsonl"), replace(SFT, seed=seed)
    stage = SFTStageConfig(traces=traces, sft=training, check=SuccessConfig(tasks=0))
    sft.run_sft(stage, out / "sft", overwrite=True)
    _evaluate(seed, str(out / "sft" / "model"), out / "evaluation" / "sft.json")


def _profile_and_select(seed: int, out: Path) -> None:
    settings = ProfileConfig(sampling=COMMAND, seed=seed)
    stage = ProfileStageConfig(traces=str(out / "traces.jsonl"), limit=CANDIDATES, profile=settings)
    profile.run_profile(stage, out / "profile.jsonl")
    chosen = replace(household_selection(), seed=seed)
    select.run_select(out / "profile.jsonl", chosen, out / "pivots.jsonl")
    select.run_select(out / "profile.jsonl", replace(chosen, rule="random"), out / "random.jsonl")


def _train_and_evaluate(seed: int, out: Path, arm: str) -> None:
    states = out / ("random.jsonl" if arm == "random" else "pivots.jsonl")
    stage = TrainPivotConfig(pivots=str(states), train=replace(PIVOTRL, seed=seed), check=CHECK)
    train_pivot.run_train_pivot(stage, out / arm, overwrite=True)
    _evaluate(seed, str(out / arm / "model"), out / "evaluation" / f"{arm}.json")


def _own(seed: int, out: Path) -> None:
    train_pivot.run_train_pivot(own_stage(seed), out / "own", overwrite=True)
    _evaluate(seed, str(out / "own" / "model"), out / "evaluation" / "own.json")


def own_stage(seed: int) -> TrainPivotConfig:
    """The policy plays as many games as the other arms train on: the first of the demonstrator's. (The others leave out
    its development split, which is drawn by a hash.)"""
    games = games_of(seed)
    return TrainPivotConfig(
        states="own",
        own=replace(household_own(), count=round(games["count"] * (1 - SHARE_OF_DEV))),
        environment=Part("household", {"offset": games["offset"]}),
        teacher=Part("household"),
        verifier=Part("household"),
        train=replace(PIVOTRL, seed=seed, steps=OWN_STEPS),
        check=replace(CHECK, states=0),
    )


def _evaluate(seed: int, model: str, path: Path) -> None:
    evaluate.evaluate(replace(TEST, model=model, seed=seed), path)


def summarise(out: Path) -> dict[str, Any]:
    """The comparison from the artifacts of a finished run, as its page has it."""
    run = read_run(out)
    assert run.profile is not None
    header = run.profile.header["summary"]
    return {
        "schema": QUICKSTART_SCHEMA,
        "arms": {arm["name"]: _arm(arm) for arm in results.arm_rows(run)},
        "differences": {f"{one.first}-{one.second}": _difference(one) for one in results.differences(run)},
        **{key: header[key] for key in ("candidates", "classes", "miss_rate")},
        "seed": run.seed,
        "machine": f"{platform.machine()}, {multiprocessing.cpu_count()} cores",
    }


def _arm(row: dict[str, Any]) -> dict[str, Any]:
    return {
        **{key: row["sampled"][key] for key in ("success", "low", "high", "episodes")},
        "invalid_share": row["invalid_share"],
        **{f"greedy_{key}": row["greedy"][key] for key in ("success", "low", "high")},
        "retention": row["skills"],
        "retention_change": row["skills_change"] or 0.0,
        **(row["bill"] or {"turns": 0, "tokens": 0, "trained_tokens": 0, "seconds": 0.0}),  # the start cost nothing
    }


def _difference(found: results.Difference) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for prefix, estimate in (("", found.sampled), ("greedy_", found.greedy)):
        assert estimate is not None
        row |= {f"{prefix}{key}": getattr(estimate, key) for key in ("mean", "low", "high")}
        row[f"{prefix}games"] = estimate.tasks
    return row


def table(summary: dict[str, Any]) -> list[str]:
    """The summary for a terminal, as lines: what was found, then the table."""
    rows = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("policy", "success, sampled", "greedy", "retention change", "turns", "tokens", "seconds"):
        rows.add_column(column, justify="left" if column == "policy" else "right")
    for arm in ARMS:
        row = summary["arms"][arm]
        rows.add_row(
            TITLES[arm],
            f"{row['success']:.1%} [{row['low']:.1%}, {row['high']:.1%}]",
            f"{row['greedy_success']:.1%}",
            f"{row['retention_change'] * 100:+.1f} points",
            f"{row['turns']:,}",
            f"{row['tokens']:,}",
            f"{row['seconds']:.0f}",
        )
    buffer = io.StringIO()
    Console(width=110, file=buffer, force_terminal=False).print(rows)
    return [
        *(_sentence(name, row) for name, row in summary["differences"].items()),
        *buffer.getvalue().rstrip("\n").split("\n"),
        f"{summary['wall_seconds']:.0f} s in all; report: {summary['report']}",
    ]


def _sentence(name: str, row: dict[str, Any]) -> str:
    sampled, greedy = (
        results.Estimate(*(row[f"{prefix}{key}"] for key in ("mean", "low", "high")), tasks=row["games"])
        for prefix in ("", "greedy_")
    )
    first, _, second = name.partition("-")
    return results.Difference(first, second, sampled, greedy).sentence(TITLES.__getitem__).replace(MINUS, "-")
