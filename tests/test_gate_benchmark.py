"""What the benchmark of the gate divides by what, with a gate and a clock whose seconds are known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gate

    return gate


class Slow:
    """Takes a second for every rollout that it sees."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def decide(self, group) -> None:
        self.seconds += len(group.actions)


def test_a_gate_s_seconds_are_those_of_asking_about_every_turn_of_a_group(benchmark, monkeypatch):
    slow = Slow()
    monkeypatch.setattr(benchmark.time, "process_time", lambda: slow.seconds)
    groups = [benchmark.whole_group(index, size=3, turns=5) for index in range(4)]
    assert benchmark.gate_seconds(slow, groups) == 15.0, "five turns of three rollouts, a group"


def test_a_share_is_the_ratio_of_medians_with_the_range_within_a_repeat(benchmark):
    assert benchmark.share([1.0, 2.0, 6.0], [10.0, 40.0, 20.0]) == {"median": 0.1, "low": 0.05, "high": 0.3}


def test_the_gate_by_default_is_timed_for_all_of_its_work_and_cuts_nothing(benchmark):
    turns = benchmark.whole_group(0, size=4, turns=6)
    said = [benchmark.plain_gate(6).decide(group) for group in turns]
    assert said[:-1] == [None] * 5 and said[-1] is not None and not said[-1].cut
    assert [len(group.actions[0]) for group in turns] == [1, 2, 3, 4, 5, 6]


def test_the_benchmark_prints_nothing_but_json():
    command = [sys.executable, str(BENCHMARKS / "gate.py"), "--quick", "--repeats", "1", "--json", "-"]
    finished = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert finished.returncode == 0, finished.stderr
    cases = [(case["group_size"], case["turn"]) for case in json.loads(finished.stdout)["cases"]]
    assert cases == [(8, 10)]
