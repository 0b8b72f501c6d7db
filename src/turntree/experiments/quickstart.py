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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from turntree.core import parts
from turntree.core.config import Part, at_least, to_mapping
from turntree.core.errors import ConfigError, TurntreeError
from turntree.experiments.config import COMMAND, household_own, household_pivots, household_selection
from turntree.pivots.profile import ProfileConfig
from turntree.pivots.select import SelectConfig
from turntree.report import results
from turntree.report.read import ARMS, QUICKSTART_SCHEMA, read_run
from turntree.report.wording import MINUS
from turntree.run.files import write_json
from turntree.run.folder import open_folder
from turntree.run.workers import die_with_parent, without_interrupts
from turntree.stages import evaluate, profile, select, sft, train_pivot
from turntree.stages.config import CheckConfig, OwnPathConfig, TrainPivotConfig
from turntree.stages.demonstrate import demonstrate
from turntree.stages.evaluate import EvaluateConfig
from turntree.stages.policy import Device
from turntree.stages.profile import ProfileStageConfig
from turntree.stages.sft import SFTStageConfig
from turntree.train.optimizer import OptimizerConfig
from turntree.train.pivot import PivotConfig
from turntree.train.sft import SFTConfig

GAMES_PER_SEED = 1000  # so that every seed trains on games of its own
TITLES = {
    "base": "base",
    "sft": "SFT",
    "random": "random turns",
    "pivotrl": "PivotRL (the paper's, kinds capped)",
    "own": "own states, by importance (ours)",
}


@dataclass(frozen=True, kw_only=True)
class QuickstartConfig:
    """The vetted settings. All were chosen on development games; the test games were looked at once per seed
    (docs/results/quickstart.md)."""

    seed: int = 0
    """Of every stage."""
    workers: int = 2
    """Stages that may run at the same time."""
    model: str = "default"
    """The policy that all arms start from."""
    device: Device = field(default_factory=Device)
    demonstrator: Part = field(default_factory=lambda: Part("household", {"games": {"count": 700}, "slips": 0.2}))
    """The demonstrator whose traces all arms share: household, or your own module:object with its options games, seed
    and dev."""
    sft: SFTConfig = field(default_factory=lambda: SFTConfig(epochs=3, optimizer=OptimizerConfig(learning_rate=3e-4)))
    profile: ProfileConfig = field(default_factory=lambda: ProfileConfig(sampling=COMMAND))
    limit: int = 5000
    """Most candidates that are profiled."""
    select: SelectConfig = field(default_factory=household_selection)
    train: PivotConfig = field(default_factory=lambda: household_pivots(check_every=20))
    own: OwnPathConfig = field(default_factory=household_own)
    """The search for own states; its tasks are the games of the demonstrator."""
    own_steps: int = 30
    """Training steps on own states; everything else is as in `train`."""
    check: CheckConfig = field(default_factory=lambda: CheckConfig(states=150, tasks=60, max_tokens=COMMAND.max_tokens))
    evaluate: EvaluateConfig = field(
        default_factory=lambda: EvaluateConfig(count=400, max_tokens=24, skills_per_kind=100)
    )

    def __post_init__(self) -> None:
        at_least(self, workers=1)
        if not self.evaluate.greedy or not self.evaluate.skills_per_kind:
            raise ConfigError(
                "needs greedy=true and skills_per_kind above 0: the table compares both", field="evaluate"
            )


def run_quickstart(config: QuickstartConfig, out: Path, *, overwrite: bool = False) -> dict[str, Any]:
    """Run every stage into `out`, write `summary.json`, return the summary. Raises `InputError` where another process
    runs there, or another quickstart was run, unless `overwrite`; `ConfigError` for a demonstrator without games."""
    own_stage(config)  # before anything runs
    with open_folder(out, "quickstart", to_mapping(config), overwrite=overwrite, free=("config.workers",)):
        (out / "summary.json").unlink(missing_ok=True)  # of an earlier run: it would not fit the new artifacts
        if overwrite:
            for name in ("profile.jsonl", "profile.jsonl.waves"):
                (out / name).unlink(missing_ok=True)
        return _run(config, out)


def _run(config: QuickstartConfig, out: Path) -> dict[str, Any]:
    started = time.perf_counter()
    demonstrate(demonstrator(config), out / "traces.jsonl")
    begun = (_own, _profile_and_select, _base_and_sft)
    _together(config.workers, [(function, config, out) for function in begun])
    _together(config.workers, [(_train_and_evaluate, config, out, arm) for arm in ("pivotrl", "random")])
    summary = summarise(out)
    summary["wall_seconds"] = round(time.perf_counter() - started, 1)
    summary["report"] = str(out / "report.html")  # made from the finished directory by the command
    write_json(out / "summary.json", summary)
    return summary


