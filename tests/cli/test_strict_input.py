"""What is nothing ends as an error, what data name is not run, and what no code expected is one line."""

import json
import sys

import pytest
import torch

from completions_server import completion, serve
from turntree.cli import main as main_module
from turntree_worlds.household.entry import POLICY as EMBEDDED

ROW = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# nothing is no result


def test_an_import_that_keeps_nothing_is_an_error_with_its_reasons(turntree, tmp_path):
    source = write(tmp_path / "a.jsonl", {"messages": ROW["messages"][:1]}, {"messages": 3}, {"x": 1})
    out = tmp_path / "t.jsonl"
    message = turntree.error("traces", "import", source, "--on-error", "drop", "--out", out)
    assert "keeps none of 3 traces (" in message
    assert "1 no_assistant_turn" in message and "1 malformed_field" in message and "1 unknown_format" in message
    empty = write(tmp_path / "empty.jsonl")
    assert "keeps none of 0 traces" in turntree.error("traces", "import", empty, "--out", out)
    failed = write(tmp_path / "failed.jsonl", {**ROW, "success": False})
    assert "1 not_successful" in turntree.error("traces", "import", failed, "--success-only", "--out", out)
    assert not out.exists()


def test_a_split_that_leaves_nothing_to_train_on_is_an_error(turntree, tmp_path):
    source = write(tmp_path / "a.jsonl", ROW)
    message = turntree.error("traces", "import", source, "--dev", 0.999999, "--out", tmp_path / "t.jsonl")
    assert "leaves nothing to train on (1 in dev)" in message
    result = turntree.json("traces", "import", source, "--dev", 1, "--out", tmp_path / "t.jsonl")  # asked for
    assert result["splits"] == {"dev": 1}


@pytest.mark.parametrize(
    "command",
    [
        ("evaluate",),
        ("traces", "record", "--environment", "household", "--out", "t.jsonl"),
        ("traces", "gold", "--environment", "terminal", "--out", "t.jsonl"),
        ("traces", "household", "--games", "folder", "--out", "t.jsonl"),
        ("sft", "--traces", "t.jsonl", "--out", "run"),
        ("profile", "--traces", "t.jsonl", "--verifier", "strict", "--out", "p.jsonl"),
        ("verifier", "audit", "t.jsonl", "--verifier", "strict"),
    ],
    ids=lambda command: command[0],
)
def test_a_split_that_there_is_not_is_refused_with_those_that_there_are(turntree, command):
    message = turntree.error(*command, "--split", "tset")
    assert "'tset' is not one of 'train', 'dev', 'test'" in message


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_pretty_printed_json_is_read_whatever_the_file_is_called(turntree, tmp_path, name):
    for value in (ROW, [ROW]):
        (tmp_path / name).write_text(json.dumps(value, indent=2))
        result = turntree.json("traces", "import", tmp_path / name, "--dev", 0, "--out", tmp_path / "t.jsonl")
        assert result["traces_kept"] == 1


def test_an_item_that_says_nothing_of_itself_is_called_so(turntree, tmp_path):
    rows = [({}, "that is {}"), ([], "that is []"), ({"content": "x"}, "without type and role"), ({"type": "y"}, "'y'")]
    for item, said in rows:
        row = {"responses_create_params": {"input": "go"}, "response": {"output": [item]}}
        message = turntree.error("traces", "import", write(tmp_path / "a.jsonl", row), "--out", tmp_path / "t.jsonl")
        assert f"holds an item {said}" in message or f"of type {said}" in message


# profiles of nothing


def profiling(household, server, out, *more, tokenizer=EMBEDDED):
    return (
        *("profile", "--endpoint", server, "--tokenizer", tokenizer, "--traces", household / "traces.jsonl"),
        *("--model", "served", "--limit", 2, "--rollouts", 2, "--max-tokens", 24, "--out", out, *more),
    )


