"""Bounds on what a chat template may compute: jinja's sandbox keeps it from files and names, not from looping or
from texts without end.

Transformers renders templates in an environment of jinja's, in whose place stands `Bounded` here. Every round of a
loop, call and filter is a step, long values cost more, and whatever could make a value much longer than those that it
is made of (`*`, `**`, `%`, `~`, `replace`, `center`, ...) is looked at before it is computed.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, cast

from jinja2 import Template, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from turntree.core.errors import InputError

MOST_STEPS = 2_000_000  # of one render: some seconds; a template takes some hundred a message
LONGEST = 2**26  # characters of a value: contexts have a hundredth of it
_ITEM = 128  # characters that an item of a list counts as: it takes as much memory, and time to look at
_SECONDS = 60.0  # of one render, should its steps be slow ones
_KEEP_SHAPE = {
    *("length", "count", "first", "last", "list", "map", "select", "reject", "selectattr", "rejectattr", "sort"),
    *("unique", "reverse", "groupby", "items", "dictsort", "min", "max", "default", "d", "attr", "abs", "int", "float"),
}  # filters that write nothing out
_PER_ITEM = {
    *("indent", "expandtabs", "tojson", "urlize", "batch", "slice", "translate", "xmlattr", "wordwrap", "join"),
    *("format", "format_map"),
}  # methods and filters that may add something to every item
_left: ContextVar[list[float] | None] = ContextVar("left", default=None)  # steps, and when time is over


class TemplateLoops(InputError):
    """A chat template that does not end, or takes too many steps."""


def _loops(problem: str) -> TemplateLoops:
    return TemplateLoops(problem, field="chat_template", hint="remove the loop from the template")


@functools.cache
def bound_templates() -> None:
    """Let Transformers render chat templates within these bounds, in the whole process."""
    from transformers.utils import chat_template_utils

    setattr(chat_template_utils, "ImmutableSandboxedEnvironment", Bounded)  # noqa: B010 (it exports the name from jinja)


def _spend(steps: float) -> None:
    left = _left.get()
    if left is None:
        return
    left[0] -= steps
    if left[0] < 0:
        raise _loops(f"does not end within {MOST_STEPS:,} steps")
    if time.monotonic() > left[1]:
        raise _loops(f"does not end within {_SECONDS:g} seconds")


def _size(value: Any) -> int:
    """Characters, those of parts that occur twice counted twice; `LONGEST` stands for more."""
    found, rest = 0, [value]
    while rest and found < LONGEST:
        each = rest.pop()
        found += _length(each)
        if isinstance(each, dict):
            rest += [*each, *each.values()]
        elif isinstance(each, list | tuple):
            rest += each
    return min(found, LONGEST)


def _length(value: Any) -> int:
    """`_size` without what is inside of its items."""
    if isinstance(value, str | bytes):
        return len(value)
    return _ITEM * len(value) if hasattr(value, "__len__") else 1


def _allow(size: float) -> None:
    if size >= LONGEST:
        raise _loops(f"makes a value of more than {LONGEST:,} characters")
    _spend(1 + size // 1000)


def _grown(name: str, value: Any, others: Sequence[Any]) -> float:
    """How long the result of a filter or a method of a text may be."""
    numbers = [abs(one) for one in others if type(one) is int]
    sizes = [_size(one) for one in others if type(one) is not int]
    if name == "replace" and len(others) > 1:
        return _size(value) + str(value).count(str(others[0])) * _size(others[1])
    if name in _PER_ITEM:
        texts = name.startswith("format") and isinstance(value, str)
        widths = [int(width) for width in re.findall(r"\d{1,18}", value)] if texts else []
        places = value.count("{") + value.count("%") if texts else _size(value)
        return _size(value) + max(places, 1) * max((*numbers, *sizes, *widths, 1))
    return _size(value) + sum(numbers) + sum(sizes)


class _BoundedTemplate(Template):
    def render(self, *args: Any, **kwargs: Any) -> str:
        token = _left.set([MOST_STEPS, time.monotonic() + _SECONDS])
        try:
            return super().render(*args, **kwargs)
        finally:
            _left.reset(token)


class _Filters(dict[str, Callable[..., Any]]):
    """Filters that look at what they are given."""

    def __setitem__(self, name: str, filter: Callable[..., Any]) -> None:
        first = int(hasattr(filter, "jinja_pass_arg"))  # a context or an environment comes before the value

        @functools.wraps(filter)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            value, *others = args[first:]
            if hasattr(value, "__next__"):  # what comes of another filter
                value = list(value)
                args = *args[:first], value, *others
            if name in _KEEP_SHAPE:
                _spend(1 + _length(value) // 1000)
            else:
                _allow(_grown(name, value, [*others, *kwargs.values()]))
            return filter(*args, **kwargs)

        super().__setitem__(name, bounded)


class _Counted(NodeTransformer):
    """Puts a step into every round of a loop, and a look before what `~` joins."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        step = nodes.EnvironmentAttribute("counted", lineno=node.lineno, environment=node.environment)
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno, environment=node.environment))
        if node.test is not None:
            node.test = nodes.And(step, node.test, lineno=node.lineno, environment=node.environment)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        place: dict[str, Any] = {"lineno": node.lineno, "environment": node.environment}
        return nodes.Call(nodes.EnvironmentAttribute("joined", **place), node.nodes, [], None, None, **place)


class Bounded(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "%", "+"})
    template_class = _BoundedTemplate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        del self.globals["lipsum"]  # it makes texts of any length
        plain, self.filters = self.filters, _Filters()
        for name, filter in plain.items():
            self.filters[name] = filter
        self.finalize = self._written

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Counted().visit(super()._parse(source, name, filename))

    def _written(self, value: Any) -> Any:
        _allow(0 if isinstance(value, str) else _size(value))
        return value

    @property
    def counted(self) -> bool:
        _spend(1)
        return True

    def joined(self, *values: Any) -> str:
        _allow(sum(map(_size, values)))
        return "".join(map(str, values))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):  # in bits
            _allow(left.bit_length() * (abs(right) if operator == "**" else 1) + right.bit_length())
        elif operator == "%":
            _allow(_grown("format", left, right if isinstance(right, tuple) else [right]))
        elif operator == "*":
            lengths = [max(0, side) if isinstance(side, int) else _length(side) for side in (left, right)]
            _allow(lengths[0] * lengths[1])
        else:
            _allow(_length(left) + _length(right))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)

        def bounded(*args: Any, **kwargs: Any) -> str:
            _allow(_grown("format", value.__self__, [*args, *kwargs.values()]))
            return cast("Callable[..., str]", wrapped)(*args, **kwargs)

        return None if wrapped is None else bounded

    def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        owner = getattr(called, "__self__", None)
        if isinstance(owner, str | bytes | int) and called.__name__ not in ("split", "strip"):
            _allow(_grown(called.__name__, owner, [*args, *kwargs.values()]))
        _spend(5)
        return super().call(context, called, *args, **kwargs)
