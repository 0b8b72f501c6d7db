"""The main job end to end, side by side on held-out games that are hard for the policy: base, SFT and PivotRL on an
expert's traces, pivots of the policy's own play, and GRPO on whole episodes at what these cost.

Everything is as in docs/results/hard.md, which has five seeds of it: pivots balanced over kinds of action, own states
labelled by the expert and drawn four to an episode.
"""

from __future__ import annotations

import multiprocessing
import platform
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from turntree.core.config import Bounded, Count, Part, Positive, to_mapping
from turntree.core.errors import TurntreeError
from turntree.experiments.config import COMMAND
from turntree.pivots.profile import ProfileConfig
from turntree.pivots.select import SelectConfig
from turntree.report import results
from turntree.report.read import ARMS, QUICKSTART_SCHEMA, read_run
from turntree.report.wording import MINUS
from turntree.run.files import write_json
from turntree.run.folder import open_folder
from turntree.run.workers import die_with_parent, without_interrupts
from turntree.stages import evaluate, profile, select, sft, train_online, train_pivot
from turntree.stages.config import (
    CheckConfig,
    EpisodesCheckConfig,
    OwnPathConfig,
    SFTCheckConfig,
    TrainOnlineConfig,
    TrainPivotConfig,
)
from turntree.stages.demonstrate import demonstrate
from turntree.stages.evaluate import EvaluateConfig
from turntree.stages.profile import ProfileStageConfig
from turntree.stages.sft import SFTStageConfig
from turntree.train.config import LossConfig, OnlineConfig, PivotConfig
from turntree.train.optimizer import OptimizerConfig
from turntree.train.sft import SFTConfig

GAMES_PER_SEED = 1000  # so that every seed trains on games of its own
TITLES = {
    "base": "base",
    "sft": "SFT",
    "pivotrl": "PivotRL, kinds balanced",
    "own": "states of its own play",
    "grpo": "GRPO at the same bill",
}
HARD = {"difficulty": "hard"}
GAMES = 128  # of a seed
SHARE_OF_DEV = 0.2  # of them, drawn by a hash
LONGEST = 40  # turns of a game that is searched for states, or tested
LOSS = LossConfig(kl_coefficient=0.02)
SFT = SFTConfig(epochs=3, optimizer=OptimizerConfig(learning_rate=3e-4))
PROFILE = ProfileConfig(sampling=COMMAND, rollouts=8)
_RATE = OptimizerConfig(learning_rate=5e-4, warmup_steps=3)
PIVOTRL = PivotConfig(steps=40, check_every=20, sampling=COMMAND, loss=LOSS, optimizer=_RATE)
OWN = replace(PIVOTRL, steps=20, per_trace=4, check_every=10)
SEARCH = OwnPathConfig(refresh=7, tasks=32, max_turns=LONGEST, candidates=300, rollouts=4)
GRPO = OnlineConfig(
    iterations=4,  # of 24 in the table: about the tokens of own states
    check_every=0,
    sampling=COMMAND,
    loss=LOSS,
    optimizer=replace(_RATE, learning_rate=3e-4),
)
CHECK = CheckConfig(states=150, tasks=32, max_turns=LONGEST, stops=False)
TEST = EvaluateConfig(count=200, max_turns=LONGEST, max_tokens=COMMAND.max_tokens, skills_per_kind=100)
TEST = replace(TEST, environment=Part("household", HARD))


@dataclass(frozen=True, kw_only=True)
class QuickstartConfig(Bounded):
    """`turntree quickstart`."""

    seed: Count = 0
    """Of every stage."""
    workers: Positive = 2
    """Stages that may run at the same time."""


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
    arms = (_profile_and_train, _own, _grpo, _base_and_sft)
    _together(config.workers, [(function, config.seed, out) for function in arms])
    summary = summarise(out)
    summary["wall_seconds"] = round(time.perf_counter() - started, 1)
    summary["report"] = str(out / "report.html")  # made from the finished directory by the command
    write_json(out / "summary.json", summary)
    return summary


def games_of(seed: int) -> dict[str, Any]:
    """Every seed trains on games of its own."""
    return {"offset": GAMES_PER_SEED * seed, **HARD}


