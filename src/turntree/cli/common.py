"""What every command shares: one clear line for bad input, dotted overrides, a machine-readable result."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from turntree.core.config import with_overrides
from turntree.core.errors import InputError
from turntree.observe.files import write_json
from turntree.observe.jsonl import parse_json

T = TypeVar("T")


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--json", "json_path", metavar="PATH", help="Write the result as JSON; '-' is standard output, and only it."
    )(command)


def set_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        help="Replace any key of the configuration, e.g. --set train.loss.kl_coefficient=0.1 (repeatable).",
    )(command)


def out_option(text: str, *, required: bool = True, default: Path | None = None) -> Callable[..., Any]:
    kind = click.Path(path_type=Path)
    return click.option(
        "--out", required=required, default=default, show_default=default is not None, type=kind, help=text
    )


def overwrite_option(text: str) -> Callable[..., Any]:
    return click.option("--overwrite", is_flag=True, help=text)


def refuse(environment: str, **options: tuple[Any, Any]) -> None:
    """Raise `InputError` where an option of the other environment was given: (value, default) by name."""
    for name, (value, default) in options.items():
        if value != default:
            option = "--" + name.replace("_", "-")
            raise InputError(f"{option} says nothing to the environment {environment!r}", hint="leave it out")


def instructions_for(model: str | None) -> str:
    """What opens an episode of questions: nothing for the embedded policy, which has learned the format."""
    from turntree.domains.qa.environment import INSTRUCTIONS

    return "" if model in (None, "qa") else INSTRUCTIONS


def dropped(reports: list[dict[str, Any]]) -> list[str]:
    """What reading question files left out, by reason, for a person."""
    return [
        f"questions: {report['questions']} of {report['rows']} rows used; dropped: "
        + ", ".join(f"{count} {reason} ({report['first'][reason]})" for reason, count in report["dropped"].items())
        for report in reports
        if report["dropped"]
    ]


def configured(config: T, overrides: tuple[str, ...]) -> T:
    """`config` with the `--set` values; a value is JSON where it parses as JSON, else text."""
    values: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise InputError(f"{override!r} has no '='", field="--set", hint="write --set KEY=VALUE")
        try:
            values[key] = parse_json(text)
        except InputError:
            values[key] = text
    return with_overrides(config, values)


def finish(result: dict[str, Any], json_path: str | None, lines: list[str]) -> None:
    """Print `lines` for a person (on standard error when JSON goes to standard output) and write the JSON."""
    for line in lines:
        print(line, file=sys.stderr if json_path == "-" else sys.stdout)
    if json_path == "-":
        print(json.dumps(result, indent=2))
    elif json_path is not None:
        write_json(Path(json_path), result)


def share(row: dict[str, Any]) -> str:
    """A success share with its Wilson interval, for a person."""
    if row["success"] is None:
        return "no scored episode"
    return f"{row['success']:.1%} [{row['low']:.1%}, {row['high']:.1%}] of {row['episodes']}"
