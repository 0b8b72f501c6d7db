"""The paper's 100 groups of Selective Rollout, calibrated like a log of one's own (docs/results/gate-calibration.md).

    python recipes/published_groups.py hybrid_gate_features.csv --turns 10 --thresholds .05,.08,.10,.12,.14,.18

The table is the authors' `hybrid_gate_features.csv`: a row for every group and turn K with `task_id`, `label` (mixed,
all_fail or all_succeed) and the seven signals. It has no lengths, so savings are nominal (horizon - K turns each). A
group counts as actionable unless every rollout ended before turn K (`termination_fraction` 1).
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from turntree.core.outcome import GroupOutcome
from turntree.decide.gates.calibrate import PAPER_SIGNAL, TABLE_1, CalibrateConfig, calibrate
from turntree.decide.gates.signals import SIGNALS
from turntree.decide.gates.table import GroupTable

HORIZON = 30
NO_LENGTHS = "the table has no turn or token counts of the rollouts"


def read_features(path: Path, turns: Sequence[int] | None = None) -> GroupTable:
    """The groups of the table at `turns` (None: at all that it has)."""
    groups: dict[str, dict[int, dict[str, str]]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            groups.setdefault(row["task_id"], {})[int(row["K"])] = row
    chosen = tuple(sorted(turns or {turn for group in groups.values() for turn in group}))
    signals = {
        name: np.array([[float(group[turn][name]) for turn in chosen] for group in groups.values()]) for name in SIGNALS
    }
    return GroupTable(
        source=str(path),
        max_turns=HORIZON,
        turns=chosen,
        tasks=tuple(groups),
        outcomes=tuple(GroupOutcome(group[chosen[0]]["label"]) for group in groups.values()),
        sizes_N=np.ones(len(groups)),
        signals_NK=signals,
        actionable_NK=signals["termination_fraction"] < 1,
        absent={"turns": NO_LENGTHS, "tokens": NO_LENGTHS},
    )


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("features", type=Path)
    parser.add_argument("--turns", type=lambda text: [int(turn) for turn in text.split(",")])
    parser.add_argument("--thresholds", type=lambda text: [float(one) for one in text.split(",")], default=TABLE_1)
    parser.add_argument("--signal", choices=SIGNALS, default=PAPER_SIGNAL)
    parser.add_argument("--termination", type=float)
    parser.add_argument("--floor", type=float, default=0.8)
    options = vars(parser.parse_args(words))
    table = read_features(options.pop("features"), options.pop("turns"))
    print(json.dumps(calibrate(table, CalibrateConfig(**options)), indent=1))


if __name__ == "__main__":
    main()
