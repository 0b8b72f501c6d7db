"""Commands whose options are made from a configuration dataclass (docs/design/configuration.md).

A command names its dataclass and the dotted key of every everyday option:

    @click.command("sft", cls=StageCommand, config="turntree.stages.config:SFTStageConfig",
                   options=short("sft.epochs sft.optimizer.learning_rate log=loggers"))

Type, default and help of an option are those of its key, so an option takes one word. The dataclass is imported when
the command is used, not before. Every such command also takes `--config`, `--set` and `--dry-run`.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import json
import os
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from turntree.core import parts
from turntree.core.config import UNKNOWN, Part, from_mapping, nested, overlaid, section_of, to_mapping, to_value
from turntree.core.config import defaults as defaults_of
from turntree.core.errors import ConfigError, InputError
from turntree.core.keys import Key, keys
from turntree.run.files import read_json, require_writable
from turntree.run.jsonl import located, parse_json, placed, read_toml

# where a command is to write, checked before it begins: a result that cannot be written would be lost

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


# options from keys


@dataclass(frozen=True)
class Read:
    """An option whose text is turned into the value of its key by `read`. A repeated option makes a list."""

    key: str
    read: Callable[[str], Any]
    metavar: str
    repeated: bool = False

    def value(self, ctx: click.Context, parameter: click.Parameter, text: Any) -> Any:
        if self.repeated:
            return [to_value(self.read(one)) for one in text]
        return None if text is None else to_value(self.read(text))


@dataclass(frozen=True)
class _Layer:
    """Values from one source; `path` is the file of `--config`."""

    values: dict[str, Any]
    path: Path | None = None


Options = Mapping[str, "str | Read"]  # by option, or by the name of a positional argument


def short(words: str) -> dict[str, str]:
    """Options by their keys. Of the words, `sft.max_length` is the option --max-length, `log=loggers` is --log, and
    `PIVOTS=pivots` is a positional argument."""
    found: dict[str, str] = {}
    for word in words.split():
        name, _, key = word.rpartition("=")
        name = name or key.rpartition(".")[2].replace("_", "-")
        found[name if name.isupper() else f"--{name}"] = key
    return found


class StageCommand(OutputCommand):
    """A command that runs with a configuration. Its function gets the resolved one as `config`, beside the parameters
    that it declares itself (where to write, what to overwrite)."""

    def __init__(
        self,
        *arguments: Any,
        config: str,
        options: Options,
        stage: str | None = None,
        part: str | None = None,
        named: Callable[[str], str] | None = None,
        **settings: Any,
    ):
        """`part` names a key that holds a part: options that the command does not know are options of this part
        (`--difficulty hard`). `named(model)` gives the name of the part where the user gives none."""
        super().__init__(*arguments, **settings)
        self._config, self.options, self._part, self._named = config, options, part, named
        self.stage = stage or self.name  # as config.json names it
        if part is not None:
            self.context_settings = {**self.context_settings, "ignore_unknown_options": True}
        self._shared: list[click.Parameter] | None = None

    @property
    def config_class(self) -> type:
        """Imports it."""
        module, _, name = self._config.partition(":")
        return getattr(importlib.import_module(module), name)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        if self._shared is None:
            known = {key.name: key for key in keys(self.config_class)}
            made = [_parameter(name, target, known) for name, target in self.options.items()]
            arguments = [one for one in made if isinstance(one, click.Argument)]
            self._shared = _shared()
            if self._part is not None:
                own = click.Argument(["part_options"], nargs=-1, type=click.UNPROCESSED, metavar="[--KEY VALUE]...")
                arguments.append(own)
            # positional ones first; a command's own options before those of its configuration
            self.params = [*arguments, *self.params, *(one for one in made if one not in arguments), *self._shared]
        return super().get_params(ctx)

    def invoke(self, ctx: click.Context) -> Any:
        config_path = ctx.params["config_path"]
        config = self.resolve(ctx)
        check_outputs(ctx, config, config_path)
        if ctx.params.pop("dry_run"):
            described = {"stage": self.stage, "config": to_mapping(config)}
            print(json.dumps(described, indent=2), file=results())
            # by its name, as `config_class`: what only wants options does not import the stages
            for name in ("carriers", "plan"):
                for line in importlib.import_module(f"turntree.stages.{name}").told(config):
                    print(f"turntree: {line}", file=sys.stderr)
            out = ctx.params.get("out")
            where = f" and write to {out}" if out else ""
            print(f"turntree: would run {self.stage!r} ({self.short_help}){where}; nothing was done", file=sys.stderr)
            return None
        return ctx.invoke(self.callback, **ctx.params, config=config) if self.callback else None

    def resolve(self, ctx: click.Context) -> Any:
        """The configuration: the defaults, then --config, then the short options that were given, then --set. Removes
        these parameters from `ctx`. Raises `ConfigError` for an invalid value, click's `MissingParameter` for a
        missing required option."""
        own = [word.partition("=")[0] for word in ctx.params.get("part_options") or () if word.startswith("--")]
        layers = list(self._layers(ctx))
        values = self._overlaid(layers)
        required = {key.name for key in keys(self.config_class) if key.required}
        for name, target in self.options.items():
            section = _at(values, str(target).rpartition(".")[0])
            if target in required and isinstance(section, Mapping) and not _holds(values, str(target)):
                place = next((p for p in self.params if name in (*p.opts, p.human_readable_name)), None)
                raise click.MissingParameter(ctx=ctx, param=place)
        try:
            return parts.resolved(from_mapping(self.config_class, values))
        except ConfigError as error:
            error = self._elsewhere(error, values)
            if (file := _named_by(error, layers)) is not None:
                raise located(error, path=file) from error
            typed = [word for word in own if error.field == f"{self._part}.{_name(word)}"]
            if not typed or error.problem != UNKNOWN:
                raise error from None
            near = difflib.get_close_matches(
                typed[0], [option for one in self.params for option in one.opts], n=1, cutoff=0.7
            )
            hint = f"did you mean {near[0]}?" if near else error.hint
            raise InputError(f"there is no option {typed[0]}", field=self._part, hint=hint) from error

    def values(self, ctx: click.Context) -> dict[str, Any]:
        """Like `resolve`, but as plain values in which required keys may be missing."""
        return self._overlaid(list(self._layers(ctx)))

    def _overlaid(self, layers: list[_Layer]) -> dict[str, Any]:
        values = defaults_of(self.config_class)
        given = [layer.values.get(self._part) for layer in layers if self._part]
        named = any(isinstance(value, str) or (isinstance(value, Mapping) and "name" in value) for value in given)
        if self._named and self._part and not named:
            model = [layer.values["model"] for layer in layers if "model" in layer.values] or [values["model"]]
            layers = [_Layer({self._part: self._named(model[-1])}), *layers]
        for layer in layers:
            with placed(path=layer.path):
                values = overlaid(values, layer.values, self.config_class)
        return values

    def _elsewhere(self, error: ConfigError, values: Any) -> ConfigError:
        """The same error; where other sections have the unknown key, or the one in it, its hint names it there."""
        above, _, name = (error.field or "").rpartition(".")
        if error.problem != UNKNOWN:
            return error
        for key in (error.field or "").split("."):
            values = values.get(key) if isinstance(values, Mapping) else None
        while isinstance(values, Mapping) and len(values) == 1:
            ((name, values),) = values.items()
        known = [key.name for key in keys(self.config_class)]
        near = [key for key in known if key.rpartition(".")[2] == name and above not in known]
        hint = f"did you mean {' or '.join(map(repr, near[:3]))}?" if near else error.hint
        return ConfigError(error.problem, path=error.path, field=error.field, hint=hint)

    def _layers(self, ctx: click.Context) -> Iterator[_Layer]:
        """The values of --config, the short options and --set, later ones over earlier ones."""
        path, overrides = ctx.params.pop("config_path"), ctx.params.pop("overrides")
        if path is not None:
            yield _Layer(_read(path, self.stage), path)
        for name, target in self.options.items():
            parameter = _name(name)
            value, source = ctx.params.pop(parameter), ctx.get_parameter_source(parameter)
            given = isinstance(target, Read) or value not in (None, ())
            if source is ParameterSource.COMMANDLINE and given:
                yield _Layer(nested(key_of(target), value))
        if self._part is not None:
            for key, value in _own(ctx.params.pop("part_options")):
                yield _Layer(nested(f"{self._part}.{key}", value))
        for override in overrides:
            yield _Layer(nested(*assignment(override, "--set")))


def key_of(target: str | Read) -> str:
    """The key that a row of the table stands for."""
    return target if isinstance(target, str) else target.key


# making options


def _results_only(ctx: click.Context, option: click.Parameter, path: str | None) -> str | None:
    """Keep standard output for `results`: what libraries print while the command runs (Ray does, of a lost node) goes
    to standard error. The root context ends it, which is closed however the command ends."""
    if __name__ not in ctx.meta:  # `turntree config` makes the context of a second command
        ctx.meta[__name__] = sys.stdout
        ctx.find_root().with_resource(contextlib.redirect_stdout(sys.stderr))
    return path


def results() -> Any:
    """The stream of a command's results."""
    command = click.get_current_context(silent=True)
    return sys.stdout if command is None else command.meta.get(__name__, sys.stdout)


