"""`turntree verifier`: judge pairs of actions from files, and audit a verifier on traces."""

from __future__ import annotations

import sys
from pathlib import Path
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
    options=short("TRACES=traces verifier split limit worst environment"),
    short_help="Check that gold is rewarded and broken copies are not.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Also write a page with the worst verdicts (HTML).")
def audit(config: Any, out: Path | None, json_path: str | None) -> None:
    """Judge every demonstration of TRACES against itself, copies that break it, and copies that do the same.

    The exit code is 1 where gold is refused or a broken copy is rewarded.

    \b
    Example: turntree verifier audit runs/traces.jsonl --verifier recommended --out audit.html
    """
    from turntree.report.audit import build_verifier_page
    from turntree.stages.score import run_audit

    result = run_audit(config)
    if out is not None:
        build_verifier_page(result, out)
    gold = result["gold"]
    lines = [f"{result['verifier']}: {gold['accepted']} of {gold['judged']} demonstrations accept themselves"]
    lines += [f"{count} not judged: {reason}" for reason, count in gold["reasons"].items()]
    paid = 0
    for name, tally in result["mutations"].items():
        if tally["judged"]:
            wrong = tally["accepted"] + tally["partial"]
            paid += wrong
            lines.append(f"{'PAID ' if wrong else ''}{name}: {wrong} of {tally['judged']} broken copies paid")
    for name, tally in result["rewrites"].items():
        if tally["judged"]:
            lines.append(f"{name}: {tally['accepted']} of {tally['judged']} equivalent copies accepted")
    if result["strict_miss_rate"] is not None:
        lines.append(f"exact matching refuses {result['strict_miss_rate']:.1%} of the equivalent copies accepted here")
    finish(result, json_path, lines)
    if gold["accepted"] < gold["judged"] or not gold["judged"] or paid:
        sys.exit(1)
