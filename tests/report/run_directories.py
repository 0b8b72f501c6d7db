"""Tiny run directories, written as the stages write them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turntree.core.completion import Sampling
from turntree.core.config import to_mapping
from turntree.core.messages import Message
from turntree.pivots.select import SelectConfig, preview, select
from turntree.run.files import file_hash, write_json
from turntree.run.jsonl import write_lines
from turntree.run.statistics import wilson
from turntree.stages.config import EvaluateConfig
from turntree.traces.schema import Trace, write_traces

POLICY = "0123abcd"
HASHES = {"tokenizer_hash": "4567", "template_hash": "89ab"}
GAMES = 20


def write_complete_run(path: Path) -> Path:
    """Four arms: the base wins 5 of 20 games, SFT 7, a run of the name "random" 8, PivotRL 15."""
    path.mkdir(parents=True)
    write_trace_file(path / "traces.jsonl")
    write_profile(path)
    write_selections(path)
    write_json(path / "config.json", {"stage": "quickstart", "config": {"seed": 0}})
    write_training(path / "sft", "sft", [{"step": 1, "loss": 1.5}, {"step": 2, "loss": 1.25}])
    for arm, last in (("random", 0.5), ("pivotrl", 0.75)):
        write_training(path / arm, "train pivot", pivot_metrics(last))
    for arm, wins, accuracy in (("base", 5, 0.8), ("sft", 7, 0.6), ("random", 8, 0.75), ("pivotrl", 15, 0.7)):
        write_evaluation(path, arm, wins, accuracy)
    return path


def write_trace_file(path: Path) -> None:
    messages = (
        Message("user", "You are in a kitchen. Your task is to: put a <cup> on the shelf."),
        Message("assistant", "go to shelf 1"),
        Message("user", "You arrive at shelf 1."),
        Message("assistant", "take cup 1 from shelf 1"),
        Message("user", "You take cup 1."),
    )
    write_traces(path, [Trace(id=f"trace-{i}", messages=messages, split="train", success=True) for i in range(3)])


def candidate(trace: int, turn: int, kind: str, successes: int, actions: Sequence[tuple[str, float, int]]) -> Any:
    mean = successes / 4
    return {
        "trace_id": f"trace-{trace}",
        "turn": turn,
        "kind": kind,
        "rollouts": 4,
        "successes": successes,
        "unjudged": 0,
        "reward_mean": mean,
        "reward_var": mean * (1 - mean),
        "actions": [{"text": t, "reward": r, "strict": r, "count": n} for t, r, n in actions],
        "cost": {"turns": 4},
    }


def candidates() -> list[Any]:
    """Two pivots (one of each kind), a mixed but easy one, an all-fail, and an all-succeed group."""
    return [
        candidate(0, 0, "go", 2, [("go to shelf 1", 1.0, 2), ("look", 0.0, 2)]),
        candidate(0, 1, "take", 1, [("take pan 1", 0.0, 3), ("take cup 1 from shelf 1", 1.0, 1)]),
        candidate(1, 0, "go", 3, [("go to shelf 1", 1.0, 3), ("look", 0.0, 1)]),
        candidate(1, 1, "take", 0, [("look", 0.0, 4)]),
        candidate(2, 0, "go", 4, [("go to shelf 1", 1.0, 4)]),
    ]


def write_profile(path: Path, rows: Sequence[Any] | None = None) -> None:
    rows = candidates() if rows is None else rows
    traces = path / "traces.jsonl"
    header = {
        "schema": "turntree.profile/2",
        "config": {
            **{"traces": "traces.jsonl", "model": "default", "split": "train", "verifier": "household"},
            "profile": {"sampling": to_mapping(Sampling())},
        },
        "policy_hash": POLICY,
        **HASHES,
        "verifier": "household-functional/2",
        "traces_hash": file_hash(traces) if traces.exists() else "none",
        "summary": {
            "candidates": len(rows),
            "skipped_turns": {"empty_turn": 7},
            "miss_rate": 0.375,
            "cost": {"turns": 20, "decoded_tokens": 140, "prefilled_tokens": 900, "reused_tokens": 2700},
        },
        "timing": {"engine_seconds": 1.5, "environment_seconds": 0.0, "training_seconds": 0.0},
    }
    write_lines(path / "profile.jsonl", [header, *rows])


def write_selections(path: Path) -> None:
    config = SelectConfig()
    chosen = select(candidates(), config)
    header = {
        "schema": "turntree.pivots/2",
        "config": {"threshold": config.threshold},
        "policy_hash": POLICY,
        **HASHES,
        **{"verifier": "household-functional/2", "verifier_source": "household", "split": "train"},
        **{"traces": "traces.jsonl", "traces_hash": "none", "sampling": to_mapping(Sampling()), "cut": 0},
        "summary": {"selected": len(chosen.rows), "preview": preview(candidates(), (0.3, 0.6, 1.01))},
    }
    write_lines(path / "pivots.jsonl", [header, *chosen.rows])


def pivot_metrics(last: float) -> list[Any]:
    figures = {"kl": 0.01, "grad_norm": 0.5, "mixed_groups": 0.75, "rho": 2.0, "trained_tokens": 100.0}
    return [
        {"step": 0, "held_out_acceptance": {"all": 0.25, "go": 0.25}, "held_out_success": 0.25},
        {"step": 1, "reward_mean": 0.25, **figures},
        {"step": 2, "reward_mean": last, **figures, "rho": 4.0, "trained_tokens": 300.0, "held_out_success": 0.5},
    ]


def write_training(path: Path, stage: str, metrics: Sequence[Any]) -> None:
    write_json(path / "config.json", {"stage": stage, "config": {"model": "default", "seed": 0}})
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics), encoding="utf-8")
    timing = {"engine_seconds": 2.0, "environment_seconds": 0.0, "training_seconds": 60.0}
    write_json(path / "cost.json", {"turns": 16, "decoded_tokens": 112, "trained_tokens": 400, "timing": timing})
    write_json(path / "model" / "config.json", {"architectures": ["Any"]})


def write_evaluation(path: Path, arm: str, wins: int, accuracy: float) -> None:
    value = {
        "schema": "turntree.evaluation/1",
        "config": to_mapping(EvaluateConfig(model=arm, count=GAMES)),
        "policy_hash": POLICY,
        "sampled": play(wins, 1.0),
        "greedy": play(wins, 0.0),
        "retention": {
            "accuracy": accuracy,
            "chance": 0.25,
            "by_skill": {"sort": {"accuracy": accuracy, "chance": 0.25, "questions": 40}},
        },
        "cost": {"turns": 300, "decoded_tokens": 2100, "timing": {"engine_seconds": 4.0}},
    }
    write_json(path / "evaluation" / f"{arm}.json", value)


def play(wins: int, temperature: float) -> dict[str, Any]:
    rewards = [float(game < wins) for game in range(GAMES)]
    halves = {"clean": rewards[: GAMES // 2], "look": rewards[GAMES // 2 :]}
    return {
        "temperature": temperature,
        **share(rewards),
        "by_task_type": {kind: share(half) for kind, half in halves.items()},
        "invalid_share": 0.125,
        "turns_per_episode": 10.0,
        "censored": 0,
        "outcomes": [{"task": f"game-{game}", "rewards": [reward]} for game, reward in enumerate(rewards)],
    }


def share(rewards: Sequence[float]) -> dict[str, Any]:
    low, high = wilson(sum(rewards), len(rewards))
    return {"success": sum(rewards) / len(rewards), "low": low, "high": high, "episodes": len(rewards)}
