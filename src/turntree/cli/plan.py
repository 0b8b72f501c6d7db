"""`turntree plan`: what a training run needs on every GPU."""

from __future__ import annotations

from typing import Any

import click

from turntree.cli.common import finish
from turntree.cli.options import StageCommand, short
from turntree.core.errors import InputError


@click.command(
    cls=StageCommand,
    config="turntree.stages.config:TrainOnlineConfig",
    stage="train online",  # whose files it reads
    options=short("MODEL=model groups=train.groups max-context=train.rollouts.episodes.max_context"),
    short_help="The memory that a run needs on every GPU.",
)
@click.option("--gpus", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks that train, a GPU each.")
@click.option(
    "--memory",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GB",
    help="Of one GPU: does it fit, and what would?",
)
def plan(config: Any, gpus: int, memory: float | None, json_path: str | None) -> None:
    """Say what `train online` would need on every GPU, from the model's config.json alone: no weights are read.

    The keys are those of `train online`; `--dry-run` of the commands that train says the same of theirs.

    Example: turntree plan models/my-model --gpus 8 --memory 80 --set device.dtype=bfloat16
    """
    from turntree.stages.plan import plan_lines

    lines = plan_lines(config, gpus, memory)
    if not lines:
        raise InputError("names no model whose config.json can be read", field="MODEL", hint="give a folder")
    finish({"model": config.model, "gpus": gpus, "lines": lines}, json_path, lines)