def demonstrator(seed: int) -> Part:
    return Part("household", {"environment": games_of(seed), "count": GAMES, "dev": SHARE_OF_DEV, "seed": seed})


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
    _evaluate(seed, out, "base")
    traces, training = str(out / "traces.jsonl"), replace(SFT, seed=seed)
    stage = SFTStageConfig(traces=traces, sft=training, check=SFTCheckConfig(tasks=0))
    sft.run_sft(stage, out / "sft", overwrite=True)
    _evaluate(seed, out, "sft")


def _profile_and_train(seed: int, out: Path) -> None:
    stage = ProfileStageConfig(traces=str(out / "traces.jsonl"), limit=600, profile=replace(PROFILE, seed=seed))
    profile.run_profile(stage, out / "profile.jsonl")
    select.run_select(out / "profile.jsonl", SelectConfig(threshold=1.0, seed=seed), out / "pivots.jsonl")
    training = TrainPivotConfig(pivots=str(out / "pivots.jsonl"), train=replace(PIVOTRL, seed=seed), check=CHECK)
    train_pivot.run_train_pivot(training, out / "pivotrl", overwrite=True)
    _evaluate(seed, out, "pivotrl")


def _own(seed: int, out: Path) -> None:
    train_pivot.run_train_pivot(own_stage(seed), out / "own", overwrite=True)
    _evaluate(seed, out, "own")


def own_stage(seed: int) -> TrainPivotConfig:
    """The policy plays as many games as the others train on: the first of the demonstrator's, not those of a hash."""
    environment, count = _played(seed)
    return TrainPivotConfig(
        states="own",
        own=replace(SEARCH, count=count),
        environment=environment,
        teacher=Part("household"),
        verifier=Part("household"),
        train=replace(OWN, seed=seed),
        check=replace(CHECK, states=0),
    )


def _grpo(seed: int, out: Path) -> None:
    environment, count = _played(seed)
    unseen = EpisodesCheckConfig(tasks=0)
    stage = TrainOnlineConfig(environment=environment, count=count, check=unseen, train=replace(GRPO, seed=seed))
    train_online.run_train_online(stage, out / "grpo", overwrite=True)
    _evaluate(seed, out, "grpo")


def _played(seed: int) -> tuple[Part, int]:
    return Part("household", games_of(seed)), int(GAMES * (1 - SHARE_OF_DEV))


def _evaluate(seed: int, out: Path, arm: str) -> None:
    model = "default" if arm == "base" else str(out / arm / "model")
    evaluate.evaluate(replace(TEST, model=model, seed=seed), out / "evaluation" / f"{arm}.json")


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
        **(row["bill"] or dict.fromkeys(results.BILLED, 0)),  # the start cost nothing
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
    rows = [("policy", "success, sampled", "greedy", "retention change", "decoded", "whole bill", "seconds")]
    for arm in ARMS:
        row = summary["arms"][arm]
        cells = (
            TITLES[arm],
            f"{row['success']:.1%} [{row['low']:.1%}, {row['high']:.1%}]",
            f"{row['greedy_success']:.1%}",
            f"{row['retention_change'] * 100:+.1f} points",
            f"{row['tokens']:,}",
            f"{sum(row[key] for key in ('tokens', 'prefilled_tokens', 'trained_tokens')):,}",
            f"{row['seconds']:.0f}",
        )
        rows.append(cells)
    longest, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    return [
        *(_sentence(name, row) for name, row in summary["differences"].items()),
        *(f"{policy:{longest}}  {'  '.join(map(str.rjust, cells, widths))}" for policy, *cells in rows),
        "whole bill: tokens decoded, prefilled and trained on; what an expert's labels would cost is not in it",
        f"{summary['wall_seconds']:.0f} s in all; report: {summary['report']}",
    ]


def _sentence(name: str, row: dict[str, Any]) -> str:
    sampled, greedy = (
        results.Estimate(*(row[f"{prefix}{key}"] for key in ("mean", "low", "high")), tasks=row["games"])
        for prefix in ("", "greedy_")
    )
    first, _, second = name.partition("-")
    return results.Difference(first, second, sampled, greedy).sentence(TITLES.__getitem__).replace(MINUS, "-")
