"""Logs like those of public bug reports: the audit's figures are the right ones, or the command ends in one clear line.

The inputs lie beside the project (`shared/cases`); each case says what is right. The rest of them is tested elsewhere.
"""

import json
from pathlib import Path

import pytest

from turntree.cli.main import main

CASES = Path(__file__).resolve().parents[3] / "shared" / "cases" / "traces-verifiers-audit"
pytestmark = pytest.mark.skipif(not CASES.is_dir(), reason="the shared cases are not beside the project")


def run(capsys, *arguments):
    """The exit code, what was printed, and the error line."""
    try:
        main(list(map(str, arguments)))
        code = 0
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr()
    return code, said.out, said.err


def audited(case, capsys, tmp_path):
    code, out, err = run(capsys, "audit", *_inputs(case), "--out", tmp_path / "page.html", "--json", "-")
    return json.loads(out) if code == 0 else (code, err)


def _inputs(case):
    return sorted(path for path in (CASES / case).iterdir() if path.is_file())


def test_no_case_of_an_audit_or_a_calibration_is_left_out_here():
    listed = json.loads((CASES / "cases.json").read_text())
    ours = {row["case"] for row in listed if row["command"].split()[1] in ("audit", "gate")}
    assert ours <= {*FIGURES, *REFUSED, "97_gate_no_actions", "99_gate_long_actions"}


FIGURES = {
    # case: groups, those without variance of those with two rewards, rollouts without a reward, dropped lines
    "51_verl_same_text_other_image": (2, 2, 2, 0, 0),
    "56_verl_geo3k_find_x": (24, 24, 24, 0, 0),
    "46_generic_types": (1, 0, 1, 0, 1),
    "47_no_iteration": (2, 1, 2, 0, 0),
    "49_float_noise": (1, 1, 1, 0, 0),
    "54_infinite_reward": (1, 1, 1, 1, 0),
    "55_cut_line": (1, 0, 1, 0, 1),
    "59_generic_uneven_groups": (2, 1, 2, 0, 0),
    "42_skyrl_dump": (1, 1, 1, 0, 0),  # scores of tokens, whose sum is the reward
    "43_primerl_rollouts": (3, 0, 3, 0, 0),
    "44_areal_dump": (1, 0, 1, 0, 0),
}


@pytest.mark.parametrize("case", FIGURES)
def test_the_figures_are_those_of_the_tasks_that_were_played(case, capsys, tmp_path):
    found = audited(case, capsys, tmp_path)
    groups, flat, scored, censored, dropped = FIGURES[case]
    assert (found["counts"]["groups"], found["zero_variance"], found["scored"]) == (groups, flat, scored)
    assert found["counts"]["censored_rollouts"] == censored
    assert sum(found["log"]["dropped"].values()) == dropped == len(found["log"]["first_dropped"])


def test_tasks_of_one_text_are_told_apart_by_their_gold_answers_in_every_step(capsys, tmp_path):
    found = audited("56_verl_geo3k_find_x", capsys, tmp_path)
    assert found["headline"].startswith("100% of your groups bought no gradient")
    assert found["counts"]["tasks"] == 8 and found["counts"]["group_sizes"] == {"4": 24}
    assert any("differ in gts" in note for note in found["log"]["notes"])


REFUSED = {
    "45_json_array": "write one object a line",
    "50_verl_score_list": "'score' is not a number",
    "58_trl_same_prompt": "several tasks share a prompt",
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_log_that_cannot_be_read_is_refused_in_one_line_that_says_why(case, capsys, tmp_path):
    code, said = audited(case, capsys, tmp_path)
    assert code == 2 and len(said.splitlines()) == 1 and REFUSED[case] in said
    assert _inputs(case)[0].name in said


def test_a_gate_is_not_calibrated_on_rollouts_whose_turns_are_unknown(capsys):
    code, _, err = run(capsys, "gate", "calibrate", *_inputs("97_gate_no_actions"))
    assert code == 2 and "turns are not told apart" in err and len(err.splitlines()) == 1


def test_long_actions_are_compared_by_equality_and_support_no_gate(capsys):
    code, out, _ = run(capsys, "gate", "calibrate", *_inputs("99_gate_long_actions"))
    assert code == 3 and "refused: " in out
