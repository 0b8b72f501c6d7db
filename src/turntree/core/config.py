"""Strict values: plain JSON to a frozen dataclass, or one line that says what is wrong with it.

Configurations and the rows of our artifacts (`run.artifacts`) are dataclasses. They are checked by their
annotations: str, int, float, bool, `Literal`, enumerations of text, unions, tuples, lists, `dict[str, X]`, nested
dataclasses, `Any`. `Annotated[float, Between(0, 1)]` bounds numbers (in lists and unions too). A float must be finite,
an int must fit into 64 bits, a bool does not count as a number, and an unknown key is an error.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import enum
import functools
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from turntree.core.errors import ConfigError

T = TypeVar("T")
_LARGEST = 2**63 - 1
UNKNOWN = "unknown key"
FIXED = {"fixed": True}  # of a field that Python may set and no configuration: a file can only repeat its default


@dataclasses.dataclass(frozen=True)
class Between:
    """The bounds of a number: `least` and `most` are allowed themselves, `above` and `below` are not."""

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf

    def check(self, value: float | None, field: str) -> None:
        """Raise `ConfigError` for a number outside (None: a default)."""
        if value is not None:
            inside = self.least <= value <= self.most and (self.above < value or self.above == -math.inf)
            if not (inside and (value < self.below or self.below == math.inf)):
                raise ConfigError(f"is {value!r}", field=field, hint=f"it is {self}")

    def __str__(self) -> str:
        if -math.inf < self.least and self.most < math.inf:
            return f"from {self.least:g} to {self.most:g}"
        told = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        return " and ".join(f"{word} {bound:g}" for word, bound in told.items() if math.isfinite(bound))


Count = Annotated[int, Between(0)]
Positive = Annotated[int, Between(1)]
Amount = Annotated[float, Between(0)]
Above0 = Annotated[float, Between(above=0)]
Share = Annotated[float, Between(0, 1)]


class Bounded:
    """Base of dataclasses whose numbers lie within the bounds of their annotations, however one is made (`from_mapping`
    checks those of any)."""

    def __post_init__(self) -> None:
        for name, bound in _bounds(type(self)):
            bound.check(getattr(self, name), name)


@dataclasses.dataclass(frozen=True)
class Part:
    """A part as plain values: its name and its options (`core.parts`). In a configuration file it is one mapping,
    `{"name": "entropy", "branches": 3}`; on the command line `--set brancher.branches=3`."""

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


@dataclasses.dataclass(frozen=True)
class Usual:
    """For a part that is off by default, as in `Annotated[Part | None, Usual("entropy")]`: setting one of its options
    without naming a part switches this one on."""

    name: str


def is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def require_url(text: str, field: str, hint: str = "write http://host:port/v1") -> None:
    """Raise `ConfigError` for what is not the address of a server."""
    if not is_url(text):
        raise ConfigError(f"{text!r} is not a URL", field=field, hint=hint)


def made_plain(value: object, **kinds: Callable[[Any], Any]) -> None:
    """Of a frozen dataclass: plain values in place of those of numpy or torch, which a log, a tree on disk or a
    checkpoint could not hold."""
    for name, kind in kinds.items():
        object.__setattr__(value, name, kind(getattr(value, name)))


def from_mapping(cls: type[T], values: Mapping[str, Any], *, path: str | Path | None = None) -> T:
    """Build the dataclass `cls` from plain values (nested mappings for nested dataclasses).

    Raises `ConfigError` for an unknown key (naming the nearest known one), a missing one or a wrong type.
    """
    try:
        return _built(cls, values)
    except ConfigError as error:
        raise ConfigError(error.problem, path=error.path or path, field=error.field, hint=error.hint) from error


def _built(cls: type[T], values: Mapping[str, Any]) -> T:
    hints, fields = _shape(cls)
    if not isinstance(cast(Any, values), Mapping):
        raise ConfigError(f"is {type(values).__name__}, not an object")
    for key, value in values.items():
        if key not in fields:
            known = [name for name, field in fields.items() if not is_fixed(field)]
            raise unknown_key(str(key), known, field=str(key))
        if is_fixed(fields[key]) and value != (usual := _default(fields[key])):
            raise ConfigError("is no key", field=key, hint=f"it is {usual!r}, always")
    built = {key: converted(hints[key], value, key) for key, value in values.items()}
    for name, field in fields.items():
        no_default = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if no_default and name not in built:
            raise ConfigError("is missing", field=name, hint="give it a value")
    try:
        return cls(**built)
    except ValueError as error:  # a __post_init__ check
        raise ConfigError(str(error)) from error


@functools.cache
def _shape(cls: type) -> tuple[dict[str, Any], dict[str, dataclasses.Field[Any]]]:
    """The resolved annotations and the fields of a dataclass."""
    return typing.get_type_hints(cls, include_extras=True), {f.name: f for f in dataclasses.fields(cls) if f.init}


@functools.cache
def _bounds(cls: type) -> tuple[tuple[str, Between], ...]:
    """The bounds of the numbers of a dataclass, by field; of optional ones too."""
    found: list[tuple[str, Between]] = []
    for name, hint in _shape(cls)[0].items():
        options = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else ()
        marks = [mark for one in (hint, *options) for mark in getattr(one, "__metadata__", ())]
        found += [(name, mark) for mark in marks if isinstance(mark, Between)]
    return tuple(found)


def to_mapping(config: Any) -> dict[str, Any]:
    """The dataclass as plain JSON values; `from_mapping(type(config), to_mapping(config)) == config`."""
    return {f.name: to_value(getattr(config, f.name)) for f in dataclasses.fields(config) if not is_fixed(f)}


def is_fixed(field: dataclasses.Field[Any]) -> bool:
    return "fixed" in field.metadata


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


def defaults(cls: type) -> dict[str, Any]:
    """The fields of a dataclass that have a default, as plain JSON values."""
    given = {name: _default(field) for name, field in _shape(cls)[1].items() if not is_fixed(field)}
    return {name: value for name, value in given.items() if value is not dataclasses.MISSING}


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return to_value(field.default_factory())
    return to_value(field.default)


def nested(dotted: str, value: Any) -> dict[str, Any]:
    """`{"a": {"b": value}}` of "a.b"."""
    for key in reversed(dotted.split(".")):
        value = {key: value}
    return cast("dict[str, Any]", value)


def overlaid(old: Any, new: Any, hint: Any = Part) -> Any:
    """Merge plain values: the keys of `new` win, section by section. List items are named by their number, from 0; the
    number after the last one appends an item. Naming another part drops the options of the previous one. `hint`: the
    type of the value, because a section may have a field `name` too, and is no part."""
    section = section_of(hint)
    hints = {} if section in (None, Part) else _shape(section)[0]
    if isinstance(new, str) and isinstance(old, Mapping) and "name" in old:
        new = {"name": new}
    if not isinstance(new, Mapping):
        return new
    row = cast("Mapping[str, Any]", new)
    if isinstance(old, Mapping):
        below = cast("Mapping[str, Any]", old)
        if not hints and row.get("name", below.get("name")) != below.get("name"):
            return row
        return {**below, **{key: overlaid(below.get(key), value, hints.get(key, Part)) for key, value in row.items()}}
    if isinstance(old, str) and "name" not in row:  # a part that was given by its name alone
        return {"name": old, **row}
    if not isinstance(old, list | tuple) or not row or not all(key.isdecimal() for key in row):
        return row
    items = list(cast("Sequence[Any]", old))
    for key, value in row.items():
        if int(key) > len(items):
            raise ConfigError(UNKNOWN, field=key, hint=f"there are {len(items)} items")
        items[int(key) : int(key) + 1] = [overlaid((*items, None)[int(key)], value)]
    return items


def usual_of(hint: Any) -> str | None:
    """The name in a `Usual`, if the annotation has one."""
    return next((one.name for one in getattr(hint, "__metadata__", ()) if isinstance(one, Usual)), None)


def item_of(hint: Any) -> Any:
    """The type of the items of `tuple[X, ...]`, else None."""
    return typing.get_args(hint)[0] if typing.get_args(hint)[1:] == (Ellipsis,) else None


def section_of(hint: Any) -> type | None:
    """The dataclass of an annotation `X` or `X | None`; None for any other annotation."""
    if typing.get_origin(hint) is typing.Annotated:
        return section_of(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        found = [section for option in typing.get_args(hint) if (section := section_of(option)) is not None]
        return found[0] if len(found) == 1 else None
    return hint if isinstance(hint, type) and dataclasses.is_dataclass(hint) else None


def unknown_key(key: str, known: Iterable[str], *, field: str) -> ConfigError:
    """The error for a key that is not among `known`: names the nearest, or all."""
    names = sorted(known)
    near = difflib.get_close_matches(key[:100], names, n=1)
    listed = f"known keys: {', '.join(names)}" if names else "it has no keys"
    return ConfigError(UNKNOWN, field=field, hint=f"did you mean {near[0]!r}?" if near else listed)


def converted(hint: Any, value: Any, field: str) -> Any:
    """A plain value converted to the type `hint`. Raises `ConfigError` where it is not of that type."""
    if hint is Part:
        return Part.from_value(value, field)
    if hint is Any or (hint is str and type(value) is str):
        return value
    origin, arguments = _parts(hint)
    if origin is None and type(value) is hint:  # most values: nothing to take apart
        return _convert_scalar(hint, value, field)
    if origin is typing.Annotated:
        usual = usual_of(hint)
        if usual is not None and isinstance(value, Mapping) and "name" not in value:
            value = {"name": usual, **cast("Mapping[str, Any]", value)}
        plain = converted(arguments[0], value, field)
        for bound in arguments[1:]:
            if isinstance(bound, Between):
                bound.check(plain, field)
        return plain
    if origin in (types.UnionType, typing.Union):
        return _convert_union(arguments, value, field)
    if origin is typing.Literal:
        if not any(type(value) is type(option) and value == option for option in arguments):
            allowed = ", ".join(map(repr, arguments))
            raise ConfigError(f"{value!r} is not allowed", field=field, hint=f"use one of {allowed}")
        return value
    if isinstance(hint, type) and issubclass(hint, enum.StrEnum):
        if value not in list(hint):
            allowed = ", ".join(repr(option.value) for option in hint)
            raise ConfigError(f"{value!r} is not allowed", field=field, hint=f"use one of {allowed}")
        return hint(value)
    if dataclasses.is_dataclass(cast(Any, hint)) and isinstance(value, Mapping):
        return _section(cast(Any, hint), cast("Mapping[str, Any]", value), field)
    if origin in (tuple, list) and isinstance(value, list | tuple):
        return _convert_items(origin, arguments, list(cast("list[Any]", value)), field)
    if origin in (dict, collections.abc.Mapping) and isinstance(value, Mapping):
        row = cast("Mapping[Any, Any]", value)
        if odd := [key for key in row if not isinstance(key, str)]:
            raise ConfigError(f"has the key {odd[0]!r}, which is not text", field=field)
        return {key: converted(arguments[1], item, f"{field}.{key}") for key, item in row.items()}
    return _convert_scalar(origin or hint, value, field)


def _section(cls: type[T], value: Mapping[str, Any], field: str) -> T:
    """A nested dataclass. Its errors name their place from here; checks of a section may begin with its name."""
    try:
        return _built(cls, value)
    except ConfigError as error:
        inner = "" if error.field is None else f".{error.field.removeprefix(field + '.')}"
        whole = field if error.field == field else field + inner
        raise ConfigError(error.problem, path=error.path, field=whole, hint=error.hint) from error


@functools.cache
def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """What an annotation is made of, e.g. (list, (int,))."""
    return typing.get_origin(hint), typing.get_args(hint)


def _convert_union(options: tuple[Any, ...], value: Any, field: str) -> Any:
    if value is None and type(None) in options:
        return None
    errors: list[ConfigError] = []
    for option in options:
        if option is type(None):
            continue
        try:
            return converted(option, value, field)
        except ConfigError as error:
            errors.append(error)
    raise errors[0]


def _convert_items(kind: Any, arguments: tuple[Any, ...], items: list[Any], field: str) -> Any:
    kinds: list[Any] = list(arguments)
    if kind is list or arguments[-1:] == (Ellipsis,):
        kinds = [arguments[0]] * len(items)
    if len(kinds) != len(items):
        raise ConfigError(f"needs {len(kinds)} values, has {len(items)}", field=field)
    plain = len(set(kinds)) == 1 and kinds[0] in (int, float) and {type(item) for item in items} == {kinds[0]}
    if plain and all(-_LARGEST <= item <= _LARGEST for item in items):
        return items if kind is list else tuple(items)  # thousands of token ids, without a long look at each
    pairs = enumerate(zip(kinds, items, strict=True))
    found = [converted(hint, item, f"{field}[{place}]") for place, (hint, item) in pairs]
    return found if kind is list else tuple(found)


def _convert_scalar(hint: Any, value: Any, field: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _LARGEST:
        return float(value)
    if isinstance(hint, type) and (not isinstance(value, hint) or (hint is int and isinstance(value, bool))):
        kind = "a section of keys" if section_of(hint) else f"of type {hint.__name__}"
        raise ConfigError(f"{value!r} is not {kind}", field=field)
    if hint is float and not math.isfinite(value):
        raise ConfigError(f"is {value}, which is not a finite number", field=field)
    if hint is int and abs(value) > _LARGEST:
        raise ConfigError("is a number of more than 64 bits", field=field)
    return value
