"""A reward of turns that runs away from success: the run says so and ends, and its best weights are there."""

import json
import sys

import pytest

RULE = '''
def accept(state, action):
    """Pays for walking, whatever the task."""
    return float(action.content.startswith("go to"))
'''


@pytest.fixture
def walking(turntree, household, tmp_path, monkeypatch):
    """Pivots that a verifier found which pays for walking alone."""
    (tmp_path / "walking_rule.py").write_text(RULE)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("walking_rule", None)


@pytest.mark.timeout(400)
def test_a_run_whose_reward_pays_for_walking_ends_and_names_the_best_weights(turntree, household, walking):
    verifier = ("--verifier", "walking_rule:accept")
    turntree(
        *("profile", "--traces", household / "traces.jsonl", "--limit", 80, "--rollouts", 8, "--max-tokens", 24),
        *(*verifier, "--out", "profile.jsonl"),
    )
    turntree("select", "profile.jsonl", "--threshold", 1.0, "--anchor-share", 0.0, "--out", "pivots.jsonl")
    command = ("train", "pivot", "pivots.jsonl", *verifier, "--steps", 24, "--max-tokens", 24, "--learning-rate", 1e-3)
    keys = ("train.groups=16", "train.check_every=6", "check.tasks=32", "check.max_turns=16")
    done = turntree(*command, *(word for key in keys for word in ("--set", key)), "--out", "run")
    rows = [json.loads(line) for line in (walking / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] < 24 and rows[-1]["held_out_success"] < rows[0]["held_out_success"]
    assert rows[-1]["reward_mean"] > rows[1]["reward_mean"]
    stopped = next(line for line in done.stderr.splitlines() if "stopped early" in line)
    assert f"step {rows[-1]['step']}: success fell from" in stopped and "'go' went from" in stopped
    first, second = done.stdout.splitlines()[:2]
    assert first == stopped.removeprefix("turntree: "), "what ends a run is what it says first, and then its success"
    assert second.startswith(f"success {rows[0]['held_out_success']:.1%} -> {rows[-1]['held_out_success']:.1%} of 32")
    best = max(rows, key=lambda row: (row.get("held_out_success", -1), -row["step"]))["step"]
    assert (walking / "run" / "best").exists() == (best > 0)
