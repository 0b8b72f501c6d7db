"""The benchmark of slow tools runs and prints nothing but JSON when asked to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "tools.py"


@pytest.mark.usefixtures("bubblewrap")
def test_every_mode_does_the_same_and_executes_no_call_twice():
    """The benchmark refuses to report when the modes grew different trees or anything was executed twice."""
    command = [sys.executable, str(BENCHMARK), "--quick", "--repeats", "1", "--json", "-"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert finished.returncode == 0, finished.stderr
    (case,) = json.loads(finished.stdout)["cases"]
    assert case["executions"] == case["distinct"] and case["executed_twice"] == 0 < case["joined"]["low"]
    assert case["calls"] == case["executions"] + case["joined"]["median"] + case["hits"]["median"]
    for mode in ("overlapped", "deterministic", "barrier", "barrier_refilled"):
        assert 0 < case["full"][mode]["median"] < case["busy"][mode]["median"] <= 1
