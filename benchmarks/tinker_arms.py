"""The same training on a server of Tinker's API and here, from the same start:

  TURNTREE_TINKER=VENV python benchmarks/tinker_arms.py FOLDER [--world household] [--seeds 0 1 2] [--iterations 12]

GRPO on whole episodes with an embedded policy, an adapter of rank 16 in both arms: on SkyRL's real server (CPUs, JAX)
and in this process. Held-out success before and after, with Wilson's interval over the tasks of all seeds. With
`--pivots` also PivotRL whole on the server: profile, select, train, evaluate. What is done is not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from skyrl_server import opened
from turntree.cli.main import main
from turntree.run.wilson import wilson

HERE, THERE = "our trainer", "SkyRL"
TASKS = 48  # held out
ONLINE = {
    "train.groups": 8,
    "train.rollouts.group_size": 8,
    "train.loss.kl_coefficient": 0.0,
    "train.optimizer.learning_rate": 2e-3,
    "train.optimizer.max_grad_norm": 1e9,  # SkyRL clips none
    "train.check_every": 0,
    "held_out_count": TASKS,
}
EPISODES = {
    "household": {"train.rollouts.episodes.max_turns": 8, "train.rollouts.episodes.sampling.max_tokens": 16},
    "qa": {"train.rollouts.episodes.max_turns": 5, "train.rollouts.episodes.sampling.max_tokens": 48},
}
PIVOTS = {
    "train.states": 8,
    "train.group_size": 8,
    "train.sampling.max_tokens": 16,
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


def trained(world: str, arm: str, seed: int, base: Path, folder: Path, iterations: int) -> tuple[float, float, float]:
    """Held-out success before and after, and the seconds that it took."""
    out, told = folder / f"{arm.split()[0]}-{seed}", folder / f"{arm.split()[0]}-{seed}.json"
    if not told.exists():
        where = {"device.carrier.timeout": 1800} if arm == THERE else {"device.lora.rank": 16, "device.lora.alpha": 32}
        carrier, started = " --carrier tinker" if arm == THERE else "", time.perf_counter()
        settings = {**ONLINE, **EPISODES[world], **where, "train.iterations": iterations}
        command = f"train online --environment {world} --model {base} --seed {seed} --out {out}{carrier}"
        turntree(command, settings)
        told.write_text(json.dumps(time.perf_counter() - started))
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return rows[0]["held_out_success"], rows[-1]["held_out_success"], json.loads(told.read_text())


def share(rates: Sequence[float]) -> str:
    low, high = wilson(sum(rates) * TASKS, len(rates) * TASKS)
    return f"{sum(rates) / len(rates):.2f} [{low:.2f}, {high:.2f}]"


def pivots(base: Path, folder: Path, steps: int) -> str:
    """PivotRL on the server; success before and after."""
    folder.mkdir(exist_ok=True)
    there = {"device.carrier.timeout": 1800}
    sampling = {"profile.rollouts": 8, "profile.sampling.max_tokens": 16}
    play = f"evaluate --environment household --carrier tinker --set count={TASKS} --set greedy=true --set samples=0"
    play += " --set max_turns=8 --set max_tokens=16"
    turntree(f"traces household --count 12 --out {folder}/traces.jsonl")
    asked = f"profile --traces {folder}/traces.jsonl --carrier tinker --model {base} --limit 48"
    turntree(f"{asked} --out {folder}/profile.jsonl", {**sampling, **there})
    turntree(f"select {folder}/profile.jsonl --out {folder}/pivots.jsonl")
    train = f"train pivot {folder}/pivots.jsonl --carrier tinker --model {base} --out {folder}/run"
    turntree(train, {**PIVOTS, **there, "train.steps": steps})
    turntree(f"{play} --model {base} --out {folder}/before.json", there)
    turntree(f"{play} --model {folder}/run/model --out {folder}/after.json", there)
    found = [json.loads((folder / f"{name}.json").read_text())["greedy"]["success"] for name in ("before", "after")]
    return f"| household, PivotRL | {THERE} | {share(found[:1])} | {share(found[1:])} | |"


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
            for arm in (HERE, THERE):
                runs = [trained(world, arm, seed, server.base, folder, options.iterations) for seed in options.seeds]
                if runs:
                    before, after, seconds = zip(*runs, strict=True)
                    took = sum(seconds) / len(seconds)
                    table.append(f"| {world} | {arm} | {share(before)} | {share(after)} | {took:.0f} |")
                    print("\n".join(table), flush=True)
            if options.pivots and world == "household":
                table.append(pivots(server.base, folder / "pivots", options.iterations))
        finally:
            server.kill()
    print("\n".join(table))


if __name__ == "__main__":
    run()
