"""A rollout without a reward, a failure beside the log, and a dropped row are told: none becomes a reward of 0."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from turntree.audit.audit import run_audit
from turntree.audit.config import AuditConfig
from turntree.core.errors import InputError


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


def completions(path: Path, rewards: list[float | None], trained: list[float]) -> Path:
    """A table of TRL whose advantages are those of the rewards `trained`."""
    mean, spread = statistics.fmean(trained), statistics.stdev(trained) + 1e-4
    rows = [
        {"step": 1, "prompt": "2+2?", "completion": f"{n}", "r_reward": reward, "advantage": (value - mean) / spread}
        for n, (reward, value) in enumerate(zip(rewards, trained, strict=True))
    ]
    file = path / "completions_00001.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file


@pytest.mark.parametrize("rewards", [[1.0, 1.0, 1.0, None], [1.0, 0.0, None, 1.0], [1.0, None, None, 0.5]])
def test_completions_that_trl_trained_on_as_failures_are_told(rewards: list[float | None], tmp_path: Path) -> None:
    """Before pull request 5902 the sum of no reward at all was 0."""
    as_zero = [reward or 0.0 for reward in rewards]
    told = run_audit([completions(tmp_path, rewards, as_zero)], AuditConfig())
    lost = rewards.count(None)
    assert f"trained on as if it were 0: {lost}" in " ".join(told["log"]["notes"])
    assert told["counts"]["censored_rollouts"] == lost


def test_completions_that_trl_left_out_are_not(tmp_path: Path) -> None:
    values: list[float | None] = [1.0, 0.0, 1.0, None]
    moved = {1.0: 1 / 3, 0.0: -2 / 3, None: 0.0}
    rows = [
        {"step": 1, "prompt": "?", "completion": f"{n}", "r_reward": value, "advantage": moved[value]}
        for n, value in enumerate(values)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "completions_00001.parquet")
    assert "as if it were 0" not in " ".join(run_audit([tmp_path], AuditConfig())["log"]["notes"])


def test_the_failures_beside_a_log_belong_to_it_whatever_its_name(tmp_path: Path) -> None:
    """NeMo Gym calls its own file rollouts.jsonl, as we do ours."""
    asked = {"responses_create_params": {"input": [{"role": "user", "content": "q"}]}, "_ng_task_index": 0}
    said = {"response": {"output": [{"type": "message", "role": "assistant", "content": "a"}]}}
    won = [asked | said | {"_ng_rollout_index": n, "reward": float(n % 2)} for n in range(3)]
    lost = [asked | {"_ng_rollout_index": 3, "_ng_failure_class": "AgentTimeout", "reward": 0.0}]
    for name in ("rollouts", "collected"):
        folder = tmp_path / name
        folder.mkdir()
        lines(folder / f"{name}.jsonl", won)
        lines(folder / f"{name}_failures.jsonl", lost)
        told = run_audit([folder], AuditConfig())
        assert (told["log"]["rollouts"], told["counts"]["censored_rollouts"]) == (4, 1)


def test_an_answer_in_parts_is_an_answer(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "hello "}, {"type": "text", "text": "there"}]
    told = []
    for content in (parts, "hello there"):
        rows = [
            {
                "example_id": 1,
                "prompt": [{"role": "user", "content": "q"}],
                "completion": [{"role": "assistant", "content": content}],
                "reward": float(n),
                "is_truncated": False,
            }
            for n in range(2)
        ]
        told.append(run_audit([lines(tmp_path / "eval.jsonl", rows)], AuditConfig()))
    assert told[0] == told[1] and told[0]["failures"] != {}


def test_a_step_without_a_score_leaves_the_episode_without_a_reward(tmp_path: Path) -> None:
    rows = [
        {"input_prompt": "q", "output_response": f"a{n}", "score": score}
        for n, score in enumerate([[0, None], None, float("nan"), [0, 1.0], [0.0]])
    ]
    told = run_audit([lines(tmp_path / "dump.jsonl", rows)], AuditConfig())
    assert told["counts"]["censored_rollouts"] == 3 and not told["log"]["dropped"]


def test_where_nothing_is_left_to_compare_the_dropped_rows_are_named(tmp_path: Path) -> None:
    rows = [{"group": name, "reward": value} for name in "ab" for value in (0, "0.5")]
    with pytest.raises(InputError) as refused:
        run_audit([lines(tmp_path / "log.jsonl", rows)], AuditConfig())
    assert "log.jsonl:2" in refused.value.problem and "not a number" in refused.value.problem
    assert str(refused.value.path).endswith("log.jsonl")
