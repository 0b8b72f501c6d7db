"""`turntree gate sweep | calibrate`: what a mid-rollout gate would have done to finished groups."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from turntree.cli.common import LOG_OPTIONS, counted, finish, out_option
from turntree.cli.options import StageCommand, short

REFUSED = 3  # exit code: the data were read, but support no operating point


@click.group(short_help="What a mid-rollout gate would have cut.")
def gate() -> None:
    """Gates stop a group mid-rollout once its rollouts have converged on the same actions (Selective Rollout).

    FILE is a rollout log of any framework that `turntree audit` reads, or a per-group feature table (CSV).
    """


_files = click.argument("paths", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))


@gate.command(
    cls=StageCommand,
    config="turntree.stages.gate:SweepConfig",
    stage="gate sweep",
    options={
        **short("turn thresholds signal rule termination max_turns"),
        **LOG_OPTIONS,
    },
    short_help="Table 1 of the paper, for thresholds of your choice.",
)
@_files
def sweep(config: Any, paths: tuple[Path, ...], json_path: str | None) -> None:
    """Groups cut, precision, recall and savings for every threshold, over all groups and over those still running.

    \b
    Example: turntree gate sweep rollouts.jsonl --turn 10 --thresholds .08,.12
    """
    from turntree.stages.gate import run_sweep

    result = run_sweep(paths, config)
    finish(result, json_path, [*_table(result), *counted(result["read"])])


@gate.command(
    cls=StageCommand,
    config="turntree.stages.gate:CalibrateConfig",
    stage="gate calibrate",
    options={
        **short(
            "calibration.floor calibration.confidence calibration.budget turns calibration.resamples calibration.seed "
            "max_turns"
        ),
        **LOG_OPTIONS,
    },
    short_help="The operating point that your rollouts support, if any.",
)
@out_option("Write a page with pictures here (HTML).", required=False)
@_files
def calibrate(
    config: Any,
    paths: tuple[Path, ...],
    out: Path | None,
    json_path: str | None,
) -> None:
    """Sweep (signal, turn, threshold) and choose by the lower bound of precision among groups still running.

    Ends with exit code 3 and the reason where the data support no operating point.

    \b
    Example: turntree gate calibrate rollouts.jsonl --floor 0.8 --out gate.html
    """
    from turntree.report.calibration import build_calibration_page
    from turntree.stages.gate import run_calibration

    result, table = run_calibration(paths, config)
    if out is not None:
        build_calibration_page(result, table, out)
    lines = [*_verdict(result), *counted(result["read"]), *([] if out is None else [str(out)])]
    finish(result, json_path, lines)
    if result["refused"] is not None:
        sys.exit(REFUSED)


def _table(result: dict[str, Any]) -> list[str]:
    lines = [
        f"{result['groups']} groups, {result['zero_variance']} without variance; turn {result['turn']} of "
        f"{result['max_turns']}; in brackets: of the groups still running then",
        f"{'threshold':>9} {'cut':>10} {'TP':>10} {'FP':>8} {'precision':>15} {'recall':>7} "
        f"{'safe':>15} {'raw':>15} L2",
    ]
    for row in result["rows"]:
        live = row["actionable"]
        lines.append(
            f"{row['threshold']:>9g} {_both(row, live, 'cut'):>10} {_both(row, live, 'tp'):>10} "
            f"{_both(row, live, 'fp'):>8} {_both(row, live, 'precision'):>15} {_percent(row['recall']):>7} "
            f"{_both(row, live, 'safe'):>15} {_both(row, live, 'raw'):>15} {_percent(row['l2_preserved'])}"
        )
    return lines


def _both(row: dict[str, Any], live: dict[str, Any], key: str) -> str:
    shown = (str(value) if isinstance(value, int) else _percent(value) for value in (row[key], live[key]))
    return "{} [{}]".format(*shown)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def _verdict(result: dict[str, Any]) -> list[str]:
    lines = [
        f"{result['groups']} groups of {result['tasks']} tasks, {result['zero_variance_rate']:.1%} without variance; "
        f"precision floor {result['floor']:g}, lower bounds at {result['confidence']:.0%} ({result['bound']})"
    ]
    for row in result["choices"]:
        if row["turn"] is not None and row["scope"] == "actionable":
            by = "by lower bound" if row["by"] == "lower_bound" else "by point precision"
            what = row["reason"] if row["choice"] is None else _chosen(row["choice"])
            lines.append(f"turn {row['turn']}, {row['signals']}, {by}: {what}")
    if result["recommended"] is not None:
        lines.append(f"recommended: {_chosen(result['recommended'])}")
    else:
        lines.append(f"refused: {result['refused']['reason']}")
    return lines


def _chosen(choice: dict[str, Any]) -> str:
    live = choice["actionable"]
    return (
        f"{choice['rule']}: cuts {live['cut']} running groups, {live['tp']} truly, precision "
        f"{_percent(live['precision'])} (lower bound {_percent(live['precision_low'])}), safe {_percent(live['safe'])}"
    )
