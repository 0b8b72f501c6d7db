"""`turntree audit`: how much of a training run's budget bought no gradient, from the logs of any framework."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from turntree.cli.common import configured, finish, json_option, set_option

FORMATS = ("auto", "turntree", "verl", "trl", "nemo-gym", "generic")


@click.command(short_help="What your rollout logs bought.")
@click.argument("logs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", default="audit.html", show_default=True, type=click.Path(path_type=Path), help="The page.")
@click.option("--format", "form", type=click.Choice(FORMATS), default="auto", show_default=True)
@click.option("--reward", "rewards", multiple=True, help="Column whose value is the reward; several are summed.")
@click.option("--turn-separator", default=None, metavar="REGEX", help="What stands between two turns of a text log.")
@click.option("--epochs", default=3, show_default=True, help="Groups of a task before it may be said never to teach.")
@set_option
@json_option
def audit(
    logs: tuple[Path, ...],
    out: Path,
    form: str,
    rewards: tuple[str, ...],
    turn_separator: str | None,
    epochs: int,
    overrides: tuple[str, ...],
    json_path: str | None,
) -> None:
    """Audit rollout logs of turntree, verl, TRL, NeMo Gym, or JSONL lines with `group` and `reward` (docs/audit.md).

    \b
    Example: turntree audit checkpoints/rollout_data --out audit.html
             turntree audit my_rollouts.jsonl --json -
    """
    from turntree.auditing.comparison import AuditConfig
    from turntree.logs.read import LogFormat
    from turntree.logs.rows import ReadConfig
    from turntree.report.audit import build_audit_page, sentences
    from turntree.stages.audit import run_audit

    reading = ReadConfig(rewards=rewards, turn_separator=turn_separator)
    config: Any = configured(AuditConfig(epochs=epochs), overrides)
    result = run_audit(logs, None if form == "auto" else LogFormat(form), reading, config)
    build_audit_page(result, out)
    dropped = [f"dropped {count}: {reason}" for reason, count in result["log"]["dropped"].items()]
    finish(result, json_path, [result["headline"], *sentences(result), *dropped, f"-> {out}"])
