"""Several quickstart runs as the tables of docs/results/quickstart.md. A row of one seed has intervals over games; the
row of all seeds has intervals for other seeds and other games.

for seed in 0 1 2 3 4; do turntree quickstart --seed $seed --out runs/seeds/$seed; done
python recipes/quickstart_table.py runs/seeds/*
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean
from typing import Any

from turntree.experiments.paired import Outcomes, over_seeds_and_tasks, paired_outcomes, task_matrix
from turntree.run.files import read_json

ARMS = {"base": "base", "sft": "SFT", "random": "random pivots", "pivotrl": "PivotRL"}


def outcomes(folders: dict[str, Path], arm: str, key: str) -> list[Outcomes]:
    """Success by game in every seed; every seed plays the same games."""
    found = [read_json(folder / "evaluation" / f"{arm}.json")[key]["outcomes"] for folder in folders.values()]
    return [{row["task"]: mean(row["rewards"]) for row in rows if row["rewards"]} for rows in found]


def interval(found: dict[str, Any], form: str = "{:+.1f}") -> str:
    """In points, for other seeds and other games; one seed has no interval."""
    told = [None if found[key] is None else form.format(100 * found[key]) for key in ("mean", "low", "high")]
    return f"{told[0]}" if told[1] is None else f"{told[0]} [{told[1]}, {told[2]}]"


def success_rows(runs: dict[str, Any], folders: dict[str, Path]) -> list[str]:
    rows = ["| seed | " + " | ".join(f"{name} (greedy)" for name in ARMS.values()) + " |", "|---" * 5 + "|"]
    for seed, run in runs.items():
        cells = [
            f"{run['arms'][arm]['success']:.1%} [{run['arms'][arm]['low']:.1%}, {run['arms'][arm]['high']:.1%}] "
            f"({run['arms'][arm]['greedy_success']:.1%})"
            for arm in ARMS
        ]
        rows.append(f"| {seed} | " + " | ".join(cells) + " |")
    averages = []
    for arm in ARMS:
        matrices = [task_matrix(outcomes(folders, arm, key))[0][0] for key in ("sampled", "greedy")]
        averages.append("{} ({})".format(*(interval(over_seeds_and_tasks(each), "{:.1f}%") for each in matrices)))
    return [*rows, "| all seeds | " + " | ".join(averages) + " |"]


def difference_rows(runs: dict[str, Any], folders: dict[str, Path]) -> list[str]:
    names = list(next(iter(runs.values()))["differences"])
    rows = ["| seed | " + " | ".join(f"{name} | greedy" for name in names) + " |", "|---" * (2 * len(names) + 1) + "|"]
    for seed, run in runs.items():
        cells = []
        for name in names:
            for prefix in ("", "greedy_"):
                row = {key: 100 * run["differences"][name][prefix + key] for key in ("mean", "low", "high")}
                cells.append(f"{row['mean']:+.1f} [{row['low']:+.1f}, {row['high']:+.1f}]")
        rows.append(f"| {seed} | " + " | ".join(cells) + " |")
    pairs = [name.split("-") for name in names]
    cells = [
        interval(paired_outcomes(*(outcomes(folders, arm, key) for arm in pair))["by_seed"])
        for pair in pairs
        for key in ("sampled", "greedy")
    ]
    return [*rows, "| all seeds | " + " | ".join(cells) + " |"]


def cost_rows(runs: dict[str, Any]) -> list[str]:
    rows = ["| policy | retention change, points | rollout turns | generated tokens | seconds |", "|---" * 5 + "|"]
    for arm, name in ARMS.items():
        cells = [[run["arms"][arm][key] for run in runs.values()] for key in ("turns", "tokens", "seconds")]
        change = ", ".join(f"{100 * run['arms'][arm]['retention_change']:+.1f}" for run in runs.values())
        rows.append(f"| {name} | {change} | " + " | ".join(f"{mean(cell):,.0f}" for cell in cells) + " |")
    return rows


def main() -> None:
    folders = {Path(folder).name: Path(folder) for folder in sys.argv[1:]}
    runs = {name: read_json(folder / "summary.json") for name, folder in folders.items()}
    for table in (success_rows(runs, folders), difference_rows(runs, folders), cost_rows(runs)):
        print("\n".join(table), end="\n\n")


if __name__ == "__main__":
    main()
