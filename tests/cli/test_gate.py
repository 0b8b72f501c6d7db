"""`turntree gate` as a person runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from turntree.cli.main import main


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


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Groups that converge on one way and have no variance in three of five, so that no point is supported."""
    lines = [
        {"group": f"g{index}", "reward": float(index % 5 > 2 and sample % 2), "actions": ["look"] * 6}
        for index in range(20)
        for sample in range(4)
    ]
    path = tmp_path / "mixed.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_the_table_has_the_columns_of_table_1_and_standard_output_is_nothing_but_json(capsys, mixed):
    options = ("--turns", "2", "--thresholds", ".05,.12", "--json", "-")
    code, out, err = run(capsys, "calibrate", str(mixed), *options)
    result = json.loads(out)
    rows = result["rows"]
    assert [(row["threshold"], row["cut"], row["tp"], row["fp"]) for row in rows] == [
        (0.05, 20, 12, 8),
        (0.12, 20, 12, 8),
    ]
    assert {"precision", "recall", "safe", "raw", "l2_preserved"} <= set(rows[0])
    assert code == 3 and "refused:" in err
    assert result["recommended"] is None and "support no operating point" in result["refused"]["reason"]


def test_the_table_for_people_names_both_scopes(capsys, mixed):
    code, out, _ = run(capsys, "calibrate", str(mixed))
    table = [line.split() for line in out.splitlines() if "%" in line]
    assert code == 3 and max(map(len, out.splitlines()[1:-2])) <= 80
    assert ["0.05", "all", "20", "12", "8", "60.0%"] in [row[:6] for row in table]
    assert ["running", "20", "12", "8", "60.0%"] in [row[:5] for row in table]


def test_a_log_of_rollouts_is_calibrated(capsys, log):
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
        (("calibrate", "absent.jsonl"), "absent.jsonl: does not exist"),
        (("calibrate", "{log}", "--thresholds", "a,b"), "field '--thresholds': 'a,b' is not a list of numbers"),
        (("calibrate", "{log}", "--signal", "x"), "does not have the signal 'x'"),
        (("calibrate", "{log}", "--max-turns", "-5"), "field 'max_turns': is -5; it is at least 1"),
        (
            ("calibrate", "{log}", "--termination", "90"),
            "field 'termination': is 90.0; it is from 0 to 1",
        ),
        (("calibrate", "{log}", "--max-turns", "0"), "field 'max_turns': is 0; it is at least 1"),
        (("calibrate", "{log}", "--floor", "2"), "field 'floor': is 2.0; it is above 0 and below 1"),
        (("calibrate", "{log}", "--turns", "0"), "field 'turns[0]': is 0; it is at least 1"),
        (
            ("calibrate", "{log}", "--format", "csv"),
            "there is no log format 'csv'; registered: agent-lightning",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, log, options, message):
    code, out, err = run(capsys, *(option.format(log=log) for option in options))
    assert code == 2 and out == ""
    assert message in err and err.count("\n") == 1 and "Traceback" not in err
