"""Tool arguments under their declared JSON schema: are they valid, and which arguments mean the same call.

Two argument objects mean the same call when they are equal after the declared defaults are filled in and numbers
that are declared `integer` or `number` are compared by value (1 and 1.0; never true). Keys have no order, arrays do.

Schemas are untrusted. External references are never fetched. A schema with a regular expression or a reference may take
unbounded time, so it is applied in a process that can be killed (`workers`). The time of other schemas is
bounded by the sizes of schema and arguments, and they are applied in this process.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Generic, TypeVar, cast

import jsonschema
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from referencing import Registry, Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012, specification_with

from turntree.verify.strict import canonical_json
from turntree.verify.workers import Workers

T = TypeVar("T")

SECONDS = 2.0
_ENDLESS = ('"pattern":"', '"patternProperties":{', '"$ref":"', '"$dynamicRef":"', '"$recursiveRef":"')
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_workers = Workers("turntree.verify.arguments:answer")


class SchemaUnusable(Exception):
    """A declaration that cannot decide anything (no valid JSON schema, a reference that leads nowhere)."""


class ArgumentRules:
    """The declared schema of one tool's arguments. Raises `SchemaUnusable` when it is not a valid schema."""

    def __init__(self, schema: dict[str, Any]) -> None:
        try:
            kind: type[Validator] = validator_for(schema, default=jsonschema.Draft202012Validator)
            kind.check_schema(schema)
            self._resolver = _resolver(schema, kind)
        except jsonschema.SchemaError as error:
            raise SchemaUnusable(f"its parameters are not a JSON schema ({_one_line(error.message)})") from error
        except Unresolvable as error:
            raise SchemaUnusable(f"its parameters refer to {_one_line(error.ref)!r}, which leads nowhere") from error
        except Exception as error:  # an untrusted schema may raise anything in jsonschema (too deep, ...)
            raise SchemaUnusable(f"its parameters are not a JSON schema ({_one_line(repr(error))})") from error
        self._schema = schema
        self._validator = kind(schema, registry=Registry())  # an empty registry: nothing is ever fetched

    def problem(self, arguments: Any) -> str | None:
        """The first violation in one line, or None. Raises `SchemaUnusable`."""
        found = self._first_error(self._validator, arguments)
        if found is None:
            return None
        path = ".".join(map(str, found.absolute_path))
        return _one_line(f"{path}: {found.message}" if path else found.message)

    def normal(self, arguments: Any) -> Any:
        """The arguments with defaults filled in, and numbers by value: equal exactly for argument objects that mean the
        same call (valid ones)."""
        return self._normal(arguments, [self._schema])

    def _normal(self, value: Any, schemas: Sequence[Any]) -> Any:
        if isinstance(value, str):
            return value
        applied = [part for schema in schemas for part in self._applied(schema, value, depth=0)]
        if isinstance(value, dict):
            filled = _defaults(applied) | cast("dict[str, Any]", value)
            return {key: self._normal(item, _of_property(applied, key)) for key, item in filled.items()}
        if isinstance(value, list):
            items = cast("list[Any]", value)
            return [self._normal(item, _of_item(applied, i)) for i, item in enumerate(items)]
        return int(value) if isinstance(value, float) and value.is_integer() else value

    def _applied(self, schema: Any, value: Any, depth: int) -> Iterator[dict[str, Any]]:
        """The schema objects that describe `value`: itself, what it refers to, and the alternatives that fit."""
        if not isinstance(schema, dict):
            return
        if depth > 64:
            raise SchemaUnusable("its parameters refer to themselves")
        row = cast("dict[str, Any]", schema)
        yield row
        if "$ref" in row:
            try:
                target = self._resolver.lookup(row["$ref"]).contents
            except Unresolvable as error:  # from the root: it may be written for another base
                raise SchemaUnusable(f"its parameters refer to {row['$ref']!r}, which leads nowhere") from error
            yield from self._applied(target, value, depth + 1)
        for part in row.get("allOf", ()):
            yield from self._applied(part, value, depth + 1)
        for key in ("anyOf", "oneOf"):
            for part in row.get(key, ()):
                if self._first_error(self._validator.evolve(schema=part), value) is None:
                    yield from self._applied(part, value, depth + 1)
                    break

    @staticmethod
    def _first_error(validator: Validator, value: Any) -> jsonschema.ValidationError | None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return next(iter(validator.iter_errors(value)), None)
        except Exception as error:  # unresolvable references, regular expressions that do not compile
            raise SchemaUnusable(f"its parameters cannot be applied ({_one_line(str(error))})") from error


