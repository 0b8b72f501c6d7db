"""The benchmark of the gate runs and prints nothing but JSON when asked to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "gate.py"


def test_the_share_of_the_gate_is_reported_on_both_bases():
    command = [sys.executable, str(BENCHMARK), "--quick", "--repeats", "1", "--json", "-"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout)
    plain = [case for case in found["cases"] if case["name"] == "plain"]
    assert [(case["group_size"], case["turn"]) for case in plain] == [(8, 10)]
    assert found["share_of_rollout"] == max(found["by_basis"].values()) > 0
    assert plain[0]["paper"]["median"] == plain[0]["gate_seconds"]["median"] / found["paper_group_seconds"]
