"""The benchmarks run, compare equal work, and print nothing but JSON when asked to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def run(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / script), "--quick", *options]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def cases(script: str) -> list[dict[str, Any]]:
    finished = run(script, "--repeats", "2", "--json", "-")
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)["cases"]


def test_both_updates_have_the_same_gradient_and_rho_counts_tokens():
    found = cases("update_step.py")
    assert [case["name"] for case in found] == ["vocabulary_50", "vocabulary_500"]
    for case in found:
        assert case["rho"] == 4 * (32 + 4) / (32 + 4 * 4)
        assert 0 < case["gradient_error"] < 1e-4  # zero would be one side compared with itself
        speedup, share = case["speedup_flat"], case["share_of_rho"]
        assert 0 < speedup["low"] <= speedup["median"] <= speedup["high"]
        assert share == {key: pytest.approx(value / case["rho"]) for key, value in speedup.items()}


def test_sampling_is_timed_for_siblings_and_for_a_conversation():
    found = cases("generate.py")
    assert [case["name"] for case in found] == ["siblings_4", "conversation_3_turns"]
    for case in found:
        assert 0 < case["low"] <= case["speedup"] <= case["high"]
        assert 0 < case["speedup_by_hand"]["low"] <= case["speedup_by_hand"]["high"]
        assert case["tokens_per_second"] > 0
