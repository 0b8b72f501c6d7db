"""`turntree check | verifier`: whether a part keeps the laws of training; what a verifier says of pairs and traces."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from turntree.cli.common import finish, json_option
from turntree.cli.options import StageCommand, short
from turntree.core import parts
from turntree.core.config import Part
from turntree.core.errors import InputError

if TYPE_CHECKING:
    from turntree.env.check import CheckConfig


@click.group()
def check() -> None:
    """Check your own part against the laws that training relies on."""


@check.command(
    "environment",
    cls=StageCommand,
    config="turntree.env.check:CheckConfig",
    stage="check environment",
    part="environment",
    options=short("SPEC=environment split count turns seed"),
    short_help="Play random actions in an environment; which laws does it break?",
)
def environment(config: CheckConfig, json_path: str | None) -> None:
    """Play the first tasks of an environment with random actions and say which law it breaks, and where.

    SPEC is a registered name (gymnasium:FrozenLake-v1) or module:object. Its options are given like those of the
    command, or as --set environment.KEY=VALUE. Notes name limits (no branching, no worker processes).
    The exit code is 1 where a law is broken.

    Example: turntree check environment examples.hide_and_seek:tasks --tries 2
    """
    from turntree.env.check import Finding, check_environment, check_splits
    from turntree.env.tasks import open_tasks
    from turntree.rollout.players import PlayedTask

    split, count, turns, seed = config.split, config.count, config.turns, config.seed
    with contextlib.ExitStack() as stack:
        opened, others = stack.enter_context(open_tasks(config.environment, {split: count}, seed=seed)), {}
        for other in ("train", "dev", "test"):
            with contextlib.suppress(InputError):  # not every environment has every split
                if other != split:
                    more = stack.enter_context(open_tasks(config.environment, {other: count}, seed=seed))
                    others[other] = list(more.of(other))[:count]
        tasks = list(opened.of(split))[:count]
        if isinstance(tasks[0], PlayedTask):
            raise tasks[0].refusal()
        found = [finding for task in tasks for finding in check_environment(task, seed=seed, turns=turns)]
        found += check_splits({split: tasks, **others})
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


@check.command("model", short_help="Which renderer serves a model; what would be refused?")
@click.argument("model", metavar="FOLDER")
@click.option("--renderer", "named", metavar="NAME", help="template or family:NAME, in place of the automatic choice.")
@json_option
def check_model(model: str, named: str | None, json_path: str | None) -> None:
    """Say which renderer serves the model in FOLDER (or an embedded one, by name) and why.

    Shows a tool loop of three turns, and tries every law on turns and loops that agents write.

    Only the tokenizer, the chat template and config.json are read, no weights. The exit code is 1 where not even a
    conversation without tools works.

    Example: turntree check model models/my-model
    """
    from turntree.engine.tokenizer import load_tokenizer
    from turntree.render.choice import TEMPLATE, Choice, choose
    from turntree.render.examine import LOOP, LOOPS, TALK, examine, shown
    from turntree.stages.policy import resolve

    folder = resolve(model, weights=False)
    tokenizer = load_tokenizer(folder)
    if named is None:
        choice = choose(tokenizer, folder)
        renderer = choice.build(tokenizer)
    else:
        choice = Choice(named, "named by --renderer")
        renderer = parts.build("renderers", Part(named), tokenizer=tokenizer, folder=folder)
    findings = examine(renderer, tokenizer)
    loop = LOOP if any(found.case == LOOP and found.works for found in findings) else TALK
    options = "".join(f" {key}={value}" for key, value in choice.options.items())
    lines = [f"{choice.name}{options}: {choice.why}", "", shown(renderer, tokenizer, LOOPS[loop]), ""]
    for found in findings:
        reason = f": {found.said}" if found.said else ""
        lines.append(f"{'works  ' if found.works else 'refused'}  {found.case}{reason}")
    refused = [found for found in findings if not found.works]
    if refused:
        lines.append("A rollout that would need one of these is censored with this reason; the run goes on.")
        if choice.name == TEMPLATE:
            lines.append(_ADVICE)
    result: dict[str, Any] = {
        "renderer": choice.name,
        "options": choice.options,
        "why": choice.why,
        "findings": [asdict(found) for found in findings],
    }
    finish(result, json_path, lines)
    if any(found.case == TALK for found in refused):
        sys.exit(1)


_ADVICE = (
    "What to do: let chat_template.jinja write calls as hermes, json or pythonic do, name the form that it writes "
    "(--set device.renderer.tool_format=NAME in the commands that sample), or try a model family (extra `renderers`, "
    "--renderer family:NAME)."
)


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
    Example: turntree verifier score --verifier recommended --gold gold.jsonl \\
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
    Example: turntree verifier audit runs/traces.jsonl --verifier recommended
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
