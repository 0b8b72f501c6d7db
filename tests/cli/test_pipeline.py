"""Every stage end to end on the embedded policy, as a user types it."""

import json

import pytest

from household_players import generate_games
from household_text import written
from turntree.run.artifacts import PROFILE
from turntree.stages.evaluate import _share

TRAIN = ("--steps", 2, "--set", "train.groups=4", "--set", "train.group_size=4", "--set", "check.tasks=0")


def test_a_profile_has_exact_counts_and_names_its_policy(household):
    header, rows = PROFILE.read(household / "profile.jsonl")
    assert len(rows) == header["summary"]["candidates"] == 60
    assert sum(header["summary"]["classes"].values()) == 60
    for row in rows:
        assert sum(action["count"] for action in row["actions"]) == row["rollouts"] == 8
        assert row["reward_mean"] == row["successes"] / 8
        assert row["reward_var"] == pytest.approx(row["reward_mean"] * (1 - row["reward_mean"]))
    assert len(header["policy_hash"]) >= 16
    assert 0 < header["summary"]["miss_rate"] < 1
    cost = header["summary"]["cost"]
    assert cost["turns"] == 60 * 8
    assert cost["reused_tokens"] > cost["prefilled_tokens"] > 0


def test_the_same_seed_gives_the_same_profile(turntree, household, tmp_path):
    arguments = ("profile", "--traces", household / "traces.jsonl", "--limit", 60, "--rollouts", 8, "--max-tokens", 24)
    turntree(*arguments, "--out", tmp_path / "again.jsonl")
    _, first = PROFILE.read(household / "profile.jsonl")
    _, again = PROFILE.read(tmp_path / "again.jsonl")
    assert first == again


def test_training_changes_the_policy_and_says_what_it_cost(turntree, household, tmp_path):
    result = turntree.json("train", "pivot", household / "pivots.jsonl", "--out", tmp_path / "run", *TRAIN)
    assert result["cost"]["turns"] == 2 * 4 * 4
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["rho"] > 1 and row["grad_norm"] > 0 for row in rows)
    # the new policy is another one, so the old profile does not fit it
    message = turntree.error(
        *("train", "pivot", household / "pivots.jsonl", "--model", tmp_path / "run" / "model"),
        *("--out", tmp_path / "stale", *TRAIN),
    )
    assert "--allow-stale" in message
    turntree(
        *("train", "pivot", household / "pivots.jsonl", "--model", tmp_path / "run" / "model", "--allow-stale"),
        *("--out", tmp_path / "stale", *TRAIN),
    )


def test_the_same_seed_gives_the_same_weights(turntree, household, tmp_path):
    for name in ("one", "two"):
        turntree("train", "pivot", household / "pivots.jsonl", "--out", tmp_path / name, *TRAIN)
    one, two = ((tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two


def test_strict_and_random_baselines_are_one_flag_each(turntree, household, tmp_path):
    turntree("select", household / "profile.jsonl", "--rule", "random", "--out", tmp_path / "random.jsonl")
    turntree("train", "pivot", tmp_path / "random.jsonl", "--verifier", "strict", "--out", tmp_path / "run", *TRAIN)
    config = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    assert config["verifier"] == {"name": "strict"}


def test_every_candidate_is_trained_on_without_a_profile_and_by_both_rules(turntree, household, tmp_path):
    """The paper's random pivots are D_cand without a filter (A.3.1), with the strict reward or the functional one."""
    traces = household / "traces.jsonl"
    held = [json.loads(line) for line in traces.read_text().splitlines()]
    candidates = sum(
        message["role"] == "assistant" for row in held if row.get("split") == "train" for message in row["messages"]
    )
    for verifier in ("strict", "household"):
        out = tmp_path / verifier
        result = turntree.json("train", "pivot", "--traces", traces, "--verifier", verifier, "--out", out, *TRAIN)
        assert result["states"] + sum(result["dropped"].values()) == candidates > 0
        (row, _) = (json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines())
        mean = row["reward_mean"]  # rewards are 0 and 1
        assert row["reward_std"] == pytest.approx((mean * (1 - mean)) ** 0.5)
    assert "--traces and --verifier" in turntree.error("train", "pivot", "--out", tmp_path / "none", *TRAIN)


def test_sft_lowers_the_loss_on_its_traces(turntree, household, tmp_path):
    turntree(
        *(
            "sft",
            "--traces",
            household / "traces.jsonl",
            "--out",
            tmp_path / "sft",
            "--epochs",
            3,
            "--set",
            "check.tasks=0",
        ),
        *("--set", "sft.batch=4"),
    )
    rows = [json.loads(line) for line in (tmp_path / "sft" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_success_is_the_mean_of_the_games_as_its_interval_is():
    """Two of the games were censored but for one episode: over episodes, success would be 5 of 6."""
    found = _share([[1.0, 1.0, 1.0, 1.0], [0.0], [1.0], []])
    assert (found["success"], found["episodes"]) == (pytest.approx(2 / 3), 6)
    assert found["low"] < found["success"] < found["high"]


def test_evaluation_counts_every_episode(turntree):
    arguments = ("evaluate", "--split", "dev", "--count", 6, "--samples", 2, "--set", "skills_per_kind=3")
    result = turntree.json(*arguments)
    assert result["sampled"]["episodes"] == 12
    assert result["greedy"]["episodes"] == 6
    assert result["sampled"]["low"] <= result["sampled"]["success"] <= result["sampled"]["high"]
    assert sum(row["episodes"] for row in result["sampled"]["by_task_type"].values()) == 12
    assert result["retention"]["by_skill"]["calendar"]["questions"] == 3


def test_a_report_is_one_page(turntree, household, tmp_path):
    page = turntree.json("report", household, "--out", tmp_path / "report.html")["report"]
    text = (tmp_path / "report.html").read_text()
    assert page.endswith("report.html")
    assert "60" in text and "<svg" in text


def test_every_command_has_help_with_an_example(turntree):
    commands = (["traces", "household"], ["traces", "import"], ["sft"], ["profile"], ["select"], ["train", "pivot"])
    for command in (*commands, ["evaluate"], ["report"], ["quickstart"]):
        assert "Example: turntree " + " ".join(command) in turntree(*command, "--help").stdout


def test_a_file_of_traces_needs_no_import_and_is_told_to_be_one(turntree, household, tmp_path):
    said = turntree.error("traces", "import", household / "traces.jsonl", "--out", tmp_path / "again.jsonl")
    assert "traces.jsonl:1:" in said and "file of traces already" in said


def test_games_of_a_file_are_played_and_those_left_out_are_said(turntree, tmp_path):
    games = [
        {"game": game.id, "task_type": game.task_type, **written(game), "walkthrough": ["look"], "solvable": solvable}
        for game, solvable in zip(generate_games(0, 2), (True, False), strict=True)
    ]
    path = tmp_path / "games.jsonl"
    path.write_text("".join(json.dumps(game) + "\n" for game in games))
    words = ("--environment", "household", "--set", f"environment.games={path}", "--count", 1, "--samples", 1)
    done = turntree("evaluate", *words, "--max-turns", 2, "--max-tokens", 8, "--out", tmp_path / "played.json")
    assert "1 of 2 rows used; dropped: 1 unsolvable" in done.stdout
