"""A stage on several ranks, as a user starts it: by itself or by a launcher, with a rank that is killed."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from killed_runs import artifacts

from turntree.core.config import Part
from turntree.core.errors import TurntreeError
from turntree.run.folder import RunDirectory
from turntree.stages.cluster import ClusterConfig
from turntree.stages.config import SuccessConfig
from turntree.stages.demonstrate import demonstrate
from turntree.stages.sft import SFTStageConfig, run_sft
from turntree.train.config import CheckpointConfig, OptimizerConfig, SFTConfig

SETTINGS = ["check.tasks=0", "sft.batch=2", "sft.optimizer.learning_rate=0.001", "checkpoints.every=1"]


def launched(traces: Path, out: Path, ranks: int) -> None:
    """The command on every rank, by torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = [f"--nproc-per-node={ranks}", f"--master-port={port}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *places]
    command = ["-m", "turntree.cli.main", "sft", "--traces", str(traces), "--out", str(out)]
    command += [word for setting in SETTINGS for word in ("--set", setting)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    finished = subprocess.run([*torchrun, *command], env=environment, stdout=subprocess.PIPE, text=True, timeout=300)
    assert finished.returncode == 0
    assert finished.stdout.count(f"-> {out}") == 1, "rank 0 speaks for all"


def test_a_killed_rank_ends_the_run_and_the_command_resumes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, whoever started the ranks: this process, or a launcher."""
    traces = tmp_path / "traces.jsonl"
    demonstrate(Part("household", {"games": {"count": 4}, "dev": 0.0}), traces)
    launched(traces, tmp_path / "whole", 2)
    config = SFTStageConfig(
        traces=str(traces),
        sft=SFTConfig(batch=2, optimizer=OptimizerConfig(learning_rate=1e-3)),
        check=SuccessConfig(tasks=0),
        checkpoints=CheckpointConfig(every=1),
        cluster=ClusterConfig(trainers=2),
    )
    log = RunDirectory.log

    def deadly(run: RunDirectory, row: dict[str, Any]) -> None:
        log(run, row)
        if row["step"] == 3:
            for rank in multiprocessing.active_children():
                rank.kill()

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "log", deadly)
        started = time.monotonic()
        with pytest.raises(TurntreeError, match=r"rank 1 \(process \d+\) was killed by SIGKILL; run the same command"):
            run_sft(config, tmp_path / "killed")
        assert time.monotonic() - started < 200, "it did not wait for a timeout of torch"
    assert not multiprocessing.active_children()
    run_sft(config, tmp_path / "killed")
    whole = artifacts(tmp_path / "whole")
    found = artifacts(tmp_path / "killed")
    for name in ("metrics.jsonl", "model/model.safetensors"):
        assert found[name] == whole[name], name
