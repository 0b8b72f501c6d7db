"""What every command shares: one clear line for bad input, dotted overrides, a machine-readable result."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from turntree.core import parts
from turntree.core.config import Part, with_overrides
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


def engine_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--engine",
        default=None,
        metavar="SPEC",
        help="What samples, by name or module:object [default: hf]; --set device.engine.KEY=VALUE for its options.",
    )(command)


def with_engine(engine: str | None, overrides: tuple[str, ...]) -> tuple[str, ...]:
    """The `--set` values with what --engine names before them."""
    return overrides if engine is None else (f"device.engine={engine}", *overrides)


def log_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--log",
        "loggers",
        multiple=True,
        metavar="NAME",
        help="Log to tensorboard, trackio, wandb or mlflow as well, or to module:object of your own (repeatable).",
    )(command)


def keep_trees_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--keep-trees",
        default="all",
        show_default=True,
        metavar="all|N|none",
        callback=lambda context, option, text: _how_many(text),
        help="Write whole rollout trees (trees.jsonl) of all iterations, of N spread evenly, or of none.",
    )(command)


def _how_many(text: str) -> int | None:
    """`TrainOnlineConfig.keep_trees`: None is all."""
    if text in ("all", "none"):
        return None if text == "all" else 0
    if not text.isdecimal():
        raise InputError(f"{text!r} is neither 'all', 'none' nor a number", field="--keep-trees")
    return int(text)


def environment_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--environment SPEC`, and behind it whatever options the environment has: `--difficulty hard`."""
    own = click.argument("environment_options", nargs=-1, type=click.UNPROCESSED, metavar="[--KEY VALUE]...")
    return click.option(
        "--environment",
        default=None,
        metavar="SPEC",
        help="What to play: a registered name, module:object of your own, or gymnasium:ID and the like. The options of "
        "an environment are given like those of the command.",
    )(own(command))


PASS_ON: dict[str, Any] = {"ignore_unknown_options": True}  # of a command with `environment_option`


def environment_of(spec: str | None, options: tuple[str, ...], model: str | None) -> Part:
    """The environment that the command line names. Without a name it is the one that a registered policy was made for;
    a model of the user's own says nothing about that. Raises `InputError` for an option that it does not have."""
    if spec is None:
        spec = model if model in parts.names("environments") else "default" if model in (None, "default") else None
    if spec is None:
        hint = "say --environment SPEC"
        raise InputError(f"{model!r} does not say what it was made to play", field="--environment", hint=hint)
    known = parts.load("environments", spec).options()
    values: dict[str, Any] = {}
    left = list(options)
    while left:
        word, equals, text = left.pop(0).partition("=")
        key = word.removeprefix("--").replace("-", "_")
        if not word.startswith("--") or key not in known:
            listed = ", ".join("--" + name.replace("_", "-") for name in known) or "no options"
            raise InputError(f"there is no option {word!r}", field="--environment", hint=f"{spec!r} has {listed}")
        if not equals and not left:
            raise InputError("has no value", field=word, hint=f"write {word} VALUE")
        values[key] = value_of(text if equals else left.pop(0))
    return Part(spec, values)


def value_of(text: str) -> Any:
    """A value on the command line: JSON where it parses as JSON, else text."""
    try:
        return parse_json(text)
    except InputError:
        return text


def dropped(reports: list[dict[str, Any]]) -> list[str]:
    """What reading an environment's files left out, by reason, for a person."""
    return [
        f"{report['kept']} of {report['rows']} rows used; dropped: "
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
        values[key] = value_of(text)
    return parts.resolved(with_overrides(config, values))


def endpoint_of(url: str | None, tokenizer: str | None) -> Any:
    """The server that --endpoint and --tokenizer name, if any."""
    if url is None:
        return None
    if tokenizer is None:
        raise InputError("is missing", field="--tokenizer", hint="--endpoint needs the tokenizer of the served model")
    from turntree.engines.endpoint import EndpointConfig

    return EndpointConfig(url=url, tokenizer=tokenizer)


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
