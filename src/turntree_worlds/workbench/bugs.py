"""Generated repository tasks: a small package with one changed token, tests of which one fails, and hidden probes.

What the probes give is taken from the package as it was. The judgement asks the repository for the same values in the
sandbox and compares them outside, so that no code of a policy sees what is expected: tests that are deleted, or a
package that ends the interpreter, earn nothing.
"""

from __future__ import annotations

import ast
import io
import random
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from turntree.core import seeds
from turntree.core.errors import InputError
from turntree.core.messages import ToolCall
from turntree_worlds.sandboxes.sandbox import Sandbox
from turntree_worlds.workbench.tasks import Task, run, texts

_CHANGES = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "+": "-", "-": "+", "*": "+", "/": "*", "//": "/",
    "and": "or", "or": "and", "max": "min", "min": "max", "sorted": "list", "upper": "lower", "lower": "upper",
    "+=": "=", "append": "remove", "0": "1", "1": "0", "2": "3", "3": "2", "None": "0",
}  # fmt: skip
_TRIES = 40
_PLACES, _OWN = 5, {"train": (0, 2, 4), "dev": (3,), "test": (1,)}  # no split has a bug of another one
_TESTS = "python3 -m unittest 2>&1 | tail -n 20"
_ASK = """import sys
sys.path.insert(0, "/tmp")
def asked(expression):
    import importlib
    try:
        module = importlib.import_module("{package}." + expression.partition(".")[0])
        return repr(eval(expression.partition(".")[2], vars(module)))
    except Exception as error:
        return type(error).__name__
[asked(expression) for expression in {probes!r}]"""


def generated(split: str, number: int, sandbox: Sandbox) -> Task:
    """Task `number` of a split. The packages alternate; their names for things, and the bug, are drawn."""
    package = PACKAGES[number % len(PACKAGES)]
    rng = seeds.generator(0, "swe", split, str(number))
    names = {"@": rng.choice(THINGS), "#": rng.choice(MEASURES)}
    modules = {f"{package.name}/{name}.py": _named(text, names) for name, text in package.modules.items()}
    probes = [_named(probe, names) for probe in package.probes]
    whole = {f"{package.name}/__init__.py": "", **modules}
    due = _values(sandbox, package, whole, probes)
    for _ in range(_TRIES):
        path = rng.choice(sorted(modules))
        changed, edit = _with_bug(modules[path], rng, _OWN[split])
        found = _values(sandbox, package, {**whole, path: changed}, probes)
        wrong = [place for place, (one, other) in enumerate(zip(due, found, strict=True)) if one != other]
        if len(wrong) >= 2:
            break
    else:
        raise InputError(f"no change of one token shows in two probes of {package.name!r}", field="tasks")
    shown = rng.choice(wrong)
    visible = sorted({shown, *rng.sample(range(len(probes)), 4)})
    tests = _tests(package, [probes[place] for place in visible], [due[place] for place in visible])
    return Task(
        id=f"swe-{split}-{number}",
        kind=package.name,
        instruction=(
            f"The package {package.name} has a bug: `{package.name}.{probes[shown]}` gives {found[shown]} instead of "
            f"{due[shown]}. Find it and fix it in the package. The tests run with: {_TESTS.partition(' 2')[0]}"
        ),
        files=texts({**whole, path: changed, f"test_{package.name}.py": tests}),
        gold=(
            ToolCall("bash", {"command": _TESTS}),
            ToolCall("view", {"path": path}),
            ToolCall("str_replace", {"path": path, "old": edit[0], "new": edit[1]}),
            ToolCall("submit", {}),
        ),
        values=((_ask(package, probes), repr(due)),),
    )


def _named(text: str, names: Mapping[str, str]) -> str:
    for mark, name in names.items():
        text = text.replace(mark, name)
    return text