JSON: dict[str, Any] = {
    "metavar": "PATH",
    "callback": _results_only,
    "help": "Write the result as JSON; '-' is standard output, and only it.",
}


def _shared() -> list[click.Parameter]:
    """The options of every command with a configuration."""
    return [
        click.Option(
            ["--config", "config_path"],
            metavar="FILE",
            type=click.Path(path_type=Path),
            help="Read keys from a run's config.json, or from a TOML file with the same keys.",
        ),
        click.Option(
            ["--set", "overrides"],
            multiple=True,
            metavar="KEY=VALUE",
            help="Replace any key of the configuration (repeatable); `turntree config` lists them.",
        ),
        click.Option(["--dry-run"], is_flag=True, help="Print the resolved configuration, and do nothing."),
        click.Option(["--json", "json_path"], **JSON),
    ]


def _name(option: str) -> str:
    return option.removeprefix("--").replace("-", "_").lower()


def _parameter(name: str, target: str | Read, known: Mapping[str, Key]) -> click.Parameter:
    """The click parameter of one row of the table."""
    key = known[key_of(target)]
    if not name.startswith("--"):
        return click.Argument([_name(name)], metavar=name, required=False)
    told = f"{key.meaning}  {default_text(key)}".strip()
    if isinstance(target, Read):
        return click.Option([name], multiple=target.repeated, metavar=target.metavar, callback=target.value, help=told)
    if section_of(key.hint) not in (None, Part):
        return click.Option(
            [name],
            is_flag=True,
            flag_value=True,
            callback=lambda ctx, parameter, value: {} if value else None,
            help=told,
        )
    return click.Option([name], help=told, **_kind(key.hint, name))


