"""Every key of a configuration: its dotted name, type, default and meaning, read from the dataclasses themselves.

The meaning of a key is the line of text below its field (an attribute docstring, PEP 257). Options of functions and
classes have theirs in the section `Args:` of the docstring. The command line makes its options from these keys and
`turntree config` lists them, so neither can disagree with the code.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from typing import Any, cast

from turntree.core import parts
from turntree.core.config import (
    Part,
    converted,
    defaults,
    is_fixed,
    item_of,
    section_of,
    to_value,
    unknown_key,
    usual_of,
)


@dataclass(frozen=True)
class Key:
    """One key. `default` is a plain JSON value; a `required` key has none. A key that names a section belongs to an
    optional section: None switches it off. `off` names the section above that is off by default, if there is one."""

    name: str
    hint: Any
    default: Any
    required: bool
    meaning: str
    off: str = ""

    @property
    def type(self) -> str:
        """The type in words."""
        return type_name(self.hint)

    def to_json(self) -> dict[str, Any]:
        row = {"key": self.name, "type": self.type, "default": self.default, "required": self.required}
        return {**row, "off": self.off, "meaning": self.meaning}


def keys(cls: type, values: Mapping[str, Any] | None = None, above: str = "", off: str = "") -> Iterator[Key]:
    """The keys of a configuration class in the order of its fields, with the keys of sections after their section.

    The keys of a part are the options of the part that `values` names (default: the defaults of `cls`). Raises
    `InputError` for an unknown key and where there is no part of that name."""
    held = {**defaults(cls), **(values or {})}
    hints = typing.get_type_hints(cls, include_extras=True)
    if unknown := [key for key in held if key not in hints]:
        raise unknown_key(unknown[0], hints, field=above + unknown[0])
    meanings = field_meanings(cls)
    for field in fields(cls):
        if not field.init or is_fixed(field):
            continue
        name = field.name
        key = Key(above + name, hints[name], held.get(name), name not in held, meanings.get(name, ""), off)
        yield from _part(key, name) if section_of(key.hint) is Part else _below(key)


def _below(key: Key) -> Iterator[Key]:
    """The key, or those of its section; where its items are sections, those of the first too: `checkpoints.0.turn`."""
    section, item = section_of(key.hint), section_of(item_of(key.hint))
    if section in (None, Part) or type(None) in typing.get_args(key.hint):
        yield key
    if section not in (None, Part):
        held: Any = key.default
        inner = cast("Mapping[str, Any]", held) if isinstance(held, Mapping) else None
        yield from keys(section, inner, f"{key.name}.", key.off or (key.name if inner is None else ""))
    elif item not in (None, Part) and key.default:
        yield from keys(item, key.default[0], f"{key.name}.0.", key.off)


def _part(key: Key, field: str) -> Iterator[Key]:
    chosen = None if key.default is None else converted(key.hint, key.default, field=key.name)
    yield Key(key.name, key.hint, chosen and chosen.name, key.required, key.meaning)
    usual, off = usual_of(key.hint), key.off
    if chosen is None and usual is not None:
        chosen, off = Part(usual), off or key.name
    if chosen is None or field not in parts.KIND_OF:
        return
    found = parts.load(parts.KIND_OF[field], chosen.name)
    meanings = option_meanings(found)
    for name, option in found.options().items():
        given = to_value(option.default)
        if name in chosen.options:
            given = to_value(option.value(chosen.options[name], field=f"{key.name}.{name}"))
        required = option.required and name not in chosen.options
        yield from _below(Key(f"{key.name}.{name}", option.hint, given, required, meanings.get(name, ""), off))


@functools.cache
def field_meanings(cls: type) -> dict[str, str]:
    """The text below each field of a class and the classes above it; {} where the source cannot be read."""
    found: dict[str, str] = {}
    for one in reversed(cls.__mro__[:-1]):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(one)))
        except (OSError, TypeError, SyntaxError):
            continue
        for field, text in pairwise(cast("ast.ClassDef", tree.body[0]).body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            ):
                found[field.target.id] = " ".join(text.value.value.split())
    return found


_ARGUMENT = re.compile(r"    (\w+)(?: \(.*?\))?: (.+)")


def option_meanings(part: parts.Loaded) -> dict[str, str]:
    """What is said of each option of a part."""
    return {**argument_meanings(part.config), **argument_meanings(part.target)}


def argument_meanings(described: Any) -> dict[str, str]:
    """What is said of each parameter of a function or class: in the section `Args:` of its docstring, as Google's style
    has it, or below the fields of a dataclass."""
    found = field_meanings(described) if is_dataclass(described) else {}
    name = ""
    for line in (inspect.getdoc(described) or "").partition("\nArgs:\n")[2].splitlines():
        if line and not line[0].isspace():
            break  # another section
        if match := _ARGUMENT.match(line):
            name, found[match[1]] = match[1], match[2].strip()
        elif name and line.strip():
            found[name] += f" {line.strip()}"
    return found


def type_name(hint: Any) -> str:
    """An annotation in words: int, "a" | "b", tuple[int, ...]; a section is called section, a part part."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return type_name(arguments[0])
    if origin in (types.UnionType, typing.Union):
        return " | ".join(map(type_name, arguments))
    if origin is typing.Literal:
        return " | ".join(map(repr, arguments))
    if origin is not None:
        named = ", ".join("..." if argument is Ellipsis else type_name(argument) for argument in arguments)
        return f"{getattr(origin, '__name__', origin)}[{named}]"
    if hint is type(None):
        return "null"
    if hint is Part:
        return "part"
    return "section" if section_of(hint) is not None else getattr(hint, "__name__", str(hint))
