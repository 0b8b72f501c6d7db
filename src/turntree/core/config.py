"""Strict configuration: one frozen dataclass beside its owner; an unknown key is an error."""

from __future__ import annotations

import dataclasses
import difflib
import reprlib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from turntree.core.errors import ConfigError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Part:
    """A part as plain values: its name and its options (`core.parts`). In a configuration file it is one mapping,
    `{"name": "entropy", "alpha": 0.5}`; on the command line `--set brancher.alpha=0.5`."""

    name: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    @classmethod
    def from_value(cls, value: Any, field: str) -> Part:
        """A name alone, or the mapping. Raises `ConfigError` for anything else."""
        if isinstance(value, Part):
            return value
        if isinstance(value, str):
            return cls(value)
        if isinstance(value, Mapping):
            row = cast("Mapping[Any, Any]", value)
            if isinstance(row.get("name"), str):
                return cls(row["name"], {str(key): item for key, item in row.items() if key != "name"})
        raise ConfigError("names no part", field=field, hint='write a name, or {"name": ..., KEY: VALUE}')


def from_mapping(cls: type[T], values: Mapping[str, Any], *, path: str | Path | None = None) -> T:
    """Build the dataclass `cls` from plain values (nested mappings for nested dataclasses).

    Raises `ConfigError` for an unknown key (naming the nearest known one), a missing one or a wrong type.
    """
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cast(Any, cls)) if f.init}
    for key in values:
        if key not in fields:
            raise unknown_key(str(key), fields, field=str(key), path=path)
    built = {key: _convert(hints[key], value, path, key) for key, value in values.items()}
    for name, field in fields.items():
        no_default = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if no_default and name not in built:
            raise ConfigError("is missing", path=path, field=name, hint="give it a value")
    try:
        return cls(**built)
    except ValueError as error:  # a __post_init__ check
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(str(error), path=path) from error


def to_mapping(config: Any) -> dict[str, Any]:
    """The dataclass as plain JSON values; `from_mapping(type(config), to_mapping(config)) == config`."""
    return {f.name: to_value(getattr(config, f.name)) for f in dataclasses.fields(config)}


def to_value(value: Any) -> Any:
    """A value of a configuration as JSON: a part is one mapping of its name and options, a dataclass one of its
    fields."""
    if isinstance(value, Part):
        return {"name": value.name, **{key: to_value(item) for key, item in value.options.items()}}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_mapping(value)
    if isinstance(value, Mapping):
        return {str(key): to_value(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [to_value(item) for item in cast("Sequence[Any]", value)]
    return value


def with_overrides(config: T, overrides: Mapping[str, Any]) -> T:
    """A copy of `config` with dotted keys replaced: `{"sampling.temperature": 0.7}`. Unknown keys are errors."""
    values = to_mapping(config)
    for dotted, value in overrides.items():
        target: dict[str, Any] = values
        *parents, last = dotted.split(".")
        for parent in parents:
            if not isinstance(target.get(parent), dict):
                raise ConfigError("unknown key", field=dotted, hint=f"{parent!r} has no sub-keys")
            target = target[parent]
        target[last] = value
    return from_mapping(type(config), values)


def converted(hint: Any, value: Any, *, field: str, path: str | Path | None = None) -> Any:
    """A plain value as the type `hint` says. Raises `ConfigError` where it is not of that type."""
    return _convert(hint, value, path, field)


def unknown_key(key: str, known: Iterable[str], *, field: str, path: str | Path | None = None) -> ConfigError:
    """The error for a key that is not among `known`: names the nearest, or all."""
    names = sorted(known)
    near = difflib.get_close_matches(key, names, n=1)
    listed = f"known keys: {', '.join(names)}" if names else "it has no keys"
    return ConfigError("unknown key", path=path, field=field, hint=f"did you mean {near[0]!r}?" if near else listed)


def _convert(hint: Any, value: Any, path: str | Path | None, field: str) -> Any:
    if hint is Part:
        return Part.from_value(value, field)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        errors: list[ConfigError] = []
        for option in arguments:
            if option is type(None):
                continue
            try:
                return _convert(option, value, path, field)
            except ConfigError as error:
                errors.append(error)
        raise errors[0]
    if origin is typing.Literal:
        if value not in arguments:
            allowed = ", ".join(map(repr, arguments))
            raise ConfigError(f"{value!r} is not allowed", path=path, field=field, hint=f"use one of {allowed}")
        return value
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return from_mapping(cast(Any, hint), cast(Mapping[str, Any], value), path=path)
    if origin is tuple and isinstance(value, list | tuple):
        items: list[Any] = list(cast("list[Any]", value))
        kinds = [arguments[0]] * len(items) if arguments[-1:] == (Ellipsis,) else list(arguments)
        if len(kinds) != len(items):
            raise ConfigError(f"needs {len(kinds)} values, has {len(items)}", path=path, field=field)
        return tuple(_convert(kind, item, path, field) for kind, item in zip(kinds, items, strict=True))
    if origin is tuple:
        raise ConfigError("is not a list", path=path, field=field)
    return _convert_scalar(hint, value, path, field)


def _convert_scalar(hint: Any, value: Any, path: str | Path | None, field: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError as error:
            raise ConfigError("is too large for a number", path=path, field=field) from error
    if isinstance(hint, type) and (not isinstance(value, hint) or (hint is int and isinstance(value, bool))):
        raise ConfigError(f"{reprlib.repr(value)} is not of type {hint.__name__}", path=path, field=field)
    return value
