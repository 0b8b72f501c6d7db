"""Several quickstart runs as the tables of docs/results/quickstart.md.

for seed in 0 1 2 3 4; do turntree quickstart --seed $seed --out runs/seeds/$seed; done
python recipes/quickstart_table.py runs/seeds/*
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean
from typing import Any

from turntree.observe.files import read_json

ARMS = {"base": "base", "sft": "SFT", "random": "random pivots", "pivotrl": "PivotRL"}


def success_rows(runs: dict[str, Any]) -> list[str]:
    rows = ["| seed | " + " | ".join(f"{name} (greedy)" for name in ARMS.values()) + " |", "|---" * 5 + "|"]
    for seed, run in runs.items():
        cells = [
            f"{run['arms'][arm]['success']:.1%} [{run['arms'][arm]['low']:.1%}, {run['arms'][arm]['high']:.1%}] "
            f"({run['arms'][arm]['greedy_success']:.1%})"
            for arm in ARMS
        ]
        rows.append(f"| {seed} | " + " | ".join(cells) + " |")
    averages = [
        f"{mean(run['arms'][arm]['success'] for run in runs.values()):.1%} "
        f"({mean(run['arms'][arm]['greedy_success'] for run in runs.values()):.1%})"
        for arm in ARMS
    ]
    return [*rows, "| mean | " + " | ".join(averages) + " |"]


def difference_rows(runs: dict[str, Any]) -> list[str]:
    names = list(next(iter(runs.values()))["differences"])
    rows = ["| seed | " + " | ".join(f"{name} | greedy" for name in names) + " |", "|---" * (2 * len(names) + 1) + "|"]
    for seed, run in runs.items():
        cells = []
        for name in names:
            for prefix in ("", "greedy_"):
                row = {key: 100 * run["differences"][name][prefix + key] for key in ("mean", "low", "high")}
                cells.append(f"{row['mean']:+.1f} [{row['low']:+.1f}, {row['high']:+.1f}]")
        rows.append(f"| {seed} | " + " | ".join(cells) + " |")
    return rows


def cost_rows(runs: dict[str, Any]) -> list[str]:
    rows = ["| policy | retention change, points | rollout turns | generated tokens | seconds |", "|---" * 5 + "|"]
    for arm, name in ARMS.items():
        cells = [[run["arms"][arm][key] for run in runs.values()] for key in ("turns", "tokens", "seconds")]
        change = ", ".join(f"{100 * run['arms'][arm]['retention_change']:+.1f}" for run in runs.values())
        rows.append(f"| {name} | {change} | " + " | ".join(f"{mean(cell):,.0f}" for cell in cells) + " |")
    return rows


def main() -> None:
    runs = {Path(folder).name: read_json(Path(folder) / "summary.json") for folder in sys.argv[1:]}
    for table in (success_rows(runs), difference_rows(runs), cost_rows(runs)):
        print("\n".join(table), end="\n\n")


if __name__ == "__main__":
    main()
