"""The recipe that warms a pretrained policy up runs to its end, and does nothing twice."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from turntree.cli.main import cli
from turntree.observe.files import read_json
from turntree.traces.schema import read_traces

PATH = Path(__file__).resolve().parents[2] / "recipes" / "smollm2" / "warm_start.py"


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch):
    """The script, its commands run in this process; `ran` lists them."""
    spec = importlib.util.spec_from_file_location("warm_start", PATH)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "warm_start", module)
    spec.loader.exec_module(module)
    ran: list[str] = []

    def run(command: list[str]) -> SimpleNamespace:
        ran.append(command[3])
        cli.main(args=command[3:], standalone_mode=False)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(module.subprocess, "run", run)
    module.ran = ran
    return module


def test_a_smoke_run_reaches_its_end_and_the_same_command_again_computes_nothing(
    recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["warm_start.py", str(tmp_path), "--model", "household", "--smoke"])
    recipe.main()
    assert recipe.ran == ["traces", "sft", "evaluate", "profile", "evaluate"]
    found = read_json(tmp_path / "warm_start.json")
    assert found["candidates"] == 3 and 0 <= found["mixed"] <= 3
    assert [one["traces"] for one in found["tried"]] == [2]
    shown = {trace.id for trace in read_traces(tmp_path / "traces-2.jsonl")}
    rest = {trace.id for trace in read_traces(tmp_path / "rest.jsonl")}
    assert len(shown) == 2 and rest and not shown & rest  # the arms get what the start has not seen
    recipe.ran.clear()
    recipe.main()
    assert recipe.ran == []


def test_a_start_that_solves_too_little_sees_more_traces(recipe, tmp_path: Path) -> None:
    sizes = recipe.SMOKE
    (tmp_path / "traces.jsonl").touch()
    recipe.stage = lambda done, *command: None
    recipe.read_traces = lambda path: ()
    solved = {2: 0.1, 4: 0.2}
    recipe.read_json = lambda path: {
        "sampled": {"success": solved[int(path.name[5])], "low": 0.0, "high": 1.0, "episodes": 2}
    }
    tried = recipe.warm_starts(tmp_path, "model", sizes, 2e-4, 0.15)
    assert [one["traces"] for one in tried] == [2, 4]
    solved[2] = 0.3
    assert [one["traces"] for one in recipe.warm_starts(tmp_path, "model", sizes, 2e-4, 0.15)] == [2]
