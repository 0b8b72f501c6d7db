"""Foreign code is called behind one boundary: who catches whatever a call may raise asks `core.foreign` what it was."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src"
PACKAGES = [SOURCE / name for name in ("turntree", "turntree_interop", "turntree_worlds")]
RUNNER = PACKAGES[2] / "sandboxes" / "runner.py"  # runs in the box, without turntree
ASKS = {"reason_of", "described"}
WIDE = {"Exception", "BaseException"}
NOT_FOREIGN = {  # these call what we chose ourselves
    "cli/main.py main": "the end of every command: whatever comes this far is said in one line",
    "rollout/cluster/pool.py _serve": "our own thread: who waits for it is told",
    "rollout/cluster/worker.py _reply": "our own stage: who waits for it is told",
    "core/foreign.py described": "the text of an error",
    "openenv.py _actions": "the standard library's request",
    "tau2.py end": "tau2's own gold, whose look-ups may fail; faults of the machine are raised again",
    "engine/*": "engines are parts whose failure ends the run (docs/how-to/engine.md)",
    "trl.py _run": "our own thread: its health is what the trainer asks for",
    "env/container_shell.py _look": "our own thread: who waits for it is told",
    "env/tool_environment.py tool_schemas": "Transformers' reader of signatures",
    "gateway/*": "servers, whose requests are answered",
    "run/jsonl.py writing": "libraries that write files",
    "run/opening.py parquet_rows": "pyarrow",
    "render/*": "chat templates, packages of renderers; an episode has the boundary around them (rollout/live.py)",
    "report/browser.py token_texts": "the tokenizer's library",
    "env/tools/runtime.py work": "a thread, whose error is read by who waits for it",
    "stages/plan.py read_config": "Transformers' reader of config.json",
    "train/checkpoints.py restore": "torch and safetensors reading a checkpoint",
    "verify/arguments.py *": "jsonschema",
    "qa/symbolic_worker.py answer": "SymPy, in a process of its own",
}


@functools.cache
def handlers() -> list[tuple[str, ast.ExceptHandler]]:
    """Every handler of whatever a call may raise that does not raise it again, by file and function."""
    found: list[tuple[str, ast.ExceptHandler]] = []
    for package, path in ((folder, path) for folder in PACKAGES for path in sorted(folder.rglob("*.py"))):
        if path == RUNNER:
            continue
        waiting: list[tuple[ast.AST, str]] = [(ast.parse(path.read_text()), "module")]
        while waiting:
            node, function = waiting.pop()
            for child in ast.iter_child_nodes(node):
                inside = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
                waiting.append((child, inside))
                if isinstance(child, ast.ExceptHandler) and caught(child) & WIDE and not raises_again(child):
                    found.append((f"{path.relative_to(package)} {function}", child))
    return found


def caught(handler: ast.ExceptHandler) -> set[str]:
    if handler.type is None:
        return {"BaseException"}
    return {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}


def raises_again(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def asks(handler: ast.ExceptHandler) -> bool:
    called = {
        node.func.id for node in ast.walk(handler) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    return bool(called & ASKS) and "BaseException" in caught(handler)


def listed(place: str) -> str | None:
    names = [place, f"{place.partition('/')[0]}/*", f"{place.partition(' ')[0]} *"]
    return next((name for name in names if name in NOT_FOREIGN), None)


def test_whoever_catches_everything_that_foreign_code_may_raise_asks_the_one_boundary_what_it_was() -> None:
    """`except Exception` around it would let `sys.exit` and cancelled tasks pass, and keep the user's interrupt."""
    found = handlers()
    assert sum(asks(handler) for _, handler in found) > 30, "the boundary is in use"
    wrong = [f"{place}, line {handler.lineno}" for place, handler in found if not asks(handler) and not listed(place)]
    assert wrong == [], "catch BaseException and ask turntree.core.foreign.reason_of"


def test_every_place_that_is_listed_as_not_foreign_is_there() -> None:
    used = {listed(place) for place, handler in handlers() if not asks(handler)}
    assert set(NOT_FOREIGN) - used == set()


def test_only_two_modules_know_what_a_reward_or_a_flag_may_be() -> None:
    """`float(...)` of a foreign value takes texts, and `bool(...)` takes everything."""
    for name in ("gymnasium", "mcp", "openenv", "tau2", "verifiers", "adapted"):
        folder = PACKAGES[0] / "env" if name == "adapted" else PACKAGES[1]
        tree = ast.parse((folder / f"{name}.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("float", "bool"):
                assert not isinstance(node.args[0], ast.Attribute | ast.Subscript | ast.BoolOp), (name, node.lineno)
