"""`turntree gate` as a person runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from turntree.cli.main import main


@pytest.fixture
def features(shared_data: Path) -> str:
    return str(shared_data / "selective_rollout" / "hybrid_gate_features.csv")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Twenty groups that fail in one way and twenty mixed ones that go different ways, four rollouts of six turns."""
    lines = []
    for index in range(40):
        for sample in range(4):
            actions = ["look"] * 6 if index % 2 else [f"go {sample}", "look", "take", f"use {sample}", "look", "look"]
            reward = 0.0 if index % 2 else float(sample % 2)
            lines.append({"group": f"g{index}", "reward": reward, "actions": actions})
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = 0
    try:
        main(["gate", *arguments])
    except SystemExit as ended:
        code = int(ended.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def test_the_table_has_the_columns_of_table_1_and_standard_output_is_nothing_but_json(capsys, features):
    thresholds = ".05,.08,.10,.12,.14,.18"
    code, out, err = run(capsys, "calibrate", features, "--turns", "10", "--thresholds", thresholds, "--json", "-")
    result = json.loads(out)
    rows = result["rows"]
    assert [row["threshold"] for row in rows] == [0.05, 0.08, 0.10, 0.12, 0.14, 0.18]
    assert [(row["cut"], row["tp"], row["fp"]) for row in rows][2:] == [
        (20, 16, 4),
        (21, 17, 4),
        (24, 18, 6),
        (25, 19, 6),
    ]
    assert {"precision", "recall", "safe", "raw", "l2_preserved"} <= set(rows[0])
    assert code == 3 and "refused:" in err
    assert result["recommended"] is None and "support no operating point" in result["refused"]["reason"]


def test_the_or_rule_is_a_termination_fraction(capsys, features):
    options = ("--turns", "10", "--thresholds", "0.12", "--termination", "0.9", "--json", "-")
    assert json.loads(run(capsys, "calibrate", features, *options)[1])["rows"][0]["cut"] == 23


def test_the_table_for_people_names_both_scopes(capsys, features):
    code, out, _ = run(capsys, "calibrate", features)
    assert code == 3 and "21 [17]" in out and "81.0% [76.5%]" in out


def test_a_feature_table_is_calibrated_at_the_turns_that_were_asked_for(capsys, features):
    _, out, _ = run(capsys, "calibrate", features, "--turns", "15", "--json", "-")
    result = json.loads(out)
    assert result["turns"] == [15] and {row["turn"] for row in result["rows"]} == {15}


def test_a_log_of_rollouts_is_calibrated_like_a_table(capsys, log):
    code, out, _ = run(capsys, "calibrate", str(log), "--turns", "2,4", "--json", "-")
    result = json.loads(out)
    assert code == 0 and result["refused"] is None
    assert result["recommended"]["turn"] == 2
    assert result["recommended"]["saved"]["turns"]["safe"] == pytest.approx(20 * 4 * 4 / (40 * 4 * 6))
    assert "tokens" in result["absent"] and result["read"]["groups"] == 40
    assert "recommended: " in run(capsys, "calibrate", str(log), "--turns", "2,4")[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("calibrate", "absent.csv"), "absent.csv: does not exist"),
        (("calibrate", "{features}", "--turns", "5"), "has no signals at turn 5; use one of 10, 15, 20"),
        (("calibrate", "{features}", "--thresholds", "a,b"), "field '--thresholds': 'a,b' is not a list of numbers"),
        (("calibrate", "{features}", "--signal", "x"), "does not have the signal 'x'"),
        (("calibrate", "{log}", "--max-turns", "-5"), "field 'max_turns': is -5; it is at least 1"),
        (
            ("calibrate", "{log}", "--termination", "90"),
            "field 'termination': is 90.0; it is from 0 to 1",
        ),
        (("calibrate", "{log}", "--max-turns", "0"), "field 'max_turns': is 0; it is at least 1"),
        (("calibrate", "{features}", "--floor", "2"), "field 'floor': must be between 0 and 1"),
        (("calibrate", "{features}", "--turns", "10,12"), "has no signals at turn 12; use one of 10, 15, 20"),
        (("calibrate", "{features}", "--turns", "0"), "field 'turns[0]': is 0; it is at least 1"),
        (
            ("calibrate", "{log}", "--format", "csv"),
            "there is no log format 'csv'; registered: auto, generic, nemo-gym",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, features, log, options, message):
    code, out, err = run(capsys, *(option.format(features=features, log=log) for option in options))
    assert code == 2 and out == ""
    assert message in err and err.count("\n") == 1 and "Traceback" not in err