def test_a_token_of_another_vocabulary_is_an_error(turntree, household, tmp_path):
    with serve(lambda request: completion("x", token_ids=[999_999])) as server:
        message = turntree.error(*profiling(household, server.url, tmp_path / "p.jsonl"))
    assert "the server answers with token 999,999" in message and "--tokenizer" in message
    assert list(tmp_path.iterdir()) == []  # no profile, and no log that demands --overwrite


def test_a_profile_without_a_scored_rollout_is_an_error(turntree, household, tmp_path):
    with serve(lambda request: 400) as server:
        message = turntree.error(*profiling(household, server.url, tmp_path / "p.jsonl"))
    assert "no rollout has a reward (" in message and "4 " in message
    assert list(tmp_path.iterdir()) == []


# code named by data


def test_a_pivots_file_runs_no_code(turntree, household, tmp_path):
    """The module leaves a mark when it is imported; only --verifier may do that."""
    lines = (household / "pivots.jsonl").read_text().splitlines()
    header = {**json.loads(lines[0]), "verifier_source": "left_a_mark:accept"}
    (tmp_path / "pivots.jsonl").write_text("\n".join([json.dumps(header), *lines[1:]]) + "\n")
    (tmp_path / "left_a_mark.py").write_text("open('mark', 'w').close()\ndef accept(state, action): return 1.0\n")
    command = ("train", "pivot", "pivots.jsonl", "--traces", household / "traces.jsonl", "--out", "run", "--steps", 1)
    message = turntree.error(*command, cwd=tmp_path)
    assert "pass --verifier left_a_mark:accept" in message
    assert not (tmp_path / "mark").exists() and "left_a_mark" not in sys.modules
    turntree.error(*command, "--verifier", "left_a_mark:accept", cwd=tmp_path)  # runs it, and finds another verifier
    assert (tmp_path / "mark").exists()


def test_the_leniency_of_tool_call_is_asked_for_by_its_options(turntree, household, tmp_path):
    shape = ("rescore", household / "profile.jsonl", "--verifier", "tool_call", "--out", tmp_path / "p.jsonl")
    turntree(*shape, "--set", "verifier.messages=any")
    header = json.loads((tmp_path / "p.jsonl").read_text().splitlines()[0])
    assert header["verifier"] == "tool_call/1+messages=any"
    given = {"name": "tool_call", "messages": "any"}
    assert given.items() <= header["config"]["verifier"].items()
    assert "did you mean 'messages'?" in turntree.error(*shape, "--set", "verifier.mesages=any")
    assert "verifier.messages" in turntree.error(*shape, "--set", "verifier.messages=1")


# the last catch


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyError("lost"), 70, "turntree did not expect this (KeyError"),
        (RecursionError("deep\nand deeper"), 70, "please report it"),
        (MemoryError(), 70, "MemoryError"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), 2, "--set device.gradient_checkpoint"),
        (OSError(28, "No space left on device", "runs/a"), 2, "runs/a: No space left on device"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_whatever_is_raised_ends_in_one_line(turntree, monkeypatch, tmp_path, error, code, said):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(main_module.cli, "main", fail)
    done = turntree("select", tmp_path / "p.jsonl", code=code)
    assert said in done.stderr and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    monkeypatch.setenv(main_module.DEBUG, "1")
    assert ("Traceback" in turntree("select", code=code).stderr) == (code != 130)


@pytest.mark.parametrize(
    "setting",
    [
        *("weight_decay=-1", "weight_decay=1e999", "learning_rate=NaN", "max_grad_norm=Infinity", "eps=0.1"),
        "warmup_steps=" + "9" * 5000,
    ],
)
def test_an_impossible_optimizer_is_refused_before_anything_is_loaded(turntree, household, tmp_path, setting):
    key = setting.partition("=")[0]
    message = turntree.error(
        *("train", "pivot", household / "pivots.jsonl", "--out", tmp_path / "run"),
        *("--set", f"train.optimizer.{setting}"),
    )
    assert f"'train.optimizer.{key}" in message and len(message) < 600
    assert not (tmp_path / "run").exists()
