"""The benchmarks run, compare equal work, and print nothing but JSON when asked to."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def printed(script: str, *options: str) -> str:
    """What a benchmark prints."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        patch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
        patch.setattr(sys, "argv", [script, "--quick", *options])
        runpy.run_path(str(BENCHMARKS / script), run_name="__main__")
    return said.getvalue()


def read(script: str, *options: str) -> dict[str, Any]:
    return json.loads(printed(script, *options, "--json", "-"))


def cases(script: str) -> list[dict[str, Any]]:
    return read(script, "--repeats", "2")["cases"]


@pytest.mark.parametrize("shape", ["long", "branched"])
def test_updates_have_the_same_gradient_and_rho_counts_tokens(shape: str):
    found = read("update_step.py", "--repeats", "2", "--shape", shape)["cases"]
    assert [case["name"] for case in found] == ["vocabulary_50", "vocabulary_500"]
    sharing = {"long": 4 * (32 + 4) / (32 + 4 * 4), "branched": 4 * (32 + 12) / (32 + 2 * 8 + 4 * 4)}[shape]
    for case in found:
        rho = case["rho"]["median"]
        assert sharing <= rho < sharing * 1.05  # siblings may begin with the same token
        assert 0 < case["gradient_error"]["high"] < 1e-4  # zero would be one side compared with itself
        speedup, share = case["speedup_flat"], case["share_of_rho"]
        assert 0 < speedup["low"] <= speedup["median"] <= speedup["high"]
        assert share == {key: pytest.approx(value / rho) for key, value in speedup.items()}
        assert case["memory_ratio"]["low"] > 1
        if case["speedup_trl"] is not None:
            assert shape == "long" and 0 < case["gradient_error_trl"]["high"] < 1e-4


@pytest.mark.usefixtures("bubblewrap")
def test_environments_are_timed_by_their_own_gold():
    pages, rooms = read("environments.py", "browsing", "household")["cases"]
    assert (pages["name"], pages["tasks"], pages["solved_by_gold"]) == ("browsing", 3, 3)
    assert pages["steps_per_second"] > 0 and all(pages[f"{what}_ms"] >= 0 for what in ("reset", "step", "fork"))
    assert (rooms["tasks"], rooms["steps_per_second"]) == (0, None)  # its expert is a demonstrator: no gold


def test_replayed_experts_leave_less_between_sampler_and_trainer():
    chosen, replayed, *_ = [line.split("|")[1:-1] for line in printed("routes.py").splitlines()[2:]]
    assert [chosen[1].strip(), replayed[1].strip()] == ["chosen by the trainer", "replayed"]
    assert 0 < float(replayed[2]) < 0.7 * float(chosen[2])


def test_every_turn_of_a_large_import_is_accounted_for():
    command = [
        sys.executable,
        str(BENCHMARKS / "import_scale.py"),
        "--quick",
        "--json",
        "-",
    ]
    (case,) = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)["cases"]
    assert case["turns"] == case["report"]["turns_read"] == case["report"]["turns_kept"]
    assert case["whole"]["exit_code"] == 0 and case["whole"]["peak_mb"] < 500


def test_sampling_is_timed_for_siblings_a_conversation_and_callers_out_of_step():
    found = cases("generate.py")
    assert [case["name"] for case in found] == ["siblings_4", "conversation_3_turns", "unequal_3"]
    assert [case["baseline"] for case in found] == ["plain", "reuse", "plain"]
    assert [list(case["beside"]) for case in found] == [["reuse"], ["plain"], ["waves"]]
    for case in found:
        assert 0 < case["low"] <= case["speedup"] <= case["high"]
        assert all(0 < beside["low"] <= beside["high"] for beside in case["beside"].values())
        assert case["tokens_per_second"] > 0


def test_a_pretrained_size_is_timed_for_siblings_an_update_with_its_head_and_plain_passes():
    sampled, updated, passed = cases("smollm2.py")
    assert passed["name"] == "passes_36" and set(passed["milliseconds_per_token"]) == {"forward", "forward_backward"}
    assert sampled["name"] == "siblings_4" and set(sampled["speedup"]) == {"plain", "reuse"}
    assert all(0 < one["low"] <= one["high"] for one in sampled["speedup"].values())
    assert updated["name"] == "update_2x4" and 2 < updated["rho"] < 4
    assert updated["share_of_rho"]["median"] == pytest.approx(updated["speedup_flat"]["median"] / updated["rho"])
    assert 0 < updated["head_share"]["median"] < 1 and 0 < updated["limit_of_rho"] <= 1


def test_the_model_of_many_gpus_reports_shares_for_every_mode_and_staleness():
    found = read("scale_model.py")
    settings = {(row["mode"], row["staleness"]) for row in found["best"]}
    assert len(settings) == len(found["best"]) == 9
    for row in found["rows"]:
        assert row["seconds"] > 0 and all(
            0 <= row[name] <= 1 for name in ("rollout_busy", "train_busy", "tail", "waiting")
        )


def test_what_is_run_on_a_gpu_runs_on_a_cpu_at_tiny_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = BENCHMARKS / "gpu" / "run.py"
    ranks = [sys.executable, str(script), "--out", str(tmp_path), "--tiny", "--only", "ranks"]  # a process of its own
    subprocess.run(ranks, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    monkeypatch.setattr(sys, "path", list(sys.path))
    gpu = runpy.run_path(str(script))
    for part in ("update", "memory", "generation", "carried", "weights", "attention"):
        gpu["run_part"](part, tmp_path, True)
    for case in json.loads((tmp_path / "update.json").read_text()):
        assert 0 < case["gradient_difference"]["packed, dense mask"] < 1e-5 and case["rho"] > 2
    (found,) = json.loads((tmp_path / "ranks.json").read_text())
    assert found["plain"]["grad_norm"] == pytest.approx(found["sharded"]["grad_norm"])
    assert all(0 < case["gradient_difference"] < 1e-4 for case in json.loads((tmp_path / "carried.json").read_text()))
    page = gpu["page"](tmp_path)
    assert "**Not measured in this run:** trl, tests, commands." in page
    assert "## One update" in page and "## Ranks" in page


def test_a_plan_is_within_a_tenth_of_what_ranks_take():
    command = [sys.executable, str(BENCHMARKS / "plan.py"), "--cell", "dense middle, 2 ranks, full", "--json", "-"]
    finished = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert finished.returncode == 0, finished.stderr
    (row,) = json.loads(finished.stdout)["rows"]
    for rank in ("first", "other"):
        assert row[rank]["measured"] > 100 and row[rank]["off"] == pytest.approx(0, abs=0.1), row
