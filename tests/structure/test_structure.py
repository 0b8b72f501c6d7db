"""The shape of the code: floors, free imports, bounded files and functions."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = sorted((REPOSITORY / "src").rglob("*.py"))
LIBRARY = [path for path in SOURCES if path.is_relative_to(REPOSITORY / "src" / "turntree")]
LIGHT = (
    "core",
    "run",
    "verify.tool_call",
    "credit.credit",
)
LIGHT += ("traces.chat", "rollout.local", "rollout.live", "pivots.profile", "report.html")
LIGHT += ("rollout.scheduler", "env.processes", "decide.gates.calibrate", "logs.read")
LIGHT += ("audit.audit", "cli.main", "core.keys", "train.config", "stages.config", "experiments.config")


def test_the_floors_hold():
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([str(lint)], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_light_packages_load_no_heavy_ones():
    """import-linter cannot see an import in a package's `__init__`; a fresh interpreter can."""
    imports = "; ".join(f"import turntree.{name}" for name in LIGHT) + "; import turntree_worlds.household.environment"
    code = f"import sys; {imports}; print([m for m in ('torch', 'transformers', 'ray', 'vllm') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_the_maths_of_the_loss_knows_nothing_of_who_plays_and_decides():
    """Pure functions of tensors load the tree, its labels, credit and packing, and no more of the library."""
    code = "import sys, turntree.train.losses; print(*sorted(m for m in sys.modules if m.startswith('turntree.')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert len(loaded) <= 22, loaded
    assert {name.split(".")[1] for name in loaded} == {"core", "credit", "pack", "train"}, loaded


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_no_file_and_no_function_grows_beyond_its_cap(path):
    text = path.read_text()
    assert text.count("\n") <= 600
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno <= 80, f"{node.name} at line {node.lineno}"


def test_nothing_pickles_to_disk_and_nothing_trusts_remote_code():
    """Only the worker pool pickles, and only through the pipe to a worker of its own."""
    for path in SOURCES:
        text = path.read_text()
        assert not re.search(r"pickle\.(dump|load|Pickler|Unpickler)\b", text), path
        assert path.parent.name == "env" or "import pickle" not in text, path
        assert "trust_remote_code=True" not in text, path
        assert "torch.load" not in text, path


def test_nothing_of_the_library_but_the_experiments_names_a_world():
    """A contract forbids to import a world; a name of one would tie the library to it in the same way."""
    worlds = {"household", "qa", "workbench"}
    assert worlds <= {path.name for path in (REPOSITORY / "src" / "turntree_worlds").iterdir() if path.is_dir()}
    for path in LIBRARY:
        if path.relative_to(REPOSITORY / "src" / "turntree").parts[0] != "experiments":
            constants = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
            assert not constants & worlds, path


@pytest.mark.parametrize("name", ["pyproject.toml", "Makefile", ".ci/run"])
def test_files_that_the_tools_are_told_of_exist(name):
    text = (REPOSITORY / name).read_text()
    named = re.findall(r"\b((?:src|tests|benchmarks|recipes|studies)/[\w/.-]+)(?:::(\w+))?", text)
    files = {path: (REPOSITORY / path) for path, _ in named}
    assert [path for path, file in files.items() if not file.exists()] == []
    assert [test for path, test in named if test and f"def {test}(" not in files[path].read_text()] == []
