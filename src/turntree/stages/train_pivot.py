"""`turntree train pivot`: selected states and their policy in, a post-trained policy out (PivotRL, Algorithm 1)."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turntree.advantages.credit import CreditRule
from turntree.core.config import to_mapping
from turntree.core.cost import NO_COST, Cost
from turntree.core.errors import InputError
from turntree.core.protocols import TurnState, TurnVerifier
from turntree.engines.checkpoint import save_model
from turntree.observe.files import file_hash, read_table
from turntree.observe.run import RunDirectory, progress
from turntree.profiling.select import SCHEMA
from turntree.rollouts.local import render, sample_local, score_local
from turntree.stages.evaluate import EvaluateConfig, play
from turntree.stages.policy import Device, Policy, load_policy
from turntree.stages.profile import read_candidates
from turntree.stages.tasks import GamesConfig, games
from turntree.stages.verifier import resolve_verifier
from turntree.training.isolation import check_path_isolation
from turntree.training.pivot import Pivot, PivotConfig, train_pivot


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """Held-out figures during training: acceptance by action kind on `states` development candidates, success on
    `games` development games (0: none). Pivot reward alone misleads (docs/results/quickstart.md)."""

    states: int = 0
    samples: int = 4
    games: int = 0
    difficulty: str = "easy"
    max_turns: int = 16


@dataclass(frozen=True, kw_only=True)
class TrainPivotConfig:
    """`allow_stale` accepts pivots that were profiled with another policy than `model` or another verifier than
    `verifier` (their means are then not those of the start)."""

    pivots: str
    model: str = "default"
    traces: str | None = None  # default: the file that the profile names
    verifier: str | None = None  # default: the one that the profile was made with; "strict" is the baseline of Eq. 2
    allow_stale: bool = False
    train: PivotConfig = field(default_factory=PivotConfig)
    check: CheckConfig = field(default_factory=CheckConfig)
    device: Device = field(default_factory=Device)

    def __post_init__(self) -> None:
        self.device.check_trainable()


def run_train_pivot(config: TrainPivotConfig, out: Path) -> dict[str, Any]:
    """Train; the policy lies in `out/model`, the curves in `out/metrics.jsonl`, the bill in `out/cost.json`."""
    header, rows = read_table(Path(config.pivots), SCHEMA)
    policy = load_policy(config.model, config.device)
    if header["policy_hash"] != policy.hash and not config.allow_stale:
        raise InputError(
            f"were profiled with policy {header['policy_hash']}, and {config.model!r} is {policy.hash}",
            path=config.pivots,
            hint="profile again with this policy, or pass --allow-stale",
        )
    traces = config.traces or str(header["traces"])
    pivots = _pivots(rows, policy, traces, header)
    verifier = _verifier(config, header)
    check_path_isolation(policy.model)
    run = RunDirectory(out)
    run.start("train pivot", to_mapping(config))
    reference = copy.deepcopy(policy.model).requires_grad_(False)
    spent_on_checks: list[Cost] = []
    with progress((), "train pivot", total=config.train.steps) as bar:

        def log(row: dict[str, Any]) -> None:
            run.log(row)
            if row["step"]:
                bar.update()
                bar.set_postfix(reward=f"{row['reward_mean']:.2f}", kl=f"{row['kl']:.3f}")

        cost = train_pivot(
            policy.model,
            reference,
            policy.engine,
            policy.renderer,
            pivots,
            verifier,
            config.train,
            log=log,
            check=_checks(config, policy, verifier, traces, spent_on_checks),
            estimator=CreditRule(per_rollout=config.train.loss.per_rollout_credit),
        )
    run.write_cost(cost, checks=sum(spent_on_checks, NO_COST))
    save_model(policy.model, policy.tokenizer, run.path / "model")
    last = run.metrics()[-1]
    return {
        "model": str(run.path / "model"),
        "states": len(pivots),
        "reward_mean": last["reward_mean"],
        "kl": last["kl"],
        "cost": cost.counts(),
    }


def _pivots(rows: Sequence[dict[str, Any]], policy: Policy, traces: str, header: dict[str, Any]) -> list[Pivot]:
    """The selected rows with their states, rendered once. Raises `InputError` when traces and pivots do not fit."""
    if file_hash(Path(traces)) != header["traces_hash"]:
        raise InputError(
            "is not the file that was profiled", path=traces, hint="name it with --traces, or profile again"
        )
    states = {(state.trace_id, state.turn): state for state in read_candidates(traces, str(header["split"]))[0]}
    return [
        Pivot(render(states[row["trace_id"], row["turn"]], policy.renderer), row["kind"], row["role"]) for row in rows
    ]


def _verifier(config: TrainPivotConfig, header: dict[str, Any]) -> TurnVerifier:
    """The profile's verifier, or the named one if it is the strict baseline or a stale profile is allowed."""
    verifier = resolve_verifier(config.verifier or str(header["verifier_source"]))
    if verifier.name != header["verifier"] and config.verifier != "strict" and not config.allow_stale:
        raise InputError(
            f"were profiled with verifier {header['verifier']!r}, and training would use {verifier.name!r}",
            path=config.pivots,
            hint="profile again with this verifier, or pass --allow-stale",
        )
    return verifier


def _checks(config: TrainPivotConfig, policy: Policy, verifier: TurnVerifier, traces: str, spent: list[Cost]):
    """What is measured on held-out states and games during training; None when nothing is asked for."""
    settings = config.check
    if not settings.states and not settings.games:
        return None
    states = read_candidates(traces, "dev", settings.states)[0] if settings.states else []
    prompted = [render(state, policy.renderer) for state in states]
    environments = []
    if settings.games:
        from turntree.domains.household.environment import HouseholdEnvironment

        chosen = GamesConfig(split="dev", count=settings.games, difficulty=settings.difficulty)
        environments = [HouseholdEnvironment(game) for game, _ in games(chosen)]

    def check(step: int) -> dict[str, Any]:
        figures: dict[str, Any] = {}
        if prompted:
            trees = sample_local(
                prompted, policy.engine, policy.renderer, config.train.sampling, settings.samples, seed=1
            )
            spent.extend(tree.cost for tree in trees)
            figures["held_out_acceptance"] = _acceptance(states, trees, verifier)
        if environments:
            played = EvaluateConfig(max_turns=settings.max_turns)
            summary, cost = play(policy, environments, played, config.train.sampling.temperature, 1, quiet=True)
            spent.append(cost)
            figures["held_out_success"] = summary["success"]
            figures["held_out_invalid_share"] = summary["invalid_share"]
        return figures

    return check


def _acceptance(states: Sequence[TurnState], trees: Sequence[Any], verifier: TurnVerifier) -> dict[str, float]:
    """Mean reward by kind of demonstrated action; "all" over everything."""
    by_kind: dict[str, list[float]] = defaultdict(list)
    for state, tree in zip(states, trees, strict=True):
        scored = list(score_local(tree, state, verifier).scored().values())
        by_kind[verifier.judge(state, state.demonstration).kind] += scored
        by_kind["all"] += scored
    return {kind: sum(scored) / len(scored) for kind, scored in sorted(by_kind.items()) if scored}
