"""Asynchronous against synchronous rollouts at the same number of updates: success and wall-clock, with slow tools.

    python benchmarks/async_rollouts.py --out FOLDER [--seeds 4] [--iterations 20] [--tool-seconds 0.08] [--json PATH]
    python benchmarks/async_rollouts.py --out FOLDER --servers URL,URL    # vLLM samples; an adapter is trained

The rooms of examples/hide_and_seek.py, whose answers come late by a draw that is keyed by room and command (lognormal,
sigma 1, with this mean, at most 20 times it). Rollout workers on a local Ray cluster; staleness is
`train.max_off_policy_steps`. `seconds` are those from the end of the first iteration to that of the last but one, so
without the start of the workers and without the check; `waited` is the part of them in which the trainer had no
rollouts to train on; `success` is sampled at temperature 1 on 50 rooms of "dev", four times each. The settings of one
seed run one after the other, and ratios are taken within a seed, so a slow hour of the machine meets all of them.
Killed, the same command goes on with the first run that is not finished.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from turntree.cli.common import finish
from turntree.core import seeds
from turntree.core.completion import Sampling
from turntree.core.config import Part
from turntree.core.messages import Message
from turntree.core.protocols import Observation
from turntree.experiments.paired import (
    arm_folder,
    held_out_outcomes,
    over_seeds,
    over_seeds_and_tasks,
    paired_outcomes,
    ratio_over_seeds,
    task_matrix,
)
from turntree.rollout.cluster.config import WorkersConfig
from turntree.run.folder import RunDirectory
from turntree.run.loggers import RunInfo
from turntree.stages.config import Device, EpisodesCheckConfig
from turntree.stages.train_online import TrainOnlineConfig, run_train_online
from turntree.train.config import LoRAConfig, OnlineConfig, OptimizerConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from examples.hide_and_seek import HideAndSeek, tasks


class SlowRoom(HideAndSeek):
    seconds = 0.0

    def step(self, action: Message) -> Observation:
        draw = seeds.generator(0, "delay", self.task_id, action.content, self.tries)
        time.sleep(min(20 * self.seconds, self.seconds * draw.lognormvariate(-0.5, 1.0)))
        return super().step(action)


def rooms(split: str, count: int, *, seed: int, seconds: float = 0.08) -> list[SlowRoom]:
    """Only training is slow: a check at the end is the same for all."""
    found: list[SlowRoom] = []
    for room in tasks(split, count, seed=seed):
        found.append(SlowRoom(room.task_id, room.thing, room.places, room.tries))
        found[-1].seconds = seconds if split == "train" else 0.0
    return found


def config(seed: int, staleness: int, given: argparse.Namespace) -> TrainOnlineConfig:
    train = OnlineConfig(
        iterations=given.iterations,
        groups=given.groups,
        check_every=0,
        seed=seed,
        max_off_policy_steps=staleness,
        optimizer=OptimizerConfig(learning_rate=1e-3),
        max_turns=2,
        sampling=Sampling(max_tokens=24),
    )
    servers = Part("vllm", {"url": given.servers})
    device = Device(lora=LoRAConfig(), engine=servers) if given.servers else Device()
    return TrainOnlineConfig(
        environment=Part("async_rollouts:rooms", {"seconds": given.tool_seconds}),
        model="household",
        count=200,
        check=EpisodesCheckConfig(tasks=200, temperature=1.0, stops=False),
        train=train,
        keep_trees=0,
        cluster=WorkersConfig(workers=given.workers),
        device=device,
    )


class Clock:
    """A logger that writes down when each iteration ended."""

    def __init__(self, run: RunInfo) -> None:
        self.path = run.folder / "clock.jsonl"
        self.path.unlink(missing_ok=True)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        with self.path.open("a") as handle:
            handle.write(json.dumps({"step": step, "at": time.perf_counter()}) + "\n")

    def close(self) -> None: ...


def measured(settings: TrainOnlineConfig, out: Path) -> dict[str, Any]:
    """Run `settings` in `out` unless that was done. A run that was killed starts again: its clock has stopped."""
    if not (out / "cost.json").exists():
        run_train_online(replace(settings, loggers=(Part("async_rollouts:Clock"),)), out, overwrite=True)
    trained = [row for row in RunDirectory(out).metrics() if row["step"]]
    ends = {row["step"]: row["at"] for row in RunDirectory(out).rows("clock.jsonl")}
    return {
        "staleness": settings.train.max_off_policy_steps,
        "workers": settings.cluster.workers,
        "seed": settings.train.seed,
        "success": trained[-1]["held_out_success"],
        "seconds": round(ends[trained[-2]["step"]] - ends[trained[0]["step"]], 2),
        "censored": sum(row.get("groups_censored", 0) for row in trained),
        "waited": round(sum(row["timing"]["wait_seconds"] for row in trained[1:-1]), 2),
        "staleness_mean": trained[-1].get("staleness_mean", 0),
        "importance_truncated": max(row.get("importance_truncated", 0.0) for row in trained),
    }


def against_synchronous(runs: Sequence[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """For each staleness: success over seeds and rooms, its difference to staleness 0, and the ratio of seconds."""
    by = {(run["staleness"], run["seed"]): run for run in runs}
    seeds_run = sorted({seed for _, seed in by})
    outcomes = {k: [held_out_outcomes(arm_folder(folder, seed, f"staleness{k}")) for seed in seeds_run] for k, _ in by}
    found: dict[str, Any] = {}
    for k in sorted(outcomes):
        (success,), _ = task_matrix(outcomes[k])
        mine = [by[k, seed] for seed in seeds_run]
        found[str(k)] = {
            "success": over_seeds_and_tasks(success),
            "seconds": over_seeds([run["seconds"] for run in mine]),
            "waited_share": over_seeds([run["waited"] / run["seconds"] for run in mine]),
        }
        if k:
            ratios = [by[0, run["seed"]]["seconds"] / run["seconds"] for run in mine]
            found[str(k)] |= {
                "times_faster": ratio_over_seeds(ratios),
                "difference": paired_outcomes(outcomes[k], outcomes[0])["by_seed"],
            }
    return found


def line(k: str, found: dict[str, Any]) -> str:
    text = "staleness {}: success {:.1%}, {:.0f} s, {:.0%} of them waiting".format(
        k, *(found[name]["mean"] for name in ("success", "seconds", "waited_share"))
    )
    if "difference" in found:
        edges = [found[name][edge] for name in ("times_faster", "difference") for edge in ("mean", "low", "high")]
        text += "; {:.2f} [{:.2f}, {:.2f}] times faster; success {:+.1%} [{:+.1%}, {:+.1%}]".format(*edges)
    return text


def start_ray(workers: int) -> None:
    ray.init(address="local", num_cpus=workers + 1, include_dashboard=False, log_to_driver=False, logging_level="error")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--servers", default="", help="of `turntree serve --model household --lora-rank 16`, by commas")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--tool-seconds", type=float, default=0.08)
    parser.add_argument("--json", metavar="PATH")
    given = parser.parse_args()
    if given.seeds < 2 or given.iterations < 3 or 0 not in given.staleness:
        parser.error("intervals need --seeds of 2 and more, the clock --iterations of 3, ratios --staleness 0")
    start_ray(given.workers)
    runs: list[dict[str, Any]] = []
    for seed in range(given.seeds):
        for staleness in given.staleness:
            out = arm_folder(given.out, seed, f"staleness{staleness}")
            runs.append(measured(config(seed, staleness, given), out))
            print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    found = against_synchronous(runs, given.out)
    finish({"runs": runs, "staleness": found}, given.json, [line(*each) for each in found.items()])


if __name__ == "__main__":
    main()
