"""Tiny folders of online training, written as its stage and the branching experiment write them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turntree.logs.groups import LoggedGroup, LoggedRollout
from turntree.logs.rollouts import append_groups
from turntree.observe.files import write_json

TASKS = 4


def search(query: str) -> str:
    return f'search({{"query": "{query}"}})'


def rollout(actions: Sequence[str], reward: float | None, shared: int = 0, *, refill: bool = False) -> LoggedRollout:
    return LoggedRollout(
        actions=tuple(actions),
        reward=reward,
        completed=reward is not None,
        turn_tokens=tuple(0 if turn < shared else 7 for turn in range(len(actions))),
        observations=("", *(f"seen before turn {turn}" for turn in range(2, len(actions) + 1))),
        stop="completed" if reward is not None else "environment_error",
        forked=shared > 0,
        refill=refill,
    )


def mixed_group() -> LoggedGroup:
    """Two starts and a refill; the second rollout forks from the first after one turn and wins."""
    rollouts = (
        rollout([search("mayor of <Eaton>"), search("a & b"), "<answer>Kirk</answer>"], 0.0),
        rollout([search("mayor of <Eaton>"), search("the right thing"), "<answer>Istria</answer>"], 1.0, shared=1),
        rollout([search("nothing")], None),
        rollout([search("again"), "<answer>Oak</answer>"], 0.0, refill=True),
    )
    return LoggedGroup(id="2.0", task="task-7", rollouts=rollouts, iteration=2)


def equal_group() -> LoggedGroup:
    return LoggedGroup(id="1.0", task="task-1", rollouts=(rollout(["a"], 1.0), rollout(["b"], 1.0)), iteration=1)


def metrics(success: Sequence[float], calls: int = 10) -> list[Any]:
    """A check before training and after every iteration; iteration t makes `calls` fresh calls of 16 in a chain."""
    branching = {
        **dict.fromkeys(("leaves", "starts", "refills", "forks", "tokens_fresh", "tokens_chain"), 4),
        "starts": 3,
        "refills": 1,
        "forks": 1,
        "calls_fresh": calls,
        "calls_chain": 16,
        "structural_saving": 1 - calls / 16,
        "forks_by_turn": {"2": 2, "10": 1},
        "correlation_within_starts": 0.5,
        "effective_leaves": 3.5,
    }
    rows: list[Any] = [{"step": 0, "held_out_success": success[0], "held_out_turns_per_episode": 4.0}]
    for step, held_out in enumerate(success[1:], start=1):
        logged = {
            "step": step,
            "groups": 1,
            "reward_mean": 0.5,
            "zero_variance_share": 0.25,
            "stops": {"completed": 3, "max_turns": 1},
            "branching": branching,
            "trees": {"calls_fresh": calls * step, "calls_chain": 16 * step},
            "spent": {"turns": 20 * step, "decoded_tokens": 100 * step},
            "held_out_success": held_out,
            "held_out_turns_per_episode": 4.0,
        }
        rows.append(logged)
    return rows


def decision(action: str, reason: str, value: float) -> Any:
    numbers = {"turn": 2.0, "entropy": 0.1, "value": value}
    return {"iteration": 1, "group": "1.0", "task": "t", "action": action, "reason": reason, "numbers": numbers}


def write_lines(path: Path, rows: Sequence[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_online_run(path: Path) -> Path:
    """Held-out success rises from one task of four to three; ten of sixteen calls an iteration are fresh."""
    config = {"model": "qa", "branching": {"rule": "entropy"}}
    rollouts = {"rollouts": {"initial_rollouts": 2, "group_size": 4}}
    write_json(path / "config.json", {"stage": "train online", "config": {**config, "train": rollouts}})
    write_lines(path / "metrics.jsonl", metrics([0.25, 0.5, 0.75]))
    write_lines(path / "held_out.jsonl", [*outcomes(0, 1), *outcomes(1, 2), *outcomes(2, 3)])
    told = [decision("fork", "entropy rose", 0.7)] * 3 + [decision("pass", "entropy did not rise enough", 0.5)] * 5
    told.append(decision("pass", "entropy rose, but no leaf is left to add", 0.8))
    write_lines(path / "branches.jsonl", told)
    append_groups(path / "rollouts.jsonl", [equal_group(), mixed_group()])
    with (path / "rollouts.jsonl").open("a", encoding="utf-8") as handle:
        handle.write('{"schema": "turntree.rol\n')  # cut off by a crash
    write_json(path / "cost.json", {"turns": 40, "timing": {"engine_seconds": 2.0}, "checks": {"turns": 12}})
    return path


def outcomes(iteration: int, wins: int) -> list[Any]:
    return [{"iteration": iteration, "task": f"t{t}", "rewards": [float(t < wins)] * 2} for t in range(TASKS)]


def over_seeds(mean: float, half: float | None, values: Sequence[float]) -> Mapping[str, Any]:
    edges = {"low": None, "high": None, "detectable": None}
    if half is not None:
        edges = {"low": mean - half, "high": mean + half, "detectable": 1.5 * half}
    return {"mean": mean, **edges, "values": list(values)}


def arm_totals(success: float, half: float | None = 0.05) -> Any:
    return {
        "held_out_success": over_seeds(success, half, [success, success]),
        "gain": {"by_seed": over_seeds(success - 0.25, half, [success - 0.25] * 2)},
        "calls": 1234.0,
        "decoded_tokens": 9876.0,
        "structural_saving": 0.375,
        "forks_per_group": 3.25,
        "rho": 3.5,
        "drift": None,
        "zero_variance_share": 0.4,
    }


def write_experiment(path: Path, half: float | None = 0.05) -> Path:
    """Entropy forks are 10 points above random ones at matched steps, and 2 (no difference shown) at matched calls."""
    far, near = over_seeds(0.10, half, [0.1, 0.1]), over_seeds(0.02, half, [0.0, 0.04])
    differences = {"matched_steps": {"by_seed": far}, "matched_calls": near, "mean_over_checks": near}
    summary = {
        "seeds": [0, 1],
        "base_success": [0.25, 0.25],
        "arms": {"entropy": arm_totals(0.6, half), "random": arm_totals(0.5, half)},
        "differences": {"entropy - random": differences},
    }
    write_json(path / "summary.json", summary)
    for seed, last in ((0, 0.5), (1, 0.7)):
        write_lines(path / f"seed{seed}" / "entropy" / "metrics.jsonl", metrics([0.25, 0.4, last], calls=10 + 2 * seed))
    write_lines(path / "seed0" / "random" / "metrics.jsonl", metrics([0.25, 0.4, 0.5]))
    return path
