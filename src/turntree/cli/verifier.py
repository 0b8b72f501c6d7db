"""`turntree verifier`: judge pairs of actions from files, and audit a verifier on traces."""

from __future__ import annotations

import sys
from typing import Any

import click

from turntree.cli.common import finish
from turntree.cli.options import StageCommand, short


@click.group(short_help="Judge pairs of actions; audit a verifier on traces.")
def verifier() -> None:
    """Does a verifier reward what it should, and nothing else (docs/design/reward.md)?"""


@verifier.command(
    "score",
    cls=StageCommand,
    config="turntree.stages.score:ScoreConfig",
    stage="verifier score",
    options=short("verifier gold candidate tools labels environment"),
    short_help="The verdict on every pair of two files.",
)
def score_(config: Any, json_path: str | None) -> None:
    """Judge the actions of one file against the demonstrated ones of another, line by line.

    Actions are assistant messages in chat form or Responses items. A reward of null was not judged. A verifier of whole
    episodes (rubric) needs no --gold and judges traces.

    \b
    Example: turntree verifier score --verifier recommended --gold gold.jsonl
             --candidate sampled.jsonl --json verdicts.json
    """
    from turntree.stages.score import score

    result = score(config)
    lines = [f"{one['reward']}  {one['reason']}" for one in result["verdicts"]]
    lines.append(f"{result['accepted']} accepted, {len(lines) - result['judged']} not judged, of {len(lines)}")
    if "agreement" in result:
        lines.append(f"agreement with the labels: {result['agreement']}")
    finish(result, json_path, lines)


@verifier.command(
    "audit",
    cls=StageCommand,
    config="turntree.stages.score:AuditConfig",
    stage="verifier audit",
    options=short("TRACES=traces verifier split limit environment"),
    short_help="Check that gold is rewarded and broken copies are not.",
)
def audit(config: Any, json_path: str | None) -> None:
    """Judge every demonstration of TRACES against itself and against copies that break it.

    The exit code is 1 where gold is refused or a broken copy is rewarded.

    \b
    Example: turntree verifier audit runs/traces.jsonl --verifier recommended --json audit.json
    """
    from turntree.stages.score import run_audit

    result = run_audit(config)
    gold = result["gold"]
    lines = [f"{result['verifier']}: {gold['accepted']} of {gold['judged']} demonstrations accept themselves"]
    lines += [f"{count} not judged: {reason}" for reason, count in gold["reasons"].items()]
    for name, tally in result["mutations"].items():
        if tally["judged"]:
            wrong = tally["accepted"] + tally["partial"]
            lines.append(f"{'PAID ' if wrong else ''}{name}: {wrong} of {tally['judged']} broken copies paid")
    finish(result, json_path, lines)
    if not result["holds"]:
        sys.exit(1)