class BoundedRules:
    """`ArgumentRules` applied in another process, within `SECONDS` of its CPU time."""

    def __init__(self, schema_text: str) -> None:
        self._schema_text = schema_text
        self._ask("check", None)

    def problem(self, arguments: Any) -> str | None:
        return self._ask("problem", arguments)

    def normal(self, arguments: Any) -> Any:
        return self._ask("normal", arguments)

    def _ask(self, task: str, arguments: Any) -> Any:
        kind, value = _asked(task, self._schema_text, json.dumps(arguments))
        if kind == "unusable":
            raise SchemaUnusable(value)
        if kind == "invalid":
            raise ValueError(value)
        return value


@lru_cache(maxsize=4096)
def _asked(*question: str) -> tuple[str, Any]:
    found = _workers.ask(question, SECONDS)
    return ("unusable", f"its parameters cannot be applied within {SECONDS:g} s") if found is None else tuple(found)


def answer(question: list[str]) -> tuple[str, Any]:
    """In that process: ("value", what the rules say), ("unusable", why the schema decides nothing) or ("invalid", why
    the arguments cannot be written)."""
    task, schema_text, arguments = question
    try:
        rules, value = rules_here(schema_text), json.loads(arguments)
        if task == "problem":
            return "value", rules.problem(value)
        return "value", rules.normal(value) if task == "normal" else None
    except SchemaUnusable as error:
        return "unusable", str(error)
    except (ValueError, RecursionError) as error:
        return "invalid", str(error)


class Remembered(Generic[T]):
    """What was made of the last few objects (a state is judged once per sample). They are known by their identity, and
    are not changed in place."""

    def __init__(self, count: int = 512) -> None:
        self._count = count
        self._known: dict[int, tuple[object, T]] = {}

    def of(self, source: object, make: Callable[[], T]) -> T:
        known = self._known.get(id(source))
        if known is None or known[0] is not source:
            if len(self._known) >= self._count:
                self._known.clear()
            known = self._known[id(source)] = (source, make())  # kept alive with its id
        return known[1]


_by_declaration: Remembered[ArgumentRules | BoundedRules] = Remembered(4096)


def rules_of(parameters: Mapping[str, Any] | None) -> ArgumentRules | BoundedRules:
    """The rules of a tool's declared parameters (None: any object). Raises `SchemaUnusable`."""
    return _by_declaration.of(parameters, lambda: _rules(canonical_json(parameters or {"type": "object"})))


@lru_cache(maxsize=4096)
def _rules(schema_text: str) -> ArgumentRules | BoundedRules:
    bounded = any(word in schema_text for word in _ENDLESS)
    return BoundedRules(schema_text) if bounded else rules_here(schema_text)


@lru_cache(maxsize=256)
def rules_here(schema_text: str) -> ArgumentRules:
    """The rules that are applied in this process, without a time limit."""
    schema = json.loads(schema_text)
    if not isinstance(schema, dict):
        raise SchemaUnusable("its parameters are not an object")
    return ArgumentRules(cast("dict[str, Any]", schema))


def _resolver(schema: dict[str, Any], kind: type[Validator]) -> Any:
    """What finds the references of a schema. Raises `Unresolvable` where one leads out of it, or nowhere in it."""
    dialect: Any = kind.META_SCHEMA.get("$schema")
    root: Resource[Any] = specification_with(dialect, default=DRAFT202012).create_resource(schema)
    whole = Registry[Any]().resolver_with_root(root)
    left = [(root, whole)]
    while left:
        resource, resolver = left.pop()
        row: dict[str, Any] = resource.contents if isinstance(resource.contents, dict) else {}
        for reference in (row[name] for name in _REFERENCES if isinstance(row.get(name), str)):
            resolver.lookup(reference)
        left += [(part, resolver.in_subresource(part)) for part in resource.subresources()]
    return whole


def _defaults(applied: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        key: declared["default"]
        for schema in applied
        for key, declared in schema.get("properties", {}).items()
        if isinstance(declared, dict) and "default" in declared
    }


def _of_property(applied: Sequence[dict[str, Any]], key: str) -> list[Any]:
    return [
        schema["properties"][key] if key in schema.get("properties", {}) else schema.get("additionalProperties")
        for schema in applied
    ]


def _of_item(applied: Sequence[dict[str, Any]], index: int) -> list[Any]:
    found: list[Any] = []
    for schema in applied:
        items: Any = schema.get("items")
        first: Any = schema.get("prefixItems", items if isinstance(items, list) else [])
        found.append(first[index] if index < len(first) else items)
    return found


def _one_line(text: str, limit: int = 160) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
