"""What commands share: where to write, what to overwrite, a machine-readable result."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from turntree.cli.options import JSON, Read, results
from turntree.core import parts
from turntree.core.errors import InputError, printable
from turntree.core.verdict import most_frequent
from turntree.run.files import write_json


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--json", "json_path", **JSON)(command)


def out_option(
    text: str, *, folder: bool = False, required: bool = True, default: Path | None = None
) -> Callable[..., Any]:
    # an explicit default of None would count as given, and --out would never be missed (click 8.3 and later)
    given: dict[str, Any] = {} if default is None else {"default": default, "show_default": True}
    return click.option(
        "--out", required=required, type=click.Path(path_type=Path, file_okay=not folder), help=text, **given
    )


def overwrite_option(text: str) -> Callable[..., Any]:
    return click.option("--overwrite", is_flag=True, help=text)


def keep_trees(text: str) -> int | None:
    """`TrainOnlineConfig.keep_trees`: None is all."""
    if text in ("all", "none"):
        return None if text == "all" else 0
    if not text.isdecimal():
        raise InputError(f"{text!r} is neither 'all', 'none' nor a number", field="--keep-trees")
    return int(text)


LOG_OPTIONS = {  # of every command that reads rollout logs
    "--format": "log_format",
    "--reward": Read("log_format.rewards", str, "COLUMN", repeated=True),
    "--turn-separator": Read("log_format.turn_separator", str, "REGEX"),
}
KEEP_TREES = Read("keep_trees", keep_trees, "all|N|none")


def environment_for(model: str) -> str:
    """The environment that a registered policy was made for. Raises `InputError` for any other model."""
    if model in parts.names("environments"):
        return model
    hint = "give --environment SPEC"
    raise InputError(f"{model!r} does not name the environment that it was made for", field="--environment", hint=hint)


def dropped(reports: list[dict[str, Any]]) -> list[str]:
    """One line that says how many rows of an environment's files were left out, by reason."""
    lines: list[str] = []
    for report in reports:
        first = {reason: f" ({where})" for reason, where in report.get("first", {}).items()}
        why = [f"{count} {reason}{first.get(reason, '')}" for reason, count in report.get("dropped", {}).items()]
        lines += [f"{report['kept']} of {report['rows']} rows used; dropped: {', '.join(why)}"] if why else []
    return lines


def censored(what: str, reasons: dict[str, int], played: int) -> list[str]:
    """One line that says how many rollouts have no reward, and why; the three most frequent reasons."""
    if not reasons:
        return []
    return [f"{sum(reasons.values())} of {played} {what} have no reward: {most_frequent(reasons)}"]


def counted(read: dict[str, Any] | None) -> list[str]:
    """What was told apart and dropped when a log was read; None is a table, of which every row is read."""
    if read is None:
        return []
    first = read["first_dropped"]
    return [*read["notes"], *(f"dropped {n}: {why} (first: {first[why]})" for why, n in read["dropped"].items())]


def finish(result: dict[str, Any], json_path: str | None, lines: list[str]) -> None:
    """Print `lines` (to standard error when JSON goes to standard output) and write the JSON. Of the ranks that a
    launcher started, the first one does."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and os.environ.get("RANK", "0") != "0":
        return
    for line in lines:
        print(printable(line), file=sys.stderr if json_path == "-" else results(), flush=True)
    if json_path == "-":
        print(json.dumps(result, indent=2), file=results(), flush=True)
    elif json_path is not None:
        write_json(Path(json_path), result)


def share(row: dict[str, Any]) -> str:
    """A success rate with its Wilson interval, as text."""
    if row["success"] is None:
        return "no scored episode"
    return f"{row['success']:.1%} [{row['low']:.1%}, {row['high']:.1%}] of {row['episodes']}"
