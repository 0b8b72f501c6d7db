"""Cases from public bug reports about verifiers and answers (../shared/cases beside the checkout), each judged right.

A row of `input.jsonl` says what is wanted; a pair of calls is judged as `turntree verifier score` judges it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from turntree.core.config import Part
from turntree.core.errors import InputError
from turntree.stages.import_traces import ImportConfig, import_traces
from turntree.stages.score import AuditConfig, ScoreConfig, run_audit, score
from turntree_worlds.qa.answers import equal

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "cases" / "traces-verifiers-audit"
CASES: list[dict[str, Any]] = json.loads((FOLDER / "cases.json").read_text("utf-8")) if FOLDER.is_dir() else []
pytestmark = pytest.mark.skipif(not CASES, reason="the shared cases are not beside this checkout")


def _rows() -> list[Any]:
    found = [case["case"] for case in CASES if "answers import equal" in case["command"]]
    lines = [(case, line) for case in found for line in (FOLDER / case / "input.jsonl").read_text("utf-8").splitlines()]
    return [pytest.param(json.loads(line), id=f"{case}: {line}") for case, line in lines]


@pytest.mark.parametrize("row", _rows())
def test_two_answers_are_judged_as_wanted_in_either_order(row: dict[str, Any]) -> None:
    assert equal(row["given"], row["gold"], row["type"]) is row["want"]
    assert equal(row["gold"], row["given"], row["type"]) is row["want"]


def scored(case: str, verifier: str, labels: str = "") -> dict[str, Any]:
    gold, candidate = (str(FOLDER / case / f"{name}.jsonl") for name in ("gold", "candidate"))
    return score(ScoreConfig(verifier=Part(verifier), gold=gold, candidate=candidate, labels=labels))


@pytest.mark.parametrize("verifier", ["recommended", "tool_call", "strict"])
def test_no_pair_that_does_another_thing_is_paid(verifier: str) -> None:
    """116 pairs of commands and calls; eight equal ones are not paid, which fails closed."""
    found = scored("150_verifier_pairs_right", verifier, labels=str(FOLDER / "150_verifier_pairs_right" / "labels.txt"))
    assert found["agreement"]["accepted_wrong"] == 0
    if verifier == "recommended":
        assert found["agreement"]["refused_wrong"] <= 8


@pytest.mark.parametrize("verifier", ["recommended", "tool_call", "strict", "paper", "nemo"])
def test_calls_whose_arguments_stand_under_another_key_are_refused_or_unpaid(verifier: str) -> None:
    try:
        found = scored("152_verifier_args_both_sides", verifier)
    except InputError:
        return
    assert found["accepted"] == 0


@pytest.mark.parametrize("verifier", ["recommended", "tool_call"])
@pytest.mark.parametrize("case", ["12_null_filled_args", "116_null_optional_args"])
def test_demonstrations_with_null_where_the_schema_has_none_are_not_judged_and_the_reason_is_said(
    case: str, verifier: str, tmp_path: Path
) -> None:
    traces = tmp_path / "traces.jsonl"
    import_traces([FOLDER / case / "input.jsonl"], traces, ImportConfig(dev=0))
    found = run_audit(AuditConfig(traces=str(traces), verifier=Part(verifier)))
    (reason,) = (reason for reason in found["gold"]["reasons"] if "unjudgeable demonstration" in reason)
    assert found["gold"]["reasons"][reason] == 1, reason