def demonstrator(config: QuickstartConfig) -> Part:
    """Every seed trains on games of its own."""
    options = config.demonstrator.options
    games = {**options.get("games", {})}
    games["offset"] = games.get("offset", 0) + max(GAMES_PER_SEED, games.get("count", 0)) * config.seed
    return Part(config.demonstrator.name, {**options, "games": games, "seed": config.seed})


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


def _base_and_sft(config: QuickstartConfig, out: Path) -> None:
    _evaluate(config, config.model, out / "evaluation" / "base.json")
    training = replace(config.sft, seed=config.seed)
    stage = SFTStageConfig(traces=str(out / "traces.jsonl"), model=config.model, sft=training, device=config.device)
    sft.run_sft(stage, out / "sft", overwrite=True)
    _evaluate(config, str(out / "sft" / "model"), out / "evaluation" / "sft.json")


def _profile_and_select(config: QuickstartConfig, out: Path) -> None:
    stage = ProfileStageConfig(
        traces=str(out / "traces.jsonl"),
        model=config.model,
        limit=config.limit,
        profile=replace(config.profile, seed=config.seed),
        device=config.device,
    )
    profile.run_profile(stage, out / "profile.jsonl")
    chosen = replace(config.select, seed=config.seed)
    select.run_select(out / "profile.jsonl", chosen, out / "pivots.jsonl")
    select.run_select(out / "profile.jsonl", replace(chosen, rule="random"), out / "random.jsonl")


def _train_and_evaluate(config: QuickstartConfig, out: Path, arm: str) -> None:
    states = out / ("random.jsonl" if arm == "random" else "pivots.jsonl")
    stage = TrainPivotConfig(
        pivots=str(states),
        model=config.model,
        train=replace(config.train, seed=config.seed),
        check=config.check,
        device=config.device,
    )
    train_pivot.run_train_pivot(stage, out / arm, overwrite=True)
    _evaluate(config, str(out / arm / "model"), out / "evaluation" / f"{arm}.json")


def _own(config: QuickstartConfig, out: Path) -> None:
    train_pivot.run_train_pivot(own_stage(config), out / "own", overwrite=True)
    _evaluate(config, str(out / "own" / "model"), out / "evaluation" / "own.json")


def own_stage(config: QuickstartConfig) -> TrainPivotConfig:
    """The policy plays as many games as the other arms train on: the first of the demonstrator's. (The others leave out
    its development split, which is drawn by a hash.)"""
    options = parts.resolve("demonstrators", demonstrator(config)).options
    games = options.get("games", {})
    known = isinstance(games, dict) and {"source", "offset", "difficulty", "count"} <= games.keys()
    if not known or "dev" not in options:
        hint = "give it the options games (as turntree_worlds.household.entry:GamesConfig) and dev"
        raise ConfigError("does not say on which games own states are found", field="demonstrator", hint=hint)
    played = {"games": games["source"], "offset": games["offset"], "difficulty": games["difficulty"]}
    return TrainPivotConfig(
        states="own",
        own=replace(config.own, count=round(games["count"] * (1 - options["dev"]))),
        environment=Part("household", played),
        teacher=Part("household"),
        verifier=Part("household"),
        model=config.model,
        train=replace(config.train, seed=config.seed, steps=config.own_steps),
        check=replace(config.check, states=0),
        device=config.device,
    )


def _evaluate(config: QuickstartConfig, model: str, path: Path) -> None:
    chosen = replace(config.evaluate, model=model, seed=config.seed, device=config.device)
    evaluate.evaluate(chosen, path)


def summarise(out: Path) -> dict[str, Any]:
    """The comparison from the artifacts of a finished run, as its page has it."""
    run = read_run(out)
    assert run.profile is not None
    header = run.profile.header["summary"]
    return {
        "schema": QUICKSTART_SCHEMA,
        "arms": {arm.name: _row(arm) for arm in results.arm_results(run)},
        "differences": {f"{one.first}-{one.second}": _difference(one) for one in results.differences(run)},
        **{key: header[key] for key in ("candidates", "classes", "miss_rate")},
        "seed": run.seed,
        "machine": f"{platform.machine()}, {multiprocessing.cpu_count()} cores",
    }


def _row(arm: results.ArmResult) -> dict[str, Any]:
    assert arm.sampled is not None and arm.greedy is not None
    bill = arm.bill or results.Bill(0, 0, 0, 0.0)  # the policy at the start cost nothing
    return {
        **asdict(arm.sampled),
        "invalid_share": arm.invalid_share,
        **{f"greedy_{key}": getattr(arm.greedy, key) for key in ("success", "low", "high")},
        "retention": arm.skills,
        "retention_change": arm.skills_change or 0.0,
        **asdict(bill),
    }


def _difference(found: results.Difference) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for prefix, estimate in (("", found.sampled), ("greedy_", found.greedy)):
        assert estimate is not None
        row |= {f"{prefix}{key}": value for key, value in asdict(estimate).items() if key != "tasks"}
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
