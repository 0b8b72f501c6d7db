"""`turntree audit`: how much of a training run's budget gave no gradient, from the logs of any framework."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from turntree.cli.common import LOG_OPTIONS, counted, finish
from turntree.cli.options import StageCommand

if TYPE_CHECKING:
    from turntree.logs.rows import ReadReport

PROGRESS_SECONDS = 5.0


@click.command(
    cls=StageCommand,
    config="turntree.audit.config:AuditConfig",
    options={"--epochs": "epochs", **LOG_OPTIONS},
    short_help="What your rollout logs bought.",
)
@click.argument("logs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", default="audit.html", show_default=True, type=click.Path(path_type=Path), help="The page.")
def audit(
    config: Any,
    logs: tuple[Path, ...],
    out: Path,
    json_path: str | None,
) -> None:
    """Audit rollout logs of turntree, verl, TRL, prime-rl and verifiers, SkyRL, slime and miles, rLLM, AReaL, Agent
    Lightning, NeMo Gym, JSONL lines with `group` and `reward`, or a format of your own (docs/audit.md).

    \b
    Example: turntree audit checkpoints/rollout_data --out audit.html
             turntree audit my_rollouts.jsonl --json -
    """
    from turntree.audit.audit import run_audit
    from turntree.report.audit import build_audit_page, sentences, suspicion

    result = run_audit(logs, config, _progress())
    build_audit_page(result, out)
    finish(
        result,
        json_path,
        [
            result["headline"],
            *sentences(result),
            *filter(None, [suspicion(result)]),
            *counted(result["log"]),
            f"-> {out}",
        ],
    )


def _progress() -> Callable[[ReadReport], None]:
    """A line on standard error every five seconds; a log that is read faster prints none."""
    last = time.monotonic()

    def show(report: ReadReport) -> None:
        nonlocal last
        if time.monotonic() - last >= PROGRESS_SECONDS:
            last = time.monotonic()
            print(f"{report.lines:,} lines read, {report.groups:,} groups taken in", file=sys.stderr, flush=True)

    return show
