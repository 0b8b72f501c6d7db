"""`turntree check`: whether a part of your own keeps the laws that training relies on."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from turntree.cli.common import finish
from turntree.cli.options import StageCommand

if TYPE_CHECKING:
    from turntree.environments.check import CheckConfig


@click.group()
def check() -> None:
    """Check a part of your own against the laws that training relies on."""


@check.command(
    "environment",
    cls=StageCommand,
    config="turntree.environments.check:CheckConfig",
    stage="check environment",
    part="environment",
    options={"SPEC": "environment", "--split": "split", "--count": "count", "--turns": "turns", "--seed": "seed"},
    short_help="Play random actions in an environment; which laws does it break?",
)
def environment(config: CheckConfig, json_path: str | None) -> None:
    """Play the first tasks of an environment with random actions and say which law it breaks, and where.

    SPEC is a registered name (gymnasium:FrozenLake-v1) or module:object. Its options are given like those of the
    command, or as --set environment.KEY=VALUE. Notes name what costs something (no branching, no worker processes).
    The exit code is 1 where a law is broken.

    Example: turntree check environment examples.hide_and_seek:tasks --tries 2
    """
    from turntree.environments.check import Finding, check_environment
    from turntree.environments.tasks import open_tasks

    split, count, turns, seed = config.split, config.count, config.turns, config.seed
    with open_tasks(config.environment, {split: count}, seed=seed) as opened:
        tasks = list(opened.of(split))[:count]
        found = [finding for task in tasks for finding in check_environment(task, seed=seed, turns=turns)]
    grave = [finding for finding in found if finding.grave]
    notes: dict[tuple[str, str], list[Finding]] = {}
    for finding in found:
        if not finding.grave:
            notes.setdefault((finding.law, finding.said), []).append(finding)
    lines = [str(finding) for finding in grave]
    lines += [f"{same[0]}{f' ({len(same)} times)' if len(same) > 1 else ''}" for same in notes.values()]
    played = f"{len(tasks)} tasks of split {split!r}, up to {turns} turns each"
    lines.append(f"{len(grave)} laws broken in {played}" if grave else f"every law holds in {played}")
    result: dict[str, Any] = {
        "environment": config.environment.name,
        "split": split,
        "tasks": [task.task_id for task in tasks],
        "violations": [asdict(finding) for finding in grave],
        "notes": [{**asdict(same[0]), "times": len(same)} for same in notes.values()],
    }
    finish(result, json_path, lines)
    if grave:
        sys.exit(1)
