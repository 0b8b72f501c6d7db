"""`turntree check environment`: a law that is broken ends in exit code 1 and is named with task and turn."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from family_tokenizers import with_tokens_of
from tiny_models import tiny_tokenizer
from turntree.cli.main import main

ENVIRONMENTS = """
import threading

from turntree.core.messages import Message
from turntree.core.protocols import Observation


class Echo:
    def __init__(self, task_id, times):
        self.task_id, self.left = task_id, times

    def reset(self):
        return (Message("user", "say something"),)

    def step(self, action):
        self.left -= 1
        return Observation((Message("user", action.content),), done=self.left == 0, success=self.left == 0 or None)


class Raises(Echo):
    def step(self, action):
        if "0" in action.content:
            raise KeyError("a zero")
        return super().step(action)


class Toolless(Echo):
    def fork(self):
        return type(self)(self.task_id, self.left)


class Locked(Toolless):
    tools = ()

    def __init__(self, task_id, times):
        super().__init__(task_id, times)
        self.lock = threading.Lock()


def made(kind, split, count, times=3):
    return [kind(f"{split}-{index}", times) for index in range(count)]


def good(split, count, *, seed, times: int = 3):
    print("this is no result")
    return made(Echo, split, count, times)


def bad(split, count, *, seed):
    return made(Raises, split, count, 30)


def toolless(split, count, *, seed):
    return made(Toolless, split, count)


def locked(split, count, *, seed):
    return made(Locked, split, count)


def offline(split, count, *, seed):
    raise ConnectionError("gone")
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checked_environments.py").write_text(ENVIRONMENTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "checked_environments", raising=False)


def check(*arguments: str) -> int:
    try:
        main(["check", "environment", *arguments])
    except SystemExit as stopped:
        return int(stopped.code or 0)
    return 0


def test_an_environment_that_keeps_the_laws_passes(capsys: pytest.CaptureFixture[str]) -> None:
    for options in (("--set", "environment.times=2"), ("--times", "2")):
        assert check("checked_environments:good", *options, "--split", "dev") == 0
        assert capsys.readouterr().out == "every law holds in 3 tasks of split 'dev', up to 8 turns each\n"


def test_what_parts_and_libraries_print_is_no_result(capsys: pytest.CaptureFixture[str]) -> None:
    """Ray prints a note of every lost node, from a thread of its own."""
    assert check("checked_environments:good", "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["tasks"] == ["train-0", "train-1", "train-2"]
    before = sys.stdout
    assert check("checked_environments:good", "--json", "-", "--nothing-of-this-name") == 2
    assert sys.stdout is before


def test_a_broken_law_is_named_with_task_turn_and_action(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("checked_environments:bad", "--count", "2", "--turns", "30") == 1
    out = capsys.readouterr().out
    assert "VIOLATED: an action that a policy may sample is answered [train-0, turn " in out
    assert ": KeyError: 'a zero' for {" in out
    assert out.endswith("laws broken in 2 tasks of split 'train', up to 30 turns each\n")


def test_a_system_error_in_a_part_of_the_users_is_told_with_its_file_and_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert check("checked_environments:offline") == 2
    assert re.search(r"checked_environments\.py:\d+: offline raised ConnectionError: gone", capsys.readouterr().err)


def test_what_only_costs_something_is_a_note_said_once_and_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("checked_environments:locked", "--json", "-") == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert result["violations"] == []
    assert [(note["law"], note["times"]) for note in result["notes"]] == [("a task can be sent to a worker process", 3)]
    assert shown.err.count("it is stepped in this process only (3 times)") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("checked_environments:nothing",), "has no 'nothing'"),
        (("checked_environments:good", "--set", "environment.time=2"), "did you mean 'times'"),
        (("checked_environments:good", "--time", "2"), "there is no option --time; did you mean 'times'"),
        (("checked_environments:toolless",), "gave Toolless, which has no tools"),
        (("nowhere",), "there is no environment 'nowhere'"),
        (("pivots",), "field 'environment': names no environment; write pivots:FILE"),
        (("gateway:python agent.py",), "field 'environment': is an agent that plays by itself"),
    ],
)
def test_what_cannot_be_checked_ends_in_one_line(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(*arguments) == 2
    assert said in capsys.readouterr().err


def test_a_model_says_which_renderer_serves_it_and_what_would_be_refused(turntree, tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    shown = turntree("check", "model", tmp_path).stdout
    assert "template: no family of the package `renderers` has these special tokens" in shown
    assert "»Go left.<|end|>«" in shown, "what the policy says itself"
    found = turntree.json("check", "model", tmp_path)
    refused = {row["case"]: row["said"] for row in found["findings"] if not row["works"]}
    assert refused["loop of three turns"].startswith("field 'tools': the chat template leaves out the tools")
    assert "talk of three turns" not in refused and "one call" not in refused


def test_a_family_is_named_by_hand_and_a_wrong_one_ends_in_one_line(turntree, tmp_path):
    pytest.importorskip("renderers", reason="needs the extra turntree[renderers]", exc_type=ImportError)
    with_tokens_of("glm-4.5").save_pretrained(tmp_path)
    found = turntree.json("check", "model", tmp_path, "--renderer", "family:glm-4.5")
    assert all(row["works"] for row in found["findings"])
    error = turntree.error("check", "model", tmp_path, "--renderer", "family:qwen3")
    assert "the tokenizer cannot be that of qwen3" in error
