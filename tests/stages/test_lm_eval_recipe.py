"""The change of a policy outside its domain, from two results of lm-eval."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[2] / "recipes" / "lm_eval_change.py"


@pytest.fixture(scope="module")
def recipe():
    spec = importlib.util.spec_from_file_location("lm_eval_change", RECIPE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def result(values, *, task="t", metric="acc", mean=None):
    samples = [{"doc_id": i, "filter": "none", metric: value} for i, value in enumerate(values)]
    mean = sum(values) / len(values) if mean is None else mean
    figures = {"alias": task, f"{metric},none": mean, f"{metric}_stderr,none": 0.1, "sample_len": len(values)}
    return {"results": {task: figures}, "samples": {task: samples}, "higher_is_better": {task: {metric: True}}}


def write(folder, date, found):
    """As lm-eval writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"results_{date}.json").write_text(json.dumps({k: v for k, v in found.items() if k != "samples"}))
    for task, rows in found["samples"].items():
        (folder / f"samples_{task}_{date}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_changes_are_paired_by_question(recipe) -> None:
    """(after - before) = 1, 0, 0, -1, 1: mean 0.2, deviation sqrt(0.7), half width 1.96 sqrt(0.7 / 5)."""
    (row,) = recipe.compare(result([0.0, 1.0, 0.0, 1.0, 0.0]), result([1.0, 1.0, 0.0, 0.0, 1.0]))
    assert (row["task"], row["metric"], row["questions"], row["higher_is_better"]) == ("t", "acc", 5, True)
    assert (row["before"], row["after"], row["change"]) == pytest.approx((0.4, 0.6, 0.2))
    half = 1.959964 * (0.7 / 5) ** 0.5
    assert row["interval"] == pytest.approx((0.2 - half, 0.2 + half))


def test_a_metric_that_is_no_mean_over_questions_has_no_interval(recipe) -> None:
    perplexities = (result([1.0, 2.0], metric="perplexity", mean=7.0), result([1.0, 3.0], metric="perplexity"))
    (row,) = recipe.compare(*perplexities)
    assert (row["before"], row["interval"], row["questions"]) == (7.0, None, 0)
    group = result([1.0])
    group["samples"] = {}
    assert recipe.compare(group, group)[0]["interval"] is None


def test_different_questions_are_not_paired(recipe) -> None:
    assert recipe.compare(result([1.0, 0.0]), result([1.0, 0.0, 0.0]))[0]["questions"] == 0


def test_the_newest_results_of_two_folders_are_compared(tmp_path) -> None:
    write(tmp_path / "before" / "mine", "2026-11-01T10", result([0.0, 0.0]))
    write(tmp_path / "before" / "mine", "2026-11-02T10", result([0.0, 1.0]))
    write(tmp_path / "after" / "model", "2026-11-03T10", result([1.0, 1.0]))
    command = [sys.executable, str(RECIPE), str(tmp_path / "before"), str(tmp_path / "after")]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "| t | acc | 0.5000 | 1.0000 | +0.5000 [" in told
    lost = subprocess.run([*command[:3], str(tmp_path / "none")], capture_output=True, text=True, check=False)
    assert lost.returncode == 1 and "holds no results_" in lost.stderr
