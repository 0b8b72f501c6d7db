"""`turntree traces`: make or import demonstrations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from turntree.cli.common import environment_for, finish, out_option, overwrite_option
from turntree.cli.options import StageCommand


@click.group(short_help="Make or import expert traces.")
def traces() -> None:
    """Expert traces in one documented schema (docs/traces.md)."""


@traces.command(
    cls=StageCommand,
    config="turntree.stages.household_traces:HouseholdTracesConfig",
    stage="traces household",
    options={
        "--games": "games.source",
        "--split": "games.split",
        "--count": "games.count",
        "--difficulty": "games.difficulty",
        "--expert": "expert",
        "--slips": "slips",
        "--seed": "seed",
    },
    short_help="Expert play on household games.",
)
@out_option("The traces file to write (JSONL).")
def household(config: Any, out: Path, json_path: str | None) -> None:
    """Expert play on household games (ALFWorld's games, or generated ones in their format).

    \b
    Example: turntree traces household --count 300 --out runs/traces.jsonl
             turntree traces household --games $ALFWORLD_DATA/json_2.1.1/train --count 500 --out runs/real.jsonl
    """
    from turntree.stages.household_traces import make_traces

    result = make_traces(config, out)
    dropped = {key: value for key, value in result.items() if key.startswith("dropped")}
    finish(result, json_path, [f"{result.get('traces', 0)} traces, {result.get('turns', 0)} turns -> {out}; {dropped}"])


@traces.command(
    cls=StageCommand,
    config="turntree.stages.qa_traces:QaTracesConfig",
    stage="traces qa",
    options={"--count": "count", "--slips": "slips", "--seed": "seed"},
    short_help="Expert answers to generated questions, with search and Python.",
)
@out_option("The traces file to write (JSONL).")
def qa(config: Any, out: Path, json_path: str | None) -> None:
    """An expert looks up, computes and answers: an SFT start for a policy of your own.

    \b
    Example: turntree traces qa --count 500 --slips 0.2 --out runs/qa.jsonl
    """
    from turntree.stages.qa_traces import make_traces

    result = make_traces(config, out)
    finish(result, json_path, [f"{result.get('traces', 0)} traces, {result.get('turns', 0)} turns -> {out}"])


@traces.command(
    "record",
    cls=StageCommand,
    config="turntree.stages.config:RecordConfig",
    stage="traces record",
    part="environment",
    named=environment_for,
    options={
        "--environment": "environment",
        "--model": "model",
        "--endpoint": "endpoint.url",
        "--tokenizer": "endpoint.tokenizer",
        "--engine": "device.engine",
        "--split": "split",
        "--count": "count",
        "--samples": "samples",
        "--only": "only",
        "--max-turns": "episodes.max_turns",
        "--max-tokens": "episodes.sampling.max_tokens",
        "--temperature": "episodes.sampling.temperature",
        "--task-seed": "task_seed",
        "--seed": "seed",
    },
    short_help="A policy's own episodes in an environment.",
)
@out_option("The traces file to write (JSONL).")
@overwrite_option("Start anew where another recording was interrupted.")
def record(config: Any, out: Path, overwrite: bool, json_path: str | None) -> None:
    """Play tasks of an environment and keep the episodes as traces, with rewards, success and tool errors.

    A recording that was interrupted goes on when the same command is run again.

    \b
    Example: turntree traces record --environment my_game:tasks --count 200 --out runs/traces.jsonl
             turntree traces record --environment my_game:tasks --endpoint http://localhost:8000/v1
             --model my-model --tokenizer models/my-model --only successes --out runs/traces.jsonl
    """
    from turntree.stages.record import record_traces

    result = record_traces(config, out, overwrite=overwrite)
    dropped = {key: value for key, value in result.items() if key.startswith("dropped")}
    line = (
        f"{result['traces']} traces of {result['tasks']} tasks, {result['successes']} successes, "
        f"{result['tool_errors']} tool errors -> {out}"
    )
    finish(result, json_path, [line, *([f"left out: {dropped}"] if dropped else [])])


@traces.command(
    "import",
    cls=StageCommand,
    config="turntree.stages.import_traces:ImportConfig",
    stage="traces import",
    options={
        "--format": "format",
        "--on-error": "on_error",
        "--unknown-keys": "unknown_keys",
        "--success-only": "success_only",
        "--candidates": "candidates",
        "--dev": "dev",
        "--seed": "seed",
    },
    short_help="Logs of agents, in any of the known formats.",
)
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@out_option("The traces file to write (JSONL).")
def import_(config: Any, files: tuple[Path, ...], out: Path, json_path: str | None) -> None:
    """Import logs of agents: files, folders or archives, in any known format; what is dropped is counted by reason.

    \b
    Example: turntree traces import my_agent.jsonl --out runs/traces.jsonl
             turntree traces import my_agent.jsonl --format my_logs:read --out runs/traces.jsonl
    """
    from turntree.stages.import_traces import import_traces

    result = import_traces(list(files), out, config)
    finish(result, json_path, [f"{key}: {value}" for key, value in result.items()])
