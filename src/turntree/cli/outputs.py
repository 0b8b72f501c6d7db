"""Where a command is to write, checked before it begins: a result that cannot be written would be lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from turntree.core.config import to_mapping
from turntree.core.errors import InputError
from turntree.observe.files import require_writable

_OUTPUTS = ("out", "merge", "json_path")
_INPUTS = ("traces", "profile", "pivots", "reuse", "gold", "candidate", "labels", "tools")  # keys that name files


class OutputCommand(click.Command):
    """A command that calls `check_outputs` before it begins."""

    def invoke(self, ctx: click.Context) -> Any:
        check_outputs(ctx)
        return super().invoke(ctx)


def check_outputs(ctx: click.Context, config: Any = None, config_path: Path | None = None) -> None:
    """Raise `InputError` where a file or folder that the command is to write cannot be written, or would replace what
    the command reads: its arguments, and what texts of `config` name."""
    written = {name: Path(ctx.params[name]) for name in _OUTPUTS if ctx.params.get(name) not in (None, "-")}
    folders = [one.name for one in ctx.command.params if isinstance(one.type, click.Path) and not one.type.file_okay]
    values = [value for name, value in ctx.params.items() if name not in _OUTPUTS]
    given = [one for value in values for one in (value if isinstance(value, tuple) else (value,))]
    used = {os.path.realpath(path) for path in (*given, config_path) if isinstance(path, Path)}
    named = set() if config is None else {os.path.realpath(text) for text in _texts(to_mapping(config))}
    for name, path in written.items():
        require_writable(path, folder=name in folders)
        place = os.path.realpath(path)
        if name in folders:  # --overwrite deletes these
            inside = [Path(place, part) for part in ("model", "checkpoints")]
            found = any(Path(one).is_relative_to(part) for one in named for part in inside)
        else:
            found = path.exists() and place in named
        if found or place in used:
            problem = "would replace what this command reads or writes under the same name"
            raise InputError(problem, path=path, hint="choose another")
        used.add(place)


def _texts(value: Any, key: str = "") -> Iterator[str]:
    """The texts of a configuration that may name a file: `split=dev` does not, although a file `dev` may lie here."""
    if isinstance(value, str):
        if (key in _INPUTS and value) or any(mark in value for mark in "/."):
            yield value.replace("\0", "")
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _texts(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, key)
