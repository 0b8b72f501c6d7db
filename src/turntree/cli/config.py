"""`turntree config`: every key of a stage, from the dataclasses that the stage is configured with."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

import click
from click.core import ParameterSource

from turntree.cli.common import finish, json_option
from turntree.cli.options import StageCommand, default_text, key_of
from turntree.core.errors import InputError
from turntree.core.keys import keys


@click.command(
    short_help="Every key of a stage: type, default, meaning.", context_settings={"ignore_unknown_options": True}
)
@click.argument("stage", nargs=-1, type=click.UNPROCESSED)
@json_option
@click.pass_context
def config(ctx: click.Context, stage: tuple[str, ...], json_path: str | None) -> None:
    """List every key of STAGE, with the short option that stands for it; without STAGE, the stages. Options of the
    stage may follow: with `--environment NAME`, for example, the keys of that environment are listed too, and values
    given are the defaults.

    \b
    Example: turntree config
             turntree config train pivot
             turntree config profile --json -
    """
    command, words = ctx.find_root().command, list(stage)
    while words and isinstance(command, click.Group) and (found := command.get_command(ctx, words[0])):
        command = found
        words.pop(0)
    if not isinstance(command, StageCommand):
        stages = sorted(name for name, _ in stage_commands(ctx.find_root().command))
        if not stage:
            finish({"stages": stages}, json_path, stages)
            return
        wanted = " ".join(stage)
        near = [name for name in stages if wanted in (name.split()[0], name.split()[-1])]
        near = near or difflib.get_close_matches(wanted, stages, n=1)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "`turntree config` lists the stages"
        raise InputError(f"{wanted!r} is not a stage", field="STAGE", hint=hint)
    rows = _rows(command, words, ctx)
    finish({"stage": command.stage, "keys": rows}, json_path, [] if json_path == "-" else list(_table(rows)))


def stage_commands(group: click.Command, above: str = "") -> Iterator[tuple[str, StageCommand]]:
    """Every command that runs with a configuration, by its words."""
    if isinstance(group, StageCommand):
        yield above.strip(), group
    elif isinstance(group, click.Group):
        ctx = click.Context(group)
        for name in group.list_commands(ctx):
            command = group.get_command(ctx, name)
            if command is not None:
                yield from stage_commands(command, f"{above} {name}")


def _rows(command: StageCommand, arguments: list[str], above: click.Context) -> list[dict[str, Any]]:
    # resilient: what the command itself requires (where to write) is not needed to list its keys
    with command.make_context(command.name, list(arguments), parent=above, resilient_parsing=True) as ctx:
        known = {option for parameter in command.params for option in parameter.opts}
        refused = [word for word in arguments if word.startswith("--") and word.partition("=")[0] not in known]
        refused += [
            name
            for name, value in ctx.params.items()
            if value is None and (ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE)
        ]
        if refused:
            raise InputError(f"does not take {' '.join(refused)!r}", field=command.stage, hint="see its --help")
        values = command.values(ctx)
    short: dict[str, list[str]] = {}
    for option, target in command.options.items():
        short.setdefault(key_of(target), []).append(option)
    return [
        {**key.to_json(), "option": ", ".join(short.get(key.name, [])), "shown": default_text(key)}
        for key in keys(command.config_class, values)
    ]


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Two columns, wrapped to the terminal."""
    formatter = click.HelpFormatter(max_width=110)
    about = [
        " ".join(filter(None, (row["meaning"], row["shown"], row["option"] and f"({row['option']})"))) for row in rows
    ]
    formatter.write_dl([(f"{row['key']}  {row['type']}", text or "-") for row, text in zip(rows, about, strict=True)])
    yield formatter.getvalue().rstrip()
