"""What a policy kept outside its domain, by EleutherAI's lm-eval: python recipes/lm_eval_change.py BEFORE AFTER

    pip install 'lm_eval[hf]'
    lm_eval --model hf --model_args pretrained=models/mine --tasks hellaswag --log_samples --output_path BEFORE
    lm_eval --model hf --model_args pretrained=runs/mine/model --tasks hellaswag --log_samples --output_path AFTER

A policy of turntree is a folder that lm-eval reads as it is (an adapter: `pretrained=BASE,peft=FOLDER`). Both answer
the same questions, so a change is paired question by question; it has a 95% interval where both folders hold a number
for every question.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turntree.run.files import read_json
from turntree.run.jsonl import parse_json, read_lines
from turntree.run.means import Z95


def read_result(folder: Path) -> dict[str, Any]:
    """The newest result below a folder, with its samples by task."""
    found = sorted(folder.rglob("results_*.json"), key=lambda path: path.name)
    if not found:
        sys.exit(f"{folder} holds no results_*.json of lm-eval: run it with --output_path {folder} --log_samples")
    date = found[-1].stem.removeprefix("results_")
    result: dict[str, Any] = read_json(found[-1])
    samples: dict[str, list[Any]] = {}
    for path in sorted(found[-1].parent.glob(f"samples_*_{date}.jsonl")):
        task = path.stem.removeprefix("samples_").removesuffix(f"_{date}")
        samples[task] = [parse_json(line, path, number) for number, line in read_lines(path)]
    return result | {"samples": samples}


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each task (or group of tasks) and metric that both have."""
    rows: list[dict[str, Any]] = []
    for task, figures in before["results"].items():
        for key, value in figures.items():
            metric, _, kind = key.partition(",")
            other = after["results"].get(task, {}).get(key)
            if not (isinstance(value, int | float) and isinstance(other, int | float) and kind):
                continue
            if not metric.endswith("_stderr"):
                changes = _changes(before, after, task, metric, kind)
                row = {"task": task, "metric": metric, "filter": kind, "before": value, "after": other}
                row |= {"change": other - value, "interval": interval(changes), "questions": len(changes)}
                rows.append(row | {"higher_is_better": before.get("higher_is_better", {}).get(task, {}).get(metric)})
    return rows


def _changes(before: dict[str, Any], after: dict[str, Any], task: str, metric: str, kind: str) -> list[float]:
    """By question; empty for groups, and for metrics that are not a mean over questions."""
    first, second = (_by_question(result, task, metric, kind) for result in (before, after))
    if not first or first.keys() != second.keys():
        return []
    if not math.isclose(statistics.fmean(first.values()), before["results"][task][f"{metric},{kind}"], abs_tol=1e-9):
        return []
    return [second[question] - value for question, value in first.items()]


def _by_question(result: dict[str, Any], task: str, metric: str, kind: str) -> dict[int, float]:
    samples = (sample for sample in result["samples"].get(task, ()) if sample["filter"] == kind)
    values = {sample["doc_id"]: sample.get(metric) for sample in samples}
    if not all(isinstance(value, int | float) for value in values.values()):
        return {}
    return {question: float(value) for question, value in values.items()}


def interval(changes: Sequence[float]) -> tuple[float, float] | None:
    """Normal, of the mean of paired changes."""
    if len(changes) < 2:
        return None
    mean, half = statistics.fmean(changes), Z95 * statistics.stdev(changes) / math.sqrt(len(changes))
    return mean - half, mean + half


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="what lm-eval wrote of the policy before")
    parser.add_argument("after", type=Path, help="... and after training")
    given = parser.parse_args()
    print("| task | metric | before | after | change | questions |", "|---" * 6 + "|", sep="\n")
    for row in compare(read_result(given.before), read_result(given.after)):
        edges = "" if row["interval"] is None else " [{:+.4f}, {:+.4f}]".format(*row["interval"])
        named = row["metric"] if row["filter"] == "none" else f"{row['metric']} ({row['filter']})"
        figures = f"{row['before']:.4f} | {row['after']:.4f} | {row['change']:+.4f}{edges} | {row['questions']}"
        print(f"| {row['task']} | {named} | {figures} |")


if __name__ == "__main__":
    main()
