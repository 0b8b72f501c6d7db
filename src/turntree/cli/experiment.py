"""`turntree experiment`: compare methods over matched seeds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from turntree.cli.common import finish, out_option
from turntree.cli.options import StageCommand, short


@click.group(short_help="Compare methods: matched arms, intervals.")
def experiment() -> None:
    """Comparisons over seeds. An interrupted experiment goes on where it stopped; finished runs are not run again."""


@experiment.command(
    "gate",
    cls=StageCommand,
    config="turntree.experiments.config:GateExperimentConfig",
    stage="experiment gate",
    options=short(
        "seeds train.iterations train.groups environment.difficulty gate-turn=gate.turn gate-threshold=gate.threshold "
        "train.loss.constant"
    ),
    short_help="Compare the gate with no gate and with random cuts.",
)
@out_option("The experiment's folder.", folder=True)
def gate_experiment(config: Any, out: Path, json_path: str | None) -> None:
    """Matched seeds, three arms: no gate, the gate, and cutting as large a share at random.

    \b
    Example: turntree experiment gate --out runs/gate --seeds 0,1,2,3
    """
    from turntree.experiments.gate import run_gate_experiment

    summary = run_gate_experiment(config, out)
    finish(summary, json_path, list(_gate_lines(summary)))


def _gate_lines(summary: dict[str, Any]) -> Iterator[str]:
    for arm, totals in summary["arms"].items():
        yield (
            f"{arm:7s} held-out success {totals['held_out_success']:.1%}, {sum(totals['turns']):,} turns, "
            f"{totals['groups_cut']} of {totals['groups']} groups cut"
        )
    for arm, row in summary["differences"].items():
        saved, success = row["saved"]["turns"], row["held_out_difference"]
        yield (
            f"{arm} - none: precision {shown(row['precision']['precision'])}, "
            f"recall {shown(row['precision']['recall'])}, {edges(saved, '{:.1%}')} of the turns saved; "
            f"success {in_points(row['by_seed'])} for other seeds and tasks, {in_points(success)} for these policies "
            f"(p = {success['p_value']:.2f})"
        )


def shown(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"


def in_points(row: dict[str, Any]) -> str:
    scaled = {key: None if row[key] is None else 100 * row[key] for key in ("mean", "low", "high")}
    mean, _, interval = edges(scaled, "{:+.1f}").partition(" ")
    return f"{mean} points {interval}".rstrip()


def edges(row: dict[str, Any], form: str) -> str:
    """The mean and its interval, where there is one."""
    told = form.format(row["mean"])
    return told if row["low"] is None else f"{told} [{form.format(row['low'])}, {form.format(row['high'])}]"
