"""Questions on the command line, end to end on the embedded policy, in miniature: traces, SFT, training with branches,
evaluation."""

from __future__ import annotations

import json
import re

import pytest

from turntree.core.errors import InputError
from turntree_worlds.sandboxes.sandbox import Sandbox

SMALL = (
    "--environment", "qa", "--iterations", 2, "--groups", 2, "--group-size", 4, "--max-turns", 6, "--max-tokens", 48,
    "--count", 6, "--set", "check.tasks=3",
)  # fmt: skip


@pytest.fixture(autouse=True)
def sandboxed() -> None:
    try:
        Sandbox().close()
    except InputError as error:
        pytest.skip(str(error))


def test_expert_answers_are_an_sft_start(turntree, tmp_path) -> None:
    made = turntree.json("traces", "qa", "--count", 6, "--slips", 0.3, "--out", tmp_path / "qa.jsonl")
    assert made["traces"] == made["questions"] == 6
    turntree(
        "sft",
        "--traces",
        tmp_path / "qa.jsonl",
        "--model",
        "qa",
        "--epochs",
        1,
        "--split",
        "",
        "--out",
        tmp_path / "sft",
    )
    assert (tmp_path / "sft" / "model" / "model.safetensors").exists()


def test_training_with_branches_counts_fresh_calls_and_logs_every_decision(turntree, tmp_path) -> None:
    out = tmp_path / "run"
    turntree("train", "online", "--out", out, *SMALL, "--brancher", "entropy", "--set", "brancher.probe_tokens=2")
    first, *rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert "held_out_success" in first and "held_out_success" in rows[-1]
    trees = rows[-1]["trees"]
    assert trees["leaves"] == 2 * 2 * 4
    assert trees["starts"] + trees["forks"] == trees["leaves"], "two branches a fork"
    assert trees["forks"] > 0 and trees["calls_fresh"] < trees["calls_chain"]
    assert 0 < rows[0]["branching"]["structural_saving"] < 1
    assert rows[-1]["timing"]["tools"]["search"]["calls"] > 0
    groups = [json.loads(line) for line in (out / "rollouts.jsonl").read_text().splitlines()]
    assert all(len(group["rollouts"]) == 4 for group in groups)
    assert any(rollout["forked"] for group in groups for rollout in group["rollouts"])


def test_the_same_command_ends_in_the_same_bits(turntree, tmp_path) -> None:
    """Tools answer in threads; nothing that is learned may depend on when."""
    ended = []
    for run in (tmp_path / "first", tmp_path / "second"):
        turntree("train", "online", "--out", run, *SMALL, "--brancher", "entropy", "--set", "brancher.probe_tokens=2")
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        metrics = [{name: value for name, value in row.items() if name != "timing"} for row in rows]
        files = ("model/model.safetensors", "rollouts.jsonl", "held_out.jsonl")
        trees = re.sub(r'"timing": \{[^}]*\}', "", (run / "trees.jsonl").read_text())
        ended.append((metrics, [(run / name).read_bytes() for name in files], trees))
    assert ended[0] == ended[1]


@pytest.mark.parametrize("brancher", ["random", "arpo_released"])
def test_every_brancher_grows_whole_groups(turntree, tmp_path, brancher: str) -> None:
    looks = ("--probe-tokens", 2) if brancher == "random" else ()  # an option that the others do not have
    settings = ("--brancher", brancher, "--iterations", 1, *looks)
    turntree("train", "online", "--out", tmp_path / "run", *SMALL, *settings)
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["trees"]["leaves"] == 2 * 4


def test_a_question_policy_is_evaluated(turntree, tmp_path) -> None:
    result = turntree.json("evaluate", "--environment", "qa", "--count", 5, "--out", tmp_path / "evaluation.json")
    assert result["sampled"]["episodes"] == result["greedy"]["episodes"] == 5
    assert all("-test-" in outcome["task"] for outcome in result["greedy"]["outcomes"])


def test_questions_of_ones_own_are_asked_over_documents_of_ones_own(turntree, tmp_path) -> None:
    (tmp_path / "documents.jsonl").write_text('{"id": "a", "title": "Ada", "text": "Ada lives in Oslo."}\n')
    turntree("index", "build", tmp_path / "documents.jsonl", "--out", tmp_path / "index.sqlite")
    again = ("index", "build", tmp_path / "documents.jsonl", "--out", tmp_path / "index.sqlite")
    before = (tmp_path / "index.sqlite").read_bytes()
    assert "is there already" in turntree.error(*again) and (tmp_path / "index.sqlite").read_bytes() == before
    turntree(*again, "--overwrite")
    rows = [{"question": f"Where does Ada live, asked {n} times?", "answer": "Oslo"} for n in range(5)]
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = ("--questions", questions, "--index", tmp_path / "index.sqlite", "--iterations", 1, "--count", 3)
    result = turntree.json("train", "online", "--out", tmp_path / "run", *SMALL, *asked)
    assert result["iterations"] == 1
    alone = turntree.error("train", "online", "--out", tmp_path / "no", *SMALL, "--questions", questions)
    assert "index" in alone
    held_out = turntree.error("train", "online", "--out", tmp_path / "no", *SMALL, *asked, "--count", 5)
    assert "none is left for split" in held_out
