"""Online training, whose update two ranks share, is that of one process: episodes, gradients, losses, metrics."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from test_rollout_workers import ONLINE, artifacts, differences

from ranks_of_tests import two_ranks
from turntree.stages.train_online import run_train_online


def test_online_training_on_two_ranks_is_that_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    short = replace(ONLINE, train=replace(ONLINE.train, iterations=2))
    run_train_online(short, tmp_path / "here")
    with two_ranks(run_train_online, short, tmp_path / "two"):
        run_train_online(short, tmp_path / "two")
    here, two = artifacts(tmp_path / "here"), artifacts(tmp_path / "two")
    layout = ("padding_tokens", "trained_tokens", "scored_tokens", "rho")  # which trees share a pass, or a prefix
    found = [one for one in differences(here, two) if one.split(":")[0].rpartition(".")[2] not in layout]
    assert found == []
    rows = [row for row in two["metrics.jsonl"] if row["step"]]
    assert len(rows) == 2 and all(row["trained_groups"] > 1 and row["grad_norm"] > 0 for row in rows)