def default_text(key: Key) -> str:
    """The help text of a key's default; empty for a default that is off or empty."""
    if key.required:
        return f"[required with other keys of {key.off}]" if key.off else "[required]"
    if key.default is None or key.default is False or key.default in ({}, [], ""):
        return ""
    value = ",".join(map(str, key.default)) if isinstance(key.default, list) else key.default
    told = value if isinstance(value, str) else json.dumps(value)
    return f"[default: off, then {told}]" if key.off else f"[default: {told}]"


def _kind(hint: Any, name: str) -> dict[str, Any]:
    """How click reads a value of this type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _kind(arguments[0], name)
    if origin in (types.UnionType, typing.Union):
        return _kind(next(one for one in arguments if one is not type(None)), name)
    if origin is typing.Literal:
        return {"type": click.Choice(arguments)}
    if hint is bool:
        return {"is_flag": True}
    if hint in (int, float):
        return {"type": hint}
    if origin is tuple and arguments[0] is Part:
        return {"multiple": True, "metavar": "NAME"}
    if origin is tuple:
        return {"callback": _list_of(arguments[0], name), "metavar": "VALUE,..."}
    if origin is dict:
        return {
            "multiple": True,
            "callback": lambda _, __, texts: dict(assignment(text, name) for text in texts) or None,
            "metavar": "KEY=VALUE",
        }
    return {"metavar": "NAME"} if hint is Part else {}


def _list_of(item: Any, name: str) -> Any:
    plain = typing.get_args(item)[0] if typing.get_origin(item) is typing.Annotated else item
    kind = plain if plain in (int, float) else str  # the configuration checks the rest

    def read(ctx: click.Context, parameter: click.Parameter, text: str | None) -> list[Any] | None:
        if text is None:
            return None
        try:
            return [kind(part) for part in text.split(",") if part]
        except ValueError:
            raise InputError(f"{text!r} is not a list of numbers", field=name, hint=f"write {name} 0,1,2") from None

    return read


# reading values


def assignment(text: str, option: str) -> tuple[str, Any]:
    """KEY=VALUE; the value is JSON where it parses as JSON, else text."""
    key, equals, value = text.rpartition("=") if option != "--set" else text.partition("=")
    if not equals or not key:
        lacking = "key" if equals else "'='"
        raise InputError(f"{text!r} has no {lacking}", field=option, hint=f"write {option} KEY=VALUE")
    return key, value_of(value)


def _own(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The options of a part: `--difficulty hard`, `--difficulty=hard`."""
    left = list(words or ())
    while left:
        word, equals, text = left.pop(0).partition("=")
        if not word.startswith("--"):
            raise InputError(f"there is no argument {word!r}", hint="see --help")
        if not equals and not left:
            raise InputError("is not an option, or has no value", field=word, hint=f"see --help, or write {word} VALUE")
        yield word.removeprefix("--").replace("-", "_"), value_of(text if equals else left.pop(0))


