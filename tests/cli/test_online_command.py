"""`turntree train online` and `turntree experiment gate`, end to end on the embedded policy, in miniature."""

from __future__ import annotations

import itertools
import json

SMALL = ("--iterations", 2, "--groups", 2, "--group-size", 3, "--max-turns", 4, "--max-tokens", 24, "--count", 4)
FILTERS = ("--gate-turn", 2, "--gate-threshold", 0.9, "--audit", 0.5, "--dapo", "--greso")
ARMS = (
    "--seeds", 0, "--iterations", 1, "--groups", 2, "--gate-turn", 1, "--gate-threshold", 0.99,
    "--set", "online.train.rollouts.group_size=2", "--set", "online.train.rollouts.episodes.max_turns=3",
    "--set", "online.held_out_count=2",
)  # fmt: skip


def test_online_training_leaves_what_the_audit_reads_and_is_not_overwritten(turntree, tmp_path) -> None:
    out = tmp_path / "online"
    command = ("train", "online", "--out", out, *SMALL, *FILTERS, "--set", "held_out_count=2")
    assert turntree.json(*command)["iterations"] == 2
    groups = [json.loads(line) for line in (out / "rollouts.jsonl").read_text().splitlines()]
    assert [group["iteration"] for group in groups] == [1, 1, 2, 2]
    assert (out / "model" / "model.safetensors").exists()
    assert (out / "gate.jsonl").exists()
    assert "zero_variance_rate" in turntree.json("audit", out, "--out", tmp_path / "audit.html")
    assert "pass --overwrite" in turntree.error(*command)


def test_the_gate_experiment_compares_matched_arms_and_does_not_run_them_twice(turntree, tmp_path) -> None:
    command = ("experiment", "gate", "--out", tmp_path / "gate", *ARMS)
    summary = turntree.json(*command)
    assert set(summary["arms"]) == {"none", "gate", "random"}
    assert summary["arms"]["none"]["groups_cut"] == 0
    assert summary["differences"]["gate"]["held_out_difference"]["tasks"] == 2
    assert turntree.json(*command) == summary


def test_composed_arms_share_their_first_stages_and_pay_for_all_of_them(turntree, tmp_path) -> None:
    small = (
        "--seeds", 0, "--iterations", 2, "--steps", 2, "--groups", 2, "--set", "candidates=12", "--set", "held_out=2",
        "--set", "online.count=3", "--set", "online.train.check_every=1", "--set", "pivot.check_every=1",
        "--set", "pivot.states=2", "--set", "pivot.group_size=2", "--set", "profile.rollouts=4",
        "--set", "online.train.rollouts.group_size=4", "--set", "online.train.rollouts.episodes.max_turns=3",
        "--set", "select.threshold=1.0", "--set", "select.max_per_kind=1.0", "--set", "own.tasks=3",
        "--set", "gate.checkpoints.0.turn=1",
        "--arms", "grpo,pivot,pivot/grpo+greso+gate+branching,own/grpo+dapo+verdicts",
    )  # fmt: skip
    command = ("experiment", "compose", "--out", tmp_path / "compose", *small)
    summary = turntree.json(*command)
    curves = {arm: points for arm, (points,) in summary["curves"].items()}
    first, *rest = curves["pivot"]
    assert first["turns"] == 12 * 4, "the profile is paid before the first step"
    assert [point["turns"] - first["turns"] for point in rest] == [4, 4, 8, 8], "paid, then learned"
    assert [point["success"] for point in rest[::2]] == [first["success"], rest[1]["success"]]
    assert curves["grpo"][0]["turns"] == 0 and [point["step"] for point in curves["grpo"]] == [0, 1, 2]
    both = curves["pivot/grpo+greso+gate+branching"]
    assert both[:5] == curves["pivot"] and both[5]["turns"] > first["turns"] + 8, "one more stage on the same bill"
    own = curves["own/grpo+dapo+verdicts"]
    assert own[1]["turns"] > 4, "the search for own states is paid"
    for points in curves.values():
        assert all(a[unit] <= b[unit] for unit in ("turns", "seconds") for a, b in itertools.pairwise(points))
    assert set(summary["arms"]["pivot"]) >= {"last", "best", "spent", "to_target", "minus_first", "at_equal_cost"}
    assert turntree.json(*command) == summary
    assert "another configuration" in turntree.error(*command, "--set", "pivot.optimizer.learning_rate=0.1")
    made = {path.parent.relative_to(tmp_path / "compose").as_posix() for path in tmp_path.rglob("cost.json")}
    assert made == {
        f"seed0/{name}"
        for name in ("grpo", "pivot", "pivot/grpo+greso+gate+branching", "own", "own/grpo+dapo+verdicts")
    }


def test_an_arm_that_is_no_chain_of_stages_is_refused(turntree, tmp_path) -> None:
    for arm in ("grpo+turbo", "pivot+gate", "sft", "grpo+gate+gate"):
        assert "no stage" in turntree.error("experiment", "compose", "--out", tmp_path / "c", "--arms", f"grpo,{arm}")
