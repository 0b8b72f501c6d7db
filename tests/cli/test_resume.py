"""The same command again: what goes on, what is refused and in which words."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from turntree.stages.local import LocalPolicy
from turntree.train import trainer

PIVOT = ("--steps", 4, "--max-tokens", 24, "--set", "train.groups=4", "--set", "train.group_size=4",
    "--set", "check.tasks=3", "--set", "check.max_turns=4",
)  # fmt: skip
OFTEN = ("--set", "checkpoints.every=2")


@pytest.fixture(scope="module")
def train(turntree, household):
    def command(out, *more, run=turntree):
        return run("train", "pivot", household / "pivots.jsonl", "--out", out, *PIVOT, *OFTEN, *more)

    return command


@pytest.fixture(scope="module")
def left_over(train, turntree, tmp_path_factory):
    """A run that came to its last step and no further (how a dead process leaves it: tests/train/test_restart)."""
    run = tmp_path_factory.mktemp("left") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalPolicy, "save", interrupt)
        assert "interrupted" in train(run, run=lambda *a: turntree(*a, code=130)).stderr
    return run


@pytest.fixture
def interrupted(left_over, tmp_path):
    return shutil.copytree(left_over, tmp_path / "run")


def interrupt(*_):
    raise KeyboardInterrupt


def weights(run):
    return (run / "model" / "model.safetensors").read_bytes()


def metrics(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "timing"} for row in rows]


def test_an_interrupted_run_goes_on_and_says_so(train, interrupted, tmp_path) -> None:
    assert not (interrupted / "model").exists()
    assert f"{interrupted} resumes after step 4" in train(interrupted).stderr
    assert not (interrupted / "checkpoints").exists()
    train(tmp_path / "whole")
    assert weights(interrupted) == weights(tmp_path / "whole")
    assert metrics(interrupted) == metrics(tmp_path / "whole")


def test_sigterm_is_an_interrupt_also_where_it_comes_twice(train, tmp_path) -> None:
    """A cluster sends it before it kills, and GNU `timeout` to the process and to its group."""
    run, often = tmp_path / "run", ("--set", "checkpoints.every=1")
    code = "import sys; from turntree.cli.main import main; main(sys.argv[1:])"
    line = [sys.executable, "-c", code, *train(run, *often, run=lambda *words: map(str, words))]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as started:
        while started.poll() is None and not list(run.glob("checkpoints/step-*")):
            time.sleep(0.01)
        started.send_signal(signal.SIGTERM)
        started.send_signal(signal.SIGTERM)
        said = started.communicate()[1]
    assert started.returncode == 128 + signal.SIGTERM, said
    assert said.splitlines()[-1].startswith("turntree: interrupted; finished files are complete; ")
    assert "Traceback" not in said and not (run / "cost.json").exists()
    assert f"{run} resumes after step" in train(run, *often).stderr


def test_fine_tuning_goes_on_too(monkeypatch, turntree, household, tmp_path) -> None:
    command = ("sft", "--traces", household / "traces.jsonl", "--set", "sft.batch=4", *OFTEN, "--set", "check.tasks=2",
        "--set", "check.max_turns=3", "--set", "check.max_tokens=24", "--out")  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(LocalPolicy, "save", interrupt)
        turntree(*command, tmp_path / "run", code=130)
    assert "resumes after step" in turntree(*command, tmp_path / "run").stderr
    turntree(*command, tmp_path / "whole")
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


def test_a_run_of_other_settings_is_refused_by_the_name_of_the_setting(turntree, train, interrupted) -> None:
    message = train(interrupted, "--set", "train.loss.kl_coefficient=0.5", run=turntree.error)
    assert "differs in train.loss.kl_coefficient (0.02, not 0.5)" in message and "--overwrite" in message
    message = turntree.error("sft", "--traces", "x", "--out", interrupted)  # its input is looked at first
    assert "x: " in message


def test_other_contents_under_the_same_name_are_refused(turntree, household, interrupted, tmp_path, train) -> None:
    path = household / "pivots.jsonl"
    before = path.read_text()
    *kept, last = before.splitlines()
    row = json.loads(last)
    path.write_text("\n".join([*kept, json.dumps({**row, "kind": "another"})]) + "\n")
    try:
        assert "inputs.pivots_hash" in train(interrupted, run=turntree.error)
    finally:
        path.write_text(before)


def test_how_often_to_save_may_change(train, interrupted) -> None:
    train(interrupted, "--set", "checkpoints.every=1")
    assert (interrupted / "cost.json").exists()


def test_a_finished_run_is_left_alone_unless_told_otherwise(turntree, train, tmp_path) -> None:
    run = tmp_path / "run"
    train(run)
    first = weights(run)
    assert "finished; pass --overwrite" in train(run, run=turntree.error)
    assert weights(run) == first
    train(run, "--overwrite", "--seed", 1)
    assert weights(run) != first
    assert json.loads((run / "config.json").read_text())["config"]["train"]["seed"] == 1


def test_overwriting_starts_anew_and_does_not_go_on(train, interrupted) -> None:
    assert "resumes" not in train(interrupted, "--overwrite").stderr
    steps = [json.loads(line)["step"] for line in (interrupted / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2, 3, 4]


def test_a_folder_of_something_else_is_never_taken(turntree, train, tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "model").mkdir()
    for more in ((), ("--overwrite",)):
        assert "is not the folder of a training run" in train(tmp_path, *more, run=turntree.error)
    assert (tmp_path / "model").exists()


def test_two_processes_do_not_share_a_folder(turntree, train, interrupted) -> None:
    descriptor = os.open(interrupted, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        assert "in use by another process" in train(interrupted, run=turntree.error)
    finally:
        os.close(descriptor)


def test_the_kl_is_reported_where_there_is_one_however_it_was_set(train, tmp_path) -> None:
    off = train(tmp_path / "off", "--set", "train.loss.kl_coefficient=0")
    assert "KL not measured" in off.stdout
    on = train(tmp_path / "on", "--kl", 0, "--set", "train.loss.kl_coefficient=0.1")
    assert "KL not measured" not in on.stdout


def test_a_reference_is_held_only_where_the_kl_is_measured(monkeypatch, train, tmp_path) -> None:
    """It may be as large as the policy."""
    asked = []
    held = trainer.frozen_reference
    monkeypatch.setattr(trainer, "frozen_reference", lambda policy: asked.append(policy) or held(policy))
    train(tmp_path / "off", "--steps", 1, "--kl", 0)
    assert not asked
    train(tmp_path / "on", "--steps", 1, "--kl", 0.1)
    assert len(asked) == 1
