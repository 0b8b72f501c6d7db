"""The size of the house: `python tests/structure/house.py [--against CHECKOUT]` prints it, of one or two checkouts.

Lines are lines of files. Statements are those of the syntax tree, so that denser lines gain nothing. `test_budgets.py`
holds the library to what is measured here.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("turntree", "turntree_interop", "turntree_worlds")
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    path: Path
    package: str  # one of PACKAGES
    lines: int
    tree: ast.Module

    @property
    def nodes(self) -> Iterator[ast.AST]:
        return ast.walk(self.tree)

    @property
    def statements(self) -> int:
        return sum(isinstance(node, ast.stmt) and not docstring(node) for node in self.nodes)

    def spans(self, kind: type | object) -> list[tuple[int, str]]:
        """(lines, name) of every class, or of every function."""
        return [(node.end_lineno - node.lineno + 1, node.name) for node in self.nodes if isinstance(node, kind)]  # type: ignore[attr-defined, arg-type]


LIST_KEYS = """
import click, json
from turntree.cli.config import stage_commands
from turntree.cli.main import cli
from turntree.core.keys import keys
print(json.dumps({name: [key.name for key in keys(command.config_class)] for name, command in stage_commands(cli)}))
"""


def docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def modules(checkout: Path = REPOSITORY) -> list[Module]:
    result = []
    for package in PACKAGES:
        for path in sorted((checkout / "src" / package).rglob("*.py")):
            text = path.read_text()
            result.append(Module(path, package, text.count("\n"), ast.parse(text)))
    return result


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many a caller may give: of a method without `self` or `cls`."""
    arguments = function.args
    named = [item.arg for item in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return sum(name not in ("self", "cls") for name in named)


def optional_members(module: Module) -> int:
    """Contracts that no type says: `getattr(x, "name", default)` and `hasattr`."""
    return sum(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr")
        for node in module.nodes
    )


def keys(checkout: Path = REPOSITORY) -> dict[str, set[str]]:
    """The configuration keys of every command that has any, with the parts that it uses by default."""
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    done = subprocess.run([sys.executable, "-c", LIST_KEYS], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr)
    return {name: set(names) for name, names in json.loads(done.stdout).items()}


def entry_points(checkout: Path) -> tuple[int, int]:
    """(how many parts are registered, of how many kinds)."""
    groups = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]["entry-points"]
    return sum(len(group) for group in groups.values()), len(groups)


def table(checkout: Path) -> dict[str, str]:
    everything = modules(checkout)
    rows: dict[str, str] = {}
    for package in (*PACKAGES, "src"):
        of_package = [module for module in everything if package in ("src", module.package)]
        rows[f"{package}: lines"] = f"{sum(module.lines for module in of_package):,}"
        rows[f"{package}: statements"] = f"{sum(module.statements for module in of_package):,}"
        rows[f"{package}: files"] = f"{len(of_package):,}"
    longest = max(everything, key=lambda module: module.lines)
    rows["median file, lines"] = f"{statistics.median(module.lines for module in everything if module.lines):.0f}"
    rows["largest file"] = f"{longest.lines} {longest.path.relative_to(checkout / 'src')}"
    for word, kind in (("largest class", ast.ClassDef), ("longest function", FUNCTIONS)):
        lines, name = max(span for module in everything for span in module.spans(kind))
        rows[word] = f"{lines} {name}"
    functions = [node for module in everything for node in module.nodes if isinstance(node, FUNCTIONS)]
    many = [node for node in functions if parameters(node) > 8]
    rows["functions"] = f"{len(functions):,}"
    rows["functions of more than 8 parameters"] = f"{len(many)}"
    rows["getattr and hasattr"] = f"{sum(map(optional_members, everything))}"
    parts, kinds = entry_points(checkout)
    rows["entry points"] = f"{parts} of {kinds} kinds"
    stages = keys(checkout)
    online, pivot = stages.get("train online", set()), stages.get("train pivot", set())
    rows["keys of train online and train pivot together"] = f"{len(online | pivot)}"
    rows["keys of all commands, distinct"] = f"{len(set().union(*stages.values()))}"
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout, whose figures stand first")
    against = parser.parse_args().against
    now = table(REPOSITORY)
    before = table(against.resolve()) if against else {}
    print("| |" + (" before |" if against else "") + " now |\n|---|" + ("---|" if against else "") + "---|")
    for name, value in now.items():
        print(f"| {name} |" + (f" {before.get(name, '')} |" if against else "") + f" {value} |")


if __name__ == "__main__":
    main()
