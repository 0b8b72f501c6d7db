"""`turntree gate calibrate | audit`: what rollout logs of any framework tell of a gate, and where the budget went."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from turntree.cli.common import LOG_OPTIONS, counted, finish
from turntree.cli.options import StageCommand, short
from turntree.run.files import require_replaceable

REFUSED = 3  # exit code: the data were read, but support no operating point
HEAD = ("threshold", "groups", "cut", "TP", "FP", "precision", "recall", "safe", "raw", "L2")
WIDTHS = (9, 7, 6, 6, 6, 9, 6, 6, 6, 6)


@click.group(short_help="What a mid-rollout gate would have cut.")
def gate() -> None:
    """Gates stop a group mid-rollout once its rollouts have converged on the same actions (Selective Rollout)."""


@gate.command(
    cls=StageCommand,
    config="turntree.decide.gates.calibrate:CalibrateConfig",
    stage="gate calibrate",
    options={**short("floor confidence turns thresholds signal termination unended max_turns"), **LOG_OPTIONS},
    short_help="The operating point that your rollouts support, if any.",
)
@click.argument("paths", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
def calibrate(config: Any, paths: tuple[Path, ...], json_path: str | None) -> None:
    """Print Table 1 of the paper at every turn, and choose a (signal, turn, threshold) by the lower bound of precision
    among groups still running.

    FILE is a rollout log of any framework that `turntree audit` reads. Ends with exit code 3 and the reason where the
    data support no operating point.

    \b
    Example: turntree gate calibrate rollouts.jsonl --thresholds .08,.12
    """
    from turntree.decide.gates.calibrate import run_calibration

    result = run_calibration(paths, config)
    finish(result, json_path, [*_table(result), *_verdict(result), *counted(result["read"])])
    if result["refused"] is not None:
        sys.exit(REFUSED)


def _table(result: dict[str, Any]) -> list[str]:
    rule = result["signal"]
    if result["termination"] is not None:
        rule += f" or termination_fraction >= {result['termination']:g}"
    if result["unended"] is not None:
        rule += f" or termination_fraction <= {result['unended']:g}"
    lines = [
        f"{result['groups']} groups of {result['tasks']} tasks, {result['zero_variance']} without variance; cuts by "
        f"{rule}; running: of the groups still running then"
    ]
    for turn in result["turns"]:
        lines += [f"turn {turn} of {result['max_turns']}", _line(HEAD)]
        for row in (row for row in result["rows"] if row["turn"] == turn):
            lines.append(_line([f"{row['threshold']:g}", "all", *_cells(row)]))
            lines.append(_line(["", "running", *_cells(row["actionable"])]))
    return lines


def _line(cells: Any) -> str:
    return " ".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True))


def _cells(row: dict[str, Any]) -> list[str]:
    return [_shown(row[key]) for key in ("cut", "tp", "fp", "precision", "recall", "safe", "raw", "l2_preserved")]


def _shown(value: float | None) -> str:
    return str(value) if isinstance(value, int) else "-" if value is None else f"{100 * value:.1f}%"


def _verdict(result: dict[str, Any]) -> list[str]:
    bound = f"precision floor {result['floor']:g}, lower bound at {result['confidence']:.0%} ({result['bound']})"
    point = result["recommended"]
    if point is None:
        return [bound, f"refused: {result['refused']['reason']}"]
    live = point["actionable"]
    return [
        bound,
        f"recommended: {point['rule']}: cuts {live['cut']} running groups, {live['tp']} truly, precision "
        f"{_shown(live['precision'])} (lower bound {_shown(live['precision_low'])}), safe {_shown(live['safe'])}",
    ]


@click.command(
    cls=StageCommand,
    config="turntree.audit.config:AuditConfig",
    options={"--epochs": "epochs", **LOG_OPTIONS},
    short_help="What your rollout logs bought.",
)
@click.argument("logs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="The page (audit.html; none with `--json -`).")
def audit(config: Any, logs: tuple[Path, ...], out: Path | None, json_path: str | None) -> None:
    """Audit rollout logs of turntree, verl, TRL, prime-rl and verifiers, SkyRL, slime and miles, rLLM, AReaL, Agent
    Lightning, NeMo Gym, JSONL lines with `group` and `reward`, or a format of your own (docs/audit.md).

    \b
    Example: turntree audit checkpoints/rollout_data --out audit.html
             turntree audit my_rollouts.jsonl --json -
    """
    from turntree.audit.audit import run_audit
    from turntree.report.audit import build_audit_page, sentences, suspicion

    out = out or (None if json_path == "-" else Path("audit.html"))
    if out is not None:
        require_replaceable(out, "<!doctype html>")
    result = run_audit(logs, config)
    page = [] if out is None else [f"-> {build_audit_page(result, out)}"]
    lines = [result["headline"], *sentences(result), *filter(None, [suspicion(result)]), *counted(result["log"]), *page]
    finish(result, json_path, lines)
