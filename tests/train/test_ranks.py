"""A stage on several ranks, as a user starts it: by a launcher, with a rank that is killed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from killed_runs import artifacts

from turntree.core.config import Part
from turntree.stages.demonstrate import demonstrate

SETTINGS = ["check.tasks=0", "sft.batch=2", "sft.optimizer.learning_rate=0.001", "checkpoints.every=1"]


def launched(traces: Path, out: Path, module: str = "turntree.cli.main") -> subprocess.CompletedProcess[str]:
    """The command on two ranks, by torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
    command = ["-m", module, "sft", "--traces", str(traces), "--out", str(out)]
    command += [word for setting in SETTINGS for word in ("--set", setting)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([*torchrun, *command], env=environment, stdout=subprocess.PIPE, text=True, timeout=300)


def test_a_killed_rank_ends_the_run_and_the_command_resumes_it_bit_for_bit(tmp_path: Path) -> None:
    traces = tmp_path / "traces.jsonl"
    demonstrate(Part("household", {"count": 4, "dev": 0.0}), traces)
    whole = launched(traces, tmp_path / "whole")
    assert whole.returncode == 0
    assert whole.stdout.count(f"-> {tmp_path / 'whole'}") == 1, "rank 0 speaks for all"
    assert launched(traces, tmp_path / "killed", "killed_rank").returncode != 0, "the launcher ends the other rank"
    assert launched(traces, tmp_path / "killed").returncode == 0
    whole, killed = artifacts(tmp_path / "whole"), artifacts(tmp_path / "killed")
    for name in ("metrics.jsonl", "model/model.safetensors"):
        assert killed[name] == whole[name], name
