"""The same game trained behind the gateway and in process: python recipes/agent_training.py FOLDER [--seeds 0,1,2,3]

The agent plays the rooms of examples/hide_and_seek.py in a process of its own, a loop on urllib (the SDK takes longer
to import than a room takes to play: examples/room_agent.py is the same loop on it). For every seed the same rooms are
trained on with the same settings, once with `--environment gateway:COMMAND` and once stepped by turntree, then both
policies play held-out rooms. Draws have the same keys, so the two runs of a seed should be one run: printed are the
number of iterations, up to which of them rewards and tokens are equal, how far the losses of these are apart, and
success.

Runs that are finished are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
GAME = "examples.hide_and_seek:tasks"
ARMS = {"in process": GAME, "gateway": f"gateway:{sys.executable} {Path(__file__).resolve()} --agent"}
ROOMS = 200
COUNTED = ("reward_mean", "trained_tokens", "rho", "groups_mixed", "stops", "decoded_tokens")


def play() -> None:
    """One rollout, as an agent: the task lies in a file, the policy behind a URL."""
    from examples.hide_and_seek import HideAndSeek

    from turntree import Message

    task = json.loads(Path(os.environ["TURNTREE_TASK"]).read_text())
    room = HideAndSeek(task["id"], task["thing"], task["places"], task["tries"])
    said = [{"role": "user", "content": message.content} for message in room.reset()]
    while True:
        answer = ask(said)
        told = room.step(Message("assistant", answer))
        if told.done:
            print(json.dumps({"reward": float(bool(told.success)), "success": bool(told.success)}))
            return
        said += [{"role": "assistant", "content": answer}, {"role": "user", "content": told.messages[0].content}]


def ask(messages: list[dict[str, str]]) -> str:
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"},
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=300) as reply:
        return json.load(reply)["choices"][0]["message"]["content"] or ""


def train(folder: Path, seed: int, iterations: int) -> dict[str, Path]:
    """The runs of both arms, made where they are missing."""
    from examples.hide_and_seek import tasks

    made: dict[str, Path] = {}
    for split in ("train", "dev"):
        rooms = [
            {"id": one.task_id, "thing": one.thing, "places": one.places, "tries": one.tries}
            for one in tasks(split, ROOMS if split == "train" else 40, seed=0)  # the rooms of every seed
        ]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(room) + "\n" for room in rooms))
    for arm, environment in ARMS.items():
        out = made[arm] = folder / f"{arm.replace(' ', '-')}.{seed}"
        files = ("--tasks", f"{folder}/train.jsonl", "--set", f"environment.held_out={folder}/dev.jsonl")
        command = ["train", "online", "--environment", environment, *(files if arm == "gateway" else ())]
        command += ["--count", ROOMS, "--held-out-count", 1, "--iterations", iterations, "--groups", 8]
        command += ["--max-turns", 2, "--max-tokens", 24, "--learning-rate", 1e-3, "--seed", seed, "--out", out]
        if not (out / "cost.json").exists():
            turntree(*command)
        played = ["evaluate", "--environment", GAME, "--split", "test", "--count", 200, "--max-turns", 2]
        if not Path(f"{out}.json").exists():
            turntree(*played, "--max-tokens", 24, "--model", out / "model", "--out", f"{out}.json")
    return made


def turntree(*words: object) -> None:
    told = [sys.executable, "-m", "turntree.cli.main", *map(str, words)]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    subprocess.run(told, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})


def compared(runs: dict[str, Path]) -> dict[str, Any]:
    """Figures of two runs of one seed, side by side."""
    pairs = list(zip(*([row for row in rows_of(run) if "loss" in row] for run in runs.values()), strict=True))
    equal = [all(one[name] == other[name] for name in COUNTED) for one, other in pairs]
    same = equal.index(False) if False in equal else len(equal)
    apart = max((abs(one["loss"] - other["loss"]) for one, other in pairs[:same]), default=0.0)
    success = {arm: json.loads(Path(f"{run}.json").read_text())["sampled"]["success"] for arm, run in runs.items()}
    return {"iterations": len(pairs), "equal": same, "loss_apart": apart, "success": success}


def rows_of(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{**row, "decoded_tokens": row.get("spent", {}).get("decoded_tokens")} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description="The same game trained behind the gateway and in process.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/agent-training"))
    parser.add_argument("--seeds", default="0,1,2,3")
    parser.add_argument("--iterations", type=int, default=16)
    parser.add_argument("--agent", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.agent:
        return play()
    found = {seed: compared(train(given.folder, seed, given.iterations)) for seed in map(int, given.seeds.split(","))}
    for seed, row in found.items():
        print(seed, json.dumps(row))
    return None


if __name__ == "__main__":
    main()
