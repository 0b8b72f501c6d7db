"""The same training on a server of Tinker's API and here, from the same start:

  TURNTREE_TINKER=VENV python benchmarks/tinker_arms.py FOLDER [--world household] [--seeds 0 1 2] [--iterations 12]

GRPO on whole episodes with an embedded policy, an adapter of rank 16 in both arms: on SkyRL's real server (CPUs, JAX)
and in this process. Held-out success before and after, sampled, in percent, with intervals for other seeds and tasks.
With `--pivots` also PivotRL whole on the server: profile, select, train, evaluate. What is done is not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from skyrl_server import opened
from turntree.cli.main import main
from turntree.experiments.paired import Outcomes, over_seeds_and_tasks, paired_outcomes, task_matrix
from turntree.run.files import read_json

HERE, THERE = "our trainer", "SkyRL"
TASKS = 200  # held out
PATIENCE = {"device.carrier.timeout": 1800}
ONLINE = {
    "train.groups": 4,
    "train.group_size": 8,
    "train.loss.kl_coefficient": 0.0,
    "train.optimizer.learning_rate": 2e-3,
    "train.optimizer.max_grad_norm": 1e9,  # SkyRL clips none
    "train.check_every": 0,
    "check.tasks": 0,
}
EPISODES = {"household": (16, 24), "qa": (5, 48)}  # most turns, and tokens of a turn
PIVOTS = {
    "train.groups": 8,
    "train.group_size": 8,
    "train.sampling.max_tokens": 24,
    "train.loss.kl_coefficient": 0.0,
    "train.optimizer.learning_rate": 2e-3,
    "train.optimizer.max_grad_norm": 1e9,
    "check.tasks": 0,
}


def turntree(command: str, settings: Mapping[str, Any] = {}) -> None:
    words = [*command.split(), *(word for key, value in settings.items() for word in ("--set", f"{key}={value}"))]
    try:
        main(words)
    except SystemExit as ended:
        if ended.code:
            sys.exit(f"{' '.join(words)} ended with {ended.code}")


def trained(world: str, arm: str, seed: int, base: Path, folder: Path, iterations: int) -> tuple[Outcomes, float]:
    """Held-out success by task, and the seconds that training took."""
    out, spent = folder / f"{arm.split()[0]}-{seed}", folder / f"{arm.split()[0]}-{seed}.json"
    carrier = " --carrier tinker" if arm == THERE else ""
    if not spent.exists():
        started, (turns, tokens) = time.perf_counter(), EPISODES[world]
        settings = {
            **ONLINE,
            "train.iterations": iterations,
            "train.max_turns": turns,
            "train.sampling.max_tokens": tokens,
            **(PATIENCE if arm == THERE else {"device.lora.rank": 16, "device.lora.alpha": 32}),
        }
        turntree(f"train online --environment {world} --model {base} --seed {seed} --out {out}{carrier}", settings)
        spent.write_text(json.dumps(time.perf_counter() - started))
    return played(world, out / "model", out / "after.json", seed, carrier), json.loads(spent.read_text())


def played(world: str, model: Path, out: Path, seed: int, carrier: str = "") -> Outcomes:
    """Held-out tasks, each played once, sampled."""
    turns, tokens = EPISODES[world]
    if not out.exists():
        play = f"evaluate --environment {world} --model {model} --seed {seed} --out {out}{carrier}"
        play += f" --count {TASKS} --samples 1 --max-turns {turns} --max-tokens {tokens} --set greedy=false"
        turntree(play, PATIENCE if carrier else {})
    return {row["task"]: mean(row["rewards"]) for row in read_json(out)["sampled"]["outcomes"] if row["rewards"]}


def interval(found: Mapping[str, Any], form: str = "{:.1f}") -> str:
    points = [form.format(100 * found[key]) for key in ("mean", "low", "high") if found[key] is not None]
    return points[0] + (f" [{points[1]}, {points[2]}]" if points[1:] else "")


def percent(seeds: Sequence[Outcomes]) -> str:
    return interval(over_seeds_and_tasks(task_matrix(seeds)[0][0]))


def pivots(base: Path, folder: Path, steps: int) -> str:
    """PivotRL on the server; success before and after."""
    folder.mkdir(exist_ok=True)
    sampling = {"profile.rollouts": 8, "profile.sampling.max_tokens": 24}
    turntree(f"traces household --count 12 --out {folder}/traces.jsonl")
    asked = f"profile --traces {folder}/traces.jsonl --carrier tinker --model {base} --limit 48"
    turntree(f"{asked} --out {folder}/profile.jsonl", {**sampling, **PATIENCE})
    turntree(f"select {folder}/profile.jsonl --out {folder}/pivots.jsonl")
    train = f"train pivot {folder}/pivots.jsonl --carrier tinker --model {base} --out {folder}/run"
    turntree(train, {**PIVOTS, **PATIENCE, "train.steps": steps})
    before = played("household", base, folder / "before.json", 0)
    after = played("household", folder / "run/model", folder / "after.json", 0, " --carrier tinker")
    return f"| household, PivotRL | {THERE} | {percent([before])} | {percent([after])} | |"


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--world", nargs="+", choices=list(EPISODES), default=list(EPISODES))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--pivots", action="store_true")
    options = parser.parse_args()
    table = ["| | trained by | before | after | seconds a run |", "|---|---|---|---|---|"]
    for world in options.world:
        folder = options.folder / world
        folder.mkdir(parents=True, exist_ok=True)
        server = opened(folder, world)
        os.environ["TINKER_BASE_URL"] = server.url
        try:
            after: dict[str, list[Outcomes]] = {}
            before = [played(world, server.base, folder / f"before-{seed}.json", seed) for seed in options.seeds]
            for arm in (HERE, THERE) if options.seeds else ():
                runs = [trained(world, arm, seed, server.base, folder, options.iterations) for seed in options.seeds]
                after[arm] = [outcomes for outcomes, _ in runs]
                seconds = mean(took for _, took in runs)
                table.append(f"| {world} | {arm} | {percent(before)} | {percent(after[arm])} | {seconds:.0f} |")
                print("\n".join(table), flush=True)
            if options.seeds:
                apart = interval(paired_outcomes(after[THERE], after[HERE])["by_seed"], "{:+.1f}")
                table.append(f"| {world} | {THERE} - {HERE}, paired | | {apart} | |")
            if options.pivots and world == "household":
                table.append(pivots(server.base, folder / "pivots", options.iterations))
        finally:
            server.kill()
    print("\n".join(table))


if __name__ == "__main__":
    run()
