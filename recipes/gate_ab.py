"""Tier 1 of Selective Rollout: the same tasks rolled out with and without the gate, by a frozen policy.

    python recipes/gate_ab.py --tasks 200 --gate-turn 8 --gate-threshold 0.64 --json -

A draw depends on (task, sample, turn) only, so both arms play the same episodes up to the turn of the cut, and the arm
without the gate tells exactly what every cut group would have become. Tasks are played in batches, the two arms in
turn, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from turntree.core.completion import Sampling
from turntree.core.outcome import group_outcome
from turntree.core.protocols import Gate
from turntree.decide.gates.divergence import PrefixDivergenceGate
from turntree.rollout.groups import GrownGroup
from turntree.rollout.live import EpisodeConfig
from turntree.rollout.scheduler import Scheduler, SchedulerConfig
from turntree.run.statistics import wilson
from turntree.stages.policy import Device, Policy, load_policy
from turntree_worlds.household.entry import Household
from turntree_worlds.household.environment import HouseholdEnvironment


@dataclass(frozen=True)
class Batch:
    """One batch of tasks in one arm. `seconds` are wall-clock, `cpu` those of this process."""

    groups: list[GrownGroup]
    seconds: float
    cpu: float


def play(policy: Policy, tasks: list[HouseholdEnvironment], options: argparse.Namespace, gate: Gate | None) -> Batch:
    sampling = Sampling(temperature=options.temperature, max_tokens=options.max_tokens)
    episodes = EpisodeConfig(max_turns=options.max_turns, sampling=sampling)
    config = SchedulerConfig(episodes=episodes, group_size=options.group_size, max_live_rollouts=options.places)
    policy.engine.clear_cache()  # nothing kept from the arm before
    started, cpu = time.perf_counter(), time.process_time()
    groups = list(Scheduler(policy.engine, policy.renderer, config, gate=gate).run(tasks, seed=options.seed))
    return Batch(groups, time.perf_counter() - started, time.process_time() - cpu)


def measure(options: argparse.Namespace) -> dict:
    policy = load_policy(options.model, Device())
    chosen = Household(games=options.games, offset=options.offset, difficulty=options.difficulty)
    with chosen.open({"dev": options.tasks}, seed=options.seed) as opened:
        tasks = opened.of("dev")
    gate = PrefixDivergenceGate(turn=options.gate_turn, threshold=options.gate_threshold)
    arms: dict[str, list[Batch]] = {"baseline": [], "gated": []}
    for number, start in enumerate(range(0, len(tasks), options.batch)):
        order = ["baseline", "gated"] if number % 2 == 0 else ["gated", "baseline"]
        for arm in order:
            part = tasks[start : start + options.batch]
            arms[arm].append(play(policy, part, options, gate if arm == "gated" else None))
    baseline, gated = ([group for batch in arms[arm] for group in batch.groups] for arm in ("baseline", "gated"))
    cut = [index for index, group in enumerate(gated) if group.cut is not None]
    right = sum(outcome(baseline[index]).zero_variance for index in cut)
    result = {
        "tasks": len(tasks),
        "zero_variance_share": sum(outcome(group).zero_variance for group in baseline) / len(baseline),
        "cut": len(cut),
        "zero_variance_of_cut": right,
        "precision": right / len(cut) if cut else None,
        "precision_interval": wilson(right, len(cut)),
    }
    for name in ("turns", "decoded_tokens", "tool_calls"):
        pairs = [[getattr(group.tree.cost, name) for group in groups] for groups in (baseline, gated)]
        result[f"{name}_saved"] = saving(*pairs)
    for name in ("seconds", "cpu"):
        pairs = [[getattr(batch, name) for batch in arms[arm]] for arm in ("baseline", "gated")]
        result[f"{name}_saved"] = saving(*pairs)
    return result


def outcome(group: GrownGroup):
    return group_outcome(group.rewards.values)


def saving(baseline: list[float], gated: list[float]) -> dict[str, object]:
    """1 - gated / baseline, with the 95% bootstrap interval over tasks (seconds: over batches)."""
    pairs = np.array([baseline, gated])
    drawn = np.random.default_rng(0).integers(len(baseline), size=(2000, len(baseline)))
    values = [1 - pairs[1, rows].sum() / pairs[0, rows].sum() for rows in drawn]
    return {
        "mean": float(1 - pairs[1].sum() / pairs[0].sum()),
        "interval": np.quantile(values, [0.025, 0.975]).tolist(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--offset", type=int, default=1000, help="of the development games; calibrate on others")
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--difficulty", default="easy")
    parser.add_argument("--games", default="generated", help="or a folder or packed file of ALFWorld's")
    parser.add_argument("--max-tokens", type=int, default=24, help="of a turn")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--places", type=int, default=160)
    parser.add_argument("--temperature", type=float, default=0.5)
    parser.add_argument("--max-turns", type=int, default=24)
    parser.add_argument("--gate-turn", type=int, default=8)
    parser.add_argument("--gate-threshold", type=float, default=0.64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", default="-")
    options = parser.parse_args()
    text = json.dumps(measure(options), indent=2)
    if options.json == "-":
        print(text)
    else:
        with open(options.json, "w", encoding="utf-8") as handle:
            handle.write(text + "\n")


if __name__ == "__main__":
    main()
