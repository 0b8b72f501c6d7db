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

from turntree.core import seeds
from turntree.core.errors import InputError
from turntree.core.messages import ToolCall
from turntree.domains.workbench.packages import MEASURES, PACKAGES, THINGS, Package
from turntree.domains.workbench.tasks import Task, run, texts
from turntree.sandboxes.sandbox import Sandbox

_CHANGES = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "+": "-", "-": "+", "*": "+", "/": "*", "//": "/",
    "and": "or", "or": "and", "max": "min", "min": "max", "sorted": "list", "upper": "lower", "lower": "upper",
    "+=": "=", "append": "remove", "0": "1", "1": "0", "2": "3", "3": "2", "None": "0",
}  # fmt: skip
_TRIES = 40
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
        changed, edit = _with_bug(modules[path], rng)
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
        instruction=_issue(package, probes[shown], found[shown], due[shown]),
        files=texts({**whole, path: changed, f"test_{package.name}.py": tests}),
        gold=(
            ToolCall("bash", {"command": _TESTS}),
            ToolCall("view", {"path": path}),
            ToolCall("str_replace", {"path": path, "old": edit[0], "new": edit[1]}),
            ToolCall("submit", {}),
        ),
        values=((_ask(package, probes), repr(due)),),
    )


def _issue(package: Package, probe: str, found: str, due: str) -> str:
    return (
        f"The package {package.name} has a bug: `{package.name}.{probe}` gives {found} instead of {due}. Find it and "
        f"fix it in the package. The tests run with: {_TESTS.partition(' 2')[0]}"
    )


def _named(text: str, names: Mapping[str, str]) -> str:
    for mark, name in names.items():
        text = text.replace(mark, name)
    return text


def _with_bug(text: str, rng: random.Random) -> tuple[str, tuple[str, str]]:
    """The text with one token changed, and the edit (old, new) that repairs it."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    sites = [token for token in tokens if token.string in _CHANGES]
    site = rng.choice(sites)
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
