"""`turntree export`: what other trainers read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from turntree.cli.common import finish, out_option
from turntree.cli.options import StageCommand, short


@click.group(short_help="Pivots in the formats of other trainers.")
def export() -> None:
    """Use what turntree found with another trainer (docs/pivots.md)."""


@export.command(
    "pivots",
    cls=StageCommand,
    config="turntree.stages.export:ExportConfig",
    stage="export pivots",
    options=short("PIVOTS=pivots to=pivot_format traces verifier model"),
    short_help="Pivots and their verifier for nemo-gym, trl, verl, skyrl.",
)
@out_option("The folder to write.", folder=True)
def pivots(config: Any, out: Path, json_path: str | None) -> None:
    """Write PIVOTS as a data set of another trainer, with their pass rates and, where it takes one, a reward function
    that is our verifier.

    \b
    Example: turntree export pivots runs/pivots.jsonl --to trl --model ./my-model --out runs/for-trl
    """
    from turntree.report.wording import plural
    from turntree.stages.export import run_export

    result = run_export(config, out)
    left_out = ", ".join(f"{count} {reason}" for reason, count in result["dropped"].items())
    lines = [f"{plural(result['pivots'], 'pivot')} -> {out} ({', '.join(result['files'])})"]
    lines += [f"left out: {left_out}"] if left_out else []
    finish(result, json_path, [*lines, *(f"note: {note}" for note in result["notes"])])
