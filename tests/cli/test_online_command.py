"""`turntree train online` and `turntree experiment gate`, end to end on the embedded policy, in miniature."""

from __future__ import annotations

import json
from typing import Any

from turntree.report import figures

SMALL = ("--iterations", 2, "--groups", 2, "--group-size", 3, "--max-turns", 4, "--max-tokens", 24, "--count", 4)
FILTERS = ("--gate-turn", 2, "--gate-threshold", 0.9, "--audit", 0.5, "--filter", "dapo", "--filter", "greso")
ARMS = (
    "--seeds", 0, "--iterations", 1, "--groups", 2, "--gate-turn", 1, "--gate-threshold", 0.99,
    "--set", "train.group_size=2", "--set", "train.max_turns=3",
    "--set", "check.tasks=2",
)  # fmt: skip


def logged(row: dict[str, Any], key: str) -> bool:
    first, _, inner = key.partition(".")
    return first in row and (not inner or inner in row[first])


def test_online_training_leaves_what_the_audit_reads_and_is_not_overwritten(turntree, tmp_path) -> None:
    out = tmp_path / "online"
    command = ("train", "online", "--out", out, *SMALL, *FILTERS, "--set", "check.tasks=2")
    said = turntree(*command, "--json", tmp_path / "result.json").stdout
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["iterations"] == 2
    groups = [json.loads(line) for line in (out / "rollouts.jsonl").read_text().splitlines()]
    assert result["groups_cut"] == sum(group["rollouts"][0]["stop"] == "gated" for group in groups)
    rewards = [{rollout["reward"] for rollout in group["rollouts"]} for group in groups]
    assert sum(result["groups_dropped"].values()) == sum(len(found - {None}) == 1 for found in rewards) > 0
    assert [line.partition(":")[0] for line in said.splitlines()[-2:]] == ["gate", "filters"], "one line for each part"
    assert [group["iteration"] for group in groups] == [1, 1, 2, 2]
    assert (out / "model" / "model.safetensors").exists()
    assert (out / "gate.jsonl").exists()
    row = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    drawn = [*(curve.key for curve in figures.ONLINE), *figures.SPENT, figures.SUCCESS.key, "stops"]
    absent = {key for key in drawn if not logged(row, key)}
    assert absent <= {"kl", "grad_norm"}, "a page draws what a run logs (these two where there was an update)"
    assert "zero_variance_rate" in turntree.json("audit", out, "--out", tmp_path / "audit.html")
    assert "pass --overwrite" in turntree.error(*command)


def test_the_gate_experiment_compares_matched_arms_and_does_not_run_them_twice(turntree, tmp_path) -> None:
    command = ("experiment", "gate", "--out", tmp_path / "gate", *ARMS)
    summary = turntree.json(*command)
    assert set(summary["arms"]) == {"none", "gate", "random"}
    assert summary["arms"]["none"]["groups_cut"] == 0
    assert summary["differences"]["gate"]["held_out_difference"]["tasks"] == 2
    assert turntree.json(*command) == summary
