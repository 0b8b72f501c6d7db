"""Asynchronous against synchronous rollouts at the same number of updates: success and wall-clock, with slow tools.

    python benchmarks/async_rollouts.py [--seeds 4] [--iterations 20] [--tool-seconds 0.1] [--json PATH]

The rooms of examples/hide_and_seek.py, whose answers come late by a draw that is keyed by room and command (lognormal,
sigma 1, with this mean, at most 20 times it). Two rollout workers on a local Ray cluster; staleness is
`train.max_off_policy_steps`. `seconds` are those from the first to the last iteration, so without the start of the
workers; `waited` is the part of them in which the trainer had no rollouts to train on; `success` is sampled at
temperature 1 on 50 rooms of "dev", four times each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray

from turntree.cli.common import finish
from turntree.core import seeds
from turntree.core.completion import Sampling
from turntree.core.config import Part
from turntree.core.messages import Message
from turntree.core.protocols import Observation
from turntree.observe.run import RunDirectory
from turntree.rollouts.live import EpisodeConfig
from turntree.rollouts.scheduler import SchedulerConfig
from turntree.stages.cluster import ClusterConfig
from turntree.stages.train_online import TrainOnlineConfig, run_train_online
from turntree.training.config import OnlineConfig, OptimizerConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from examples.hide_and_seek import HideAndSeek, tasks

STALENESS = (0, 1, 2, 4)


class SlowRoom(HideAndSeek):
    seconds = 0.0

    def step(self, action: Message) -> Observation:
        draw = seeds.generator(0, "delay", self.task_id, action.content, self.tries)
        time.sleep(min(20 * self.seconds, self.seconds * draw.lognormvariate(-0.5, 1.0)))
        return super().step(action)


def rooms(split: str, count: int, *, seed: int, seconds: float = 0.1) -> list[SlowRoom]:
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
        rollouts=SchedulerConfig(episodes=EpisodeConfig(max_turns=2, sampling=Sampling(max_tokens=24))),
    )
    return TrainOnlineConfig(
        environment=Part("async_rollouts:rooms", {"seconds": given.tool_seconds}),
        model="household",
        count=200,
        held_out_count=50,
        held_out_samples=4,
        held_out_temperature=1.0,
        train=train,
        keep_trees=0,
        cluster=ClusterConfig(workers=2),
    )


def measured(settings: TrainOnlineConfig, out: Path) -> dict[str, Any]:
    moments: list[float] = []
    log = RunDirectory.log

    def timed(run: RunDirectory, row: dict[str, Any]) -> None:
        moments.append(time.perf_counter())
        log(run, row)

    RunDirectory.log = timed
    try:
        run_train_online(settings, out)
    finally:
        RunDirectory.log = log
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row["step"]]
    return {
        "staleness": settings.train.max_off_policy_steps,
        "seed": settings.train.seed,
        "success": trained[-1]["held_out_success"],
        "seconds": round(moments[-2] - moments[1], 1),  # the last row waits for the check
        "waited": round(sum(row["timing"]["wait_seconds"] for row in trained[1:-1]), 1),
        "importance_truncated": max(row.get("importance_truncated", 0.0) for row in trained),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--tool-seconds", type=float, default=0.1)
    parser.add_argument("--json", metavar="PATH")
    given = parser.parse_args()
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(given.seeds):
            for staleness in STALENESS:
                runs.append(measured(config(seed, staleness, given), Path(folder) / f"{seed}.{staleness}"))
                print(json.dumps(runs[-1]), file=sys.stderr)
    groups = {k: [run for run in runs if run["staleness"] == k] for k in STALENESS}
    names = ("success", "seconds", "waited")
    medians = {
        k: {name: statistics.median(run[name] for run in found) for name in names} for k, found in groups.items()
    }
    finish({"runs": runs, "medians": medians}, given.json, [f"staleness {k}: {row}" for k, row in medians.items()])


if __name__ == "__main__":
    main()