def _with_bug(text: str, rng: random.Random, own: Sequence[int]) -> tuple[str, tuple[str, str]]:
    """The text with one token changed, of those whose places belong to the split, and the edit (old, new) that repairs
    it."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    sites = [token for token in tokens if token.string in _CHANGES]
    site = rng.choice([token for place, token in enumerate(sites) if place % _PLACES in own])
    lines = text.splitlines(keepends=True)
    row, (start, end) = site.start[0] - 1, (site.start[1], site.end[1])
    whole = lines[row]
    lines[row] = whole[:start] + _CHANGES[site.string] + whole[end:]
    changed = "".join(lines)
    old, new, first = lines[row], whole, row
    while changed.count(old) > 1:  # the edit has to say which of equal lines it means
        first -= 1
        old, new = lines[first] + old, lines[first] + new
    return changed, (old, new)


def _values(sandbox: Sandbox, package: Package, files: Mapping[str, str], probes: Sequence[str]) -> list[str]:
    value = run(sandbox, _ask(package, probes), texts(files), "python").value
    return ast.literal_eval(value) if value is not None else ["(none)"] * len(probes)


def _ask(package: Package, probes: Sequence[str]) -> str:
    return _ASK.format(package=package.name, probes=list(probes))


def _tests(package: Package, probes: Sequence[str], due: Sequence[str]) -> str:
    """Visible tests of some of the probes."""
    cases = "".join(
        f"\n    def test_{number}(self):\n        self.assertEqual({probe}, {value})\n"
        for number, (probe, value) in enumerate(zip(probes, due, strict=True), start=1)
    )
    imports = f"import unittest\n\nfrom {package.name} import {', '.join(sorted(package.modules))}\n"
    return f"{imports}\n\nclass Tests(unittest.TestCase):{cases}"


# Small Python packages to put bugs into: `@` stands for a thing and `#` for a measure, whose names vary. Every package
# has modules, and probes: expressions whose values its tests compare. Nothing in it loops without end, whichever
# operator is changed.

THINGS = ("item", "parcel", "ticket", "sensor", "book", "order", "plant", "sample", "route", "player")
MEASURES = ("weight", "price", "score", "size", "age", "length", "depth", "level")


@dataclass(frozen=True)
class Package:
    name: str
    modules: Mapping[str, str]
    probes: tuple[str, ...]


STOCK = Package(
    "stock",
    {
        "ledger": '''\
def total(@s):
    """The # of all @s together."""
    result = 0
    for @ in @s:
        result += @["#"] * @.get("count", 1)
    return result


def heaviest(@s):
    """The name of the @ with the highest #; None without @s."""
    best = None
    for @ in @s:
        if best is None or @["#"] > best["#"]:
            best = @
    return best["name"] if best else None
''',
        "limits": '''\
from stock.ledger import total


def fits(@s, most):
    """Whether all @s together stay within `most`, which is still allowed."""
    return total(@s) <= most


def split(@s, most):
    """The @s that fit one by one from the first on, and the rest."""
    taken, used = [], 0
    for number, @ in enumerate(@s):
        used += @["#"]
        if used > most:
            return taken, @s[number:]
        taken.append(@)
    return taken, []
''',
    },
    (
        "ledger.total([{'name': 'a', '#': 3}, {'name': 'b', '#': 4, 'count': 2}])",
        "ledger.total([{'name': 'c', '#': 5, 'count': 3}])",
        "ledger.total([])",
        "ledger.heaviest([{'name': 'a', '#': 3}, {'name': 'b', '#': 9}, {'name': 'c', '#': 9}])",
        "ledger.heaviest([{'name': 'a', '#': 7}, {'name': 'b', '#': 2}])",
        "ledger.heaviest([])",
        "limits.fits([{'name': 'a', '#': 3}, {'name': 'b', '#': 4}], 7)",
        "limits.fits([{'name': 'a', '#': 3}, {'name': 'b', '#': 5}], 7)",
        "limits.fits([], 0)",
        "limits.split([{'name': 'a', '#': 3}, {'name': 'b', '#': 4}, {'name': 'c', '#': 1}], 7)",
        "limits.split([{'name': 'a', '#': 2}, {'name': 'b', '#': 2}], 10)",
        "limits.split([{'name': 'a', '#': 6}], 5)",
    ),
)

NAMES = Package(
    "names",
    {
        "cases": '''\
def slug(@):
    """The name of a @ in small letters, with one - between words."""
    words = [word for word in "".join(c if c.isalnum() else " " for c in @).split() if word]
    return "-".join(word.lower() for word in words)


def initials(@):
    """The first letters of the words of a @, at most three, in capitals."""
    return "".join(word[0].upper() for word in @.split()[:3])
''',
        "tables": '''\
from names.cases import slug


def index(@s):
    """The places of all @s by their slugs, from 1 on."""
    result = {}
    for place, @ in enumerate(@s, start=1):
        result.setdefault(slug(@), []).append(place)
    return result


def column(@s, width):
    """The @s, one a line, padded to `width`; longer ones are cut and end in a dot."""
    lines = []
    for @ in @s:
        if len(@) > width:
            lines.append(@[: width - 1] + ".")
        else:
            lines.append(@ + " " * (width - len(@)))
    return lines
''',
    },
    (
        "cases.slug('Red  Apple_Pie')",
        "cases.slug('A-B c')",
        "cases.slug('  ')",
        "cases.initials('red apple pie tart')",
        "cases.initials('one two')",
        "cases.initials('x')",
        "tables.index(['Red one', 'blue', 'red ONE'])",
        "tables.index(['x'])",
        "tables.index([])",
        "tables.column(['abc', 'abcdef', 'abcd'], 4)",
        "tables.column(['ab'], 3)",
        "tables.column(['abcdefgh', ''], 5)",
    ),
)

PACKAGES = (STOCK, NAMES)
