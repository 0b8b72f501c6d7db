"""`--engine vllm` in the commands that sample: they do what they do with a server, and survive its death."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from fake_vllm import FakeVllm, running
from turntree.engine.checkpoint import load_model
from turntree.stages.policy import resolve

TESTS = Path(__file__).resolve().parents[1]
TRAIN = (
    *("train", "online", "--max-turns", 2, "--max-tokens", 8, "--learning-rate", 1e-3, "--iterations", 2),
    *("--groups", 2, "--group-size", 2, "--count", 4, "--held-out-count", 1, "--engine", "vllm"),
    *("--set", "checkpoints.every=1"),
)


class Process:
    """The fake server as a process, which can be killed."""

    def __init__(self):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url, self.child = f"http://127.0.0.1:{self.port}", None

    def start(self):
        path = os.pathsep.join([str(TESTS), str(TESTS.parent / "src")])
        command = [sys.executable, str(TESTS / "fake_vllm.py"), str(resolve("default")), str(self.port)]
        self.child = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path})
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=1.0):
                return
            assert self.child.poll() is None
            time.sleep(0.1)

    def kill(self):
        self.child.send_signal(signal.SIGKILL)
        self.child.wait()


@pytest.fixture
def process():
    server = Process()
    server.start()
    yield server
    server.kill()


def killed_after(server, metrics, rows):
    """Kill the server once the run has logged that many rows, and start it again."""

    def wait():
        while not metrics.exists() or metrics.read_text().count("\n") < rows:
            time.sleep(0.01)
        server.kill()
        server.start()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def rows_of(folder):
    """All that a run logged but seconds and saved time."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "timing"} for row in rows]


def test_a_server_that_is_killed_in_training_costs_no_rollout(turntree, tmp_path, process):
    """SIGKILL, and the server is started again without the weights that it had: the run is the one that was not
    disturbed."""
    url = ("--set", f"device.engine.url={process.url}")
    turntree(*TRAIN, *url, "--out", tmp_path / "quiet")
    killer = killed_after(process, tmp_path / "killed" / "metrics.jsonl", 2)
    turntree(*TRAIN, *url, "--out", tmp_path / "killed")
    killer.join()
    assert rows_of(tmp_path / "killed") == rows_of(tmp_path / "quiet")
    assert all(not row.get("censored") for row in rows_of(tmp_path / "killed"))


def test_a_run_whose_server_is_gone_stops_and_goes_on_at_another_one(turntree, tmp_path):
    fake, metrics = FakeVllm(load_model(resolve("default"))), tmp_path / "stopped" / "metrics.jsonl"

    def at(url, out):
        return (*TRAIN, "--set", f"device.engine.url={url}", "--set", "device.engine.patience=0.5", "--out", out)

    with running(fake) as url:
        turntree(*at(url, tmp_path / "quiet"))
        fake.hook = lambda path, body: "drop" if metrics.exists() and metrics.read_text().count("\n") > 1 else None
        assert "no server answered for 0.5 s" in turntree(*at(url, tmp_path / "stopped"), code=2).stderr
    with running(FakeVllm(load_model(resolve("default")))) as url:
        turntree(*at(url, tmp_path / "stopped"))
    assert rows_of(tmp_path / "stopped") == rows_of(tmp_path / "quiet")


def test_a_profile_goes_on_at_another_server_where_it_stopped(turntree, household, tmp_path):
    command = ("profile", "--traces", household / "traces.jsonl", "--limit", 12, "--rollouts", 2, "--max-tokens", 24)
    command += ("--engine", "vllm", "--set", "profile.wave=4")
    fake = FakeVllm(load_model(resolve("default")))

    def at(url, out):
        return (*command, "--set", f"device.engine.url={url}", "--set", "device.engine.patience=0.5", "--out", out)

    with running(fake) as url:
        turntree(*at(url, tmp_path / "quiet.jsonl"))
        begun = len(fake.asked)
        fake.hook = lambda path, body: "drop" if len(fake.asked) > begun + 16 else None
        error = turntree(*at(url, tmp_path / "stopped.jsonl"), code=2).stderr
        assert "no server answered" in error and "resume" in error
    with running(FakeVllm(load_model(resolve("default")))) as url:
        turntree(*at(url, tmp_path / "stopped.jsonl"))
    quiet, stopped = ((tmp_path / name).read_text().splitlines()[1:] for name in ("quiet.jsonl", "stopped.jsonl"))
    assert quiet == stopped, "no candidate was lost or sampled twice"


def test_an_evaluation_with_a_server_is_that_of_its_weights(turntree, tmp_path):
    with running(FakeVllm(load_model(resolve("default")))) as url:
        found = turntree.json(
            *("evaluate", "--count", 2, "--max-turns", 2, "--max-tokens", 8, "--engine", "vllm"),
            *("--set", f"device.engine.url={url}", "--out", tmp_path / "evaluation.json"),
        )
    assert found["sampled"]["censored"] == 0


def test_the_engine_says_what_it_needs(turntree, tmp_path):
    told = turntree.error(*TRAIN, "--out", tmp_path / "run")
    assert "device.engine.url" in told and "is missing" in told


def test_serve_says_how_vllm_is_installed(turntree, tmp_path):
    told = turntree.error("serve", "--venv", tmp_path)
    assert "holds no vLLM" in told and "pip install vllm" in told