def value_of(text: str) -> Any:
    """JSON where it parses as JSON, else text."""
    try:
        return parse_json(text)
    except InputError:
        return text


def _read(path: Path, stage: str | None) -> dict[str, Any]:
    """The keys of a run's config.json (its `config` part) or of a TOML file."""
    if path.suffix == ".toml":
        return read_toml(path)
    found = read_json(path)
    if isinstance(found, dict) and "stage" in found and "config" in found:
        if found["stage"] != stage:
            hint = f"use it with `turntree {found['stage']}`"
            raise InputError(f"is of stage {found['stage']!r}, not {stage!r}", path=path, hint=hint)
        found = found["config"]
    if not isinstance(found, dict):
        raise InputError("holds no keys", path=path, hint="name a run's config.json, or a TOML file")
    return found


def _named_by(error: ConfigError, layers: Sequence[_Layer]) -> Path | None:
    """The file that the value of the error came from; None for an option, and for a default."""
    key = (error.field or "").partition("[")[0]
    return next((layer.path for layer in reversed(layers) if _holds(layer.values, key)), None)


def _holds(values: Mapping[str, Any], dotted: str) -> bool:
    above, _, name = dotted.rpartition(".")
    here = _at(values, above)
    return isinstance(here, Mapping) and name in here


def _at(values: Mapping[str, Any], dotted: str) -> Any:
    here: Any = values
    for name in filter(None, dotted.split(".")):
        here = here.get(name) if isinstance(here, Mapping) else None
    return here
