"""`turntree traces`: make or import demonstrations."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import click

from turntree.cli.common import environment_for, finish, out_option, overwrite_option
from turntree.cli.options import StageCommand, short
from turntree.core import parts
from turntree.core.config import Part, to_mapping
from turntree.core.errors import InputError

DEMONSTRATORS = "demonstrators"


class Traces(click.Group):
    """Has one command per demonstrator (a registered name, or the user's module:object) beside its own commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *parts.names(DEMONSTRATORS)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = super().get_command(ctx, cmd_name)
        if found is None and (":" in cmd_name or cmd_name in parts.names(DEMONSTRATORS)):
            return _demonstrations(cmd_name)
        return found


@click.group(cls=Traces, short_help="Make or import expert traces.")
def traces() -> None:
    """Expert traces in one documented schema (docs/traces.md). Run your own demonstrator with `turntree traces
    MODULE:OBJECT`."""


def _demonstrations(name: str) -> click.Command:
    """The command of a demonstrator: its options are the fields of the dataclass, its help is the dataclass's
    docstring, and `short` gives the short options."""
    target: Any = parts.load(DEMONSTRATORS, name).target
    if not (inspect.isclass(target) and dataclasses.is_dataclass(target)):
        problem, hint = f"{name!r} is not a dataclass", "write its options as the fields of one (docs/traces.md)"
        raise InputError(problem, field="demonstrator", hint=hint)
    told = inspect.getdoc(target) or ""

    @click.command(
        name,
        cls=StageCommand,
        config=f"{target.__module__}:{target.__qualname__}",
        stage=f"traces {name}",
        options=getattr(target, "short", {}),
        short_help=told.partition("\n")[0],
        help=told,
    )
    @out_option("The traces file to write (JSONL).")
    def make(config: Any, out: Path, json_path: str | None) -> None:
        from turntree.report.wording import plural
        from turntree.stages.demonstrate import demonstrate

        result = demonstrate(Part(name, to_mapping(config)), out)
        line = f"{plural(result['traces'], 'trace')}, {plural(result['turns'], 'turn')} -> {out}"
        finish(result, json_path, [line, *_left_out(result)])

    return make


@traces.command(
    "record",
    cls=StageCommand,
    config="turntree.stages.config:RecordConfig",
    stage="traces record",
    part="environment",
    named=environment_for,
    options=short(
        "environment model endpoint=endpoint.url endpoint.tokenizer device.engine device.renderer split count samples "
        "only teacher episodes.max_turns episodes.sampling.max_tokens episodes.sampling.temperature task_seed seed"
    ),
    short_help="A policy's own episodes in an environment.",
)
@out_option("The traces file to write (JSONL).")
@overwrite_option("Start over where another recording was interrupted.")
def record(config: Any, out: Path, overwrite: bool, json_path: str | None) -> None:
    """Play tasks of an environment and keep the episodes as traces, with rewards, success and tool errors.

    Run the same command again to continue an interrupted recording.

    \b
    Example: turntree traces record --environment my_game:tasks --out traces.jsonl
             turntree traces record --environment my_game:tasks \\
                 --endpoint http://localhost:8000/v1 --model my-model \\
                 --tokenizer models/my-model --only successes --out traces.jsonl
    """
    from turntree.stages.record import record_traces

    result = record_traces(config, out, overwrite=overwrite)
    line = (
        f"{result['traces']} traces of {result['tasks']} tasks, {result['successes']} successes, "
        f"{result['tool_errors']} tool errors -> {out}"
    )
    finish(result, json_path, [line, *_left_out(result)])


@traces.command(
    "import",
    cls=StageCommand,
    config="turntree.traces.chat:ImportConfig",
    stage="traces import",
    options=short("format on_error unknown_keys success_only candidates dev seed"),
    short_help="Logs of agents, in any of the known formats.",
)
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@out_option("The traces file to write (JSONL).")
def import_(config: Any, files: tuple[Path, ...], out: Path, json_path: str | None) -> None:
    """Import logs of agents: files, folders or archives, in any known format; what is dropped is counted by reason.

    \b
    Example: turntree traces import my_agent.jsonl --out runs/traces.jsonl
             turntree traces import logs/ --format my_logs:read --out traces.jsonl
    """
    from turntree.report.wording import plural
    from turntree.stages.import_traces import import_traces

    result = import_traces(list(files), out, config)
    shares = ", ".join(f"{count} {name}" for name, count in result["splits"].items())
    kept, turns = plural(result["traces_kept"], "trace"), plural(result["turns_kept"], "candidate turn")
    finish(result, json_path, [f"{kept} ({shares}), {turns} -> {out}", *_told(result)])


def _left_out(result: dict[str, Any]) -> list[str]:
    """One line of the reasons why tasks gave no trace; none where all did."""
    counts = {key: value for key, value in result.items() if key.startswith("dropped")}
    told = ", ".join(f"{count} {key.removeprefix('dropped').lstrip(': ')}" for key, count in counts.items())
    return [f"left out: {told}"] if told else []


def _told(result: dict[str, Any]) -> list[str]:
    """One line for every non-empty count by reason of an import."""
    named = {
        "formats": "rows by format",
        "dropped_traces": f"dropped of {result['traces_read']} traces",
        "dropped_turns": f"not candidates of {result['turns_read']} turns",
        "cut_traces": "traces that end before a malformed message",
        "merged_messages": "assistant messages joined to the one before",
        "ignored": "fields that a trace has no place for",
    }
    counts = {key: result[key] for key in named if result[key]}
    return [
        f"{named[key]}: "
        + (", ".join(f"{n} {reason}" for reason, n in found.items()) if isinstance(found, dict) else str(found))
        for key, found in counts.items()
    ]
