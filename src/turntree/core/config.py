"""Strict configuration: one frozen dataclass beside its owner; an unknown key is an error."""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from turntree.core.errors import ConfigError

T = TypeVar("T")


def from_mapping(cls: type[T], values: Mapping[str, Any], *, path: str | Path | None = None) -> T:
    """Build the dataclass `cls` from plain values (nested mappings for nested dataclasses).

    Raises `ConfigError` for an unknown key (naming the nearest known one), a missing one or a wrong type.
    """
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cast(Any, cls)) if f.init}
    for key in values:
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(fields))}"
            raise ConfigError("unknown key", path=path, field=str(key), hint=hint)
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
    return json.loads(json.dumps(dataclasses.asdict(config)))


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


def _convert(hint: Any, value: Any, path: str | Path | None, field: str) -> Any:
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
    return _convert_scalar(hint, value, path, field)


def _convert_scalar(hint: Any, value: Any, path: str | Path | None, field: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and (not isinstance(value, hint) or (hint is int and isinstance(value, bool))):
        raise ConfigError(f"{value!r} is not of type {hint.__name__}", path=path, field=field)
    return value
