"""The recipes of the papers: every step is a command that turntree takes, what is called stated is in the paper, and
the small form goes from the first step to the last."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import paper_rows
import pytest

from turntree.cli.main import main
from turntree.run.files import read_json

FOLDER = paper_rows.REPOSITORY / "recipes" / "papers"
RECIPES = sorted(str(path.relative_to(FOLDER).with_suffix("")) for path in FOLDER.glob("*/*.toml"))


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


runner = load(FOLDER / "run.py")


def test_there_is_a_recipe_for_each_paper() -> None:
    assert {name.partition("/")[0] for name in RECIPES} == {"pivotrl", "selective_rollout", "arpo"}


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_recipe_calls_stated_is_in_the_paper_and_what_it_chose_has_a_reason(name: str) -> None:
    recipe = runner.read(name)
    groups = [*recipe["settings"].values(), *recipe["step"]]
    stated = [(key, told) for group in groups for key, told in group.get("stated", {}).items()]
    chosen = [told for group in groups for kind in ("chosen", "tinker") for told in group.get(kind, {}).values()]
    assert len(stated) >= 5 and recipe["not_stated"]
    assert all(told["where"] and told["words"] for _, told in stated) and all(told["why"] for told in chosen)
    text = paper_rows.text(recipe["text"])
    assert not [(key, told["words"]) for key, told in stated if paper_rows.plain(told["words"]) not in text]


@pytest.mark.parametrize("form", ["full", "small", "tinker"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_dry_run_prints_every_command_and_turntree_would_take_it(name: str, form: str, tmp_path, capsys) -> None:
    words = {"full": [], "small": ["--small"], "tinker": ["--tinker", "--prices", "1", "2", "3"]}[form]
    runner.run([name, str(tmp_path / "none"), "--dry-run", *words])
    said = capsys.readouterr().out
    recipe = runner.read(name)
    steps = [told["name"] for told in recipe["step"] if form not in told.get("without", ())]
    assert all(f"\n# {step}" in said for step in steps) and all(what in said for what in recipe["not_stated"])
    assert ("machine" in said) == (form == "full") and not (tmp_path / "none").exists()
    assert ("by your prices" in said) == (form == "tinker")


@pytest.mark.parametrize("name", RECIPES)
def test_the_small_form_goes_from_the_first_step_to_the_last(name: str, tmp_path, monkeypatch) -> None:
    """In this process, because loading torch anew costs seconds a step."""

    def in_process(words: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
        told = io.StringIO()
        with contextlib.chdir(cwd), contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
            code = script(words) if words[1].endswith(".py") else command(words[3:])
        assert code in (0, 3), told.getvalue()[-2000:]
        return subprocess.CompletedProcess(words, code)

    monkeypatch.setattr(subprocess, "run", in_process)
    runner.run([name, str(tmp_path), "--small"])
    steps = list(runner.steps(runner.read(name), {"model": "m"}, runner.Form("small")))
    assert all((tmp_path / step.stage.result).exists() for step in steps)
    assert all(read_json(tmp_path / f"stages/{step.stage.name}.json")["finished"] for step in steps)


def command(words: list[str]) -> int:
    try:
        main(words)
    except SystemExit as stopped:
        return int(stopped.code or 0)
    return 0


def script(words: list[str]) -> int:
    before, sys.argv = sys.argv, words[1:]
    try:
        load(Path(words[1])).main()
    finally:
        sys.argv = before
    return 0


def test_a_recipe_that_lacks_a_file_says_which(tmp_path) -> None:
    for arguments, lacks in ([[], "traces"], [["traces=x"], "environment"], [["sauce=x"], "sauce"]):
        with pytest.raises(SystemExit) as stopped:
            runner.run(["pivotrl/qwen3-30b-a3b-thinking", str(tmp_path), *arguments])
        assert lacks in str(stopped.value)
    assert not os.listdir(tmp_path)
