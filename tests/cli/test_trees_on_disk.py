"""The rollout trees that a run leaves behind: kept whole or not at all, read by audit, calibration and report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chromium import browser
from turntree.core.errors import InputError
from turntree.credit.config import CreditConfig
from turntree.logs import trees
from turntree.train.losses import LossConfig
from turntree_worlds.sandboxes.sandbox import Sandbox

SMALL = (
    "--environment", "qa", "--brancher", "entropy", "--iterations", 4, "--groups", 4, "--group-size", 4,
    "--max-turns", 6, "--max-tokens", 48, "--count", 8, "--set", "check.tasks=2",
)  # fmt: skip
GATE = ("--gate-turn", 3, "--gate-threshold", 0.2, "--audit", 0.5, "--filter", "dapo")


@pytest.fixture(scope="module")
def online(turntree, tmp_path_factory) -> Path:
    """A run with forks, gate decisions and dropped groups; beside it the result that it printed."""
    try:
        Sandbox().close()
    except InputError as error:
        pytest.skip(str(error))
    run = tmp_path_factory.mktemp("kept") / "online"
    turntree("train", "online", "--out", run, *SMALL, *GATE, "--json", run.with_suffix(".json"))
    return run


@pytest.fixture(scope="module")
def pivot(turntree, household, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("kept") / "pivot"
    states = ("--set", "train.groups=4", "--set", "train.group_size=4", "--keep-trees", 2)
    turntree(
        "train",
        "pivot",
        household / "pivots.jsonl",
        "--out",
        run,
        "--steps",
        4,
        "--max-tokens",
        24,
        *states,
        "--set",
        "check.tasks=0",
    )
    return run


def test_every_group_of_a_run_is_kept_with_the_credit_that_it_was_trained_with(online: Path) -> None:
    kept = list(trees.read(online / "trees.jsonl"))
    metrics = [json.loads(line) for line in (online / "metrics.jsonl").read_text().splitlines()]
    rows = {row["step"]: row for row in metrics if row["step"]}
    estimator = LossConfig().estimator(CreditConfig())
    for iteration, row in rows.items():
        groups = [one for one in kept if one.iteration == iteration]
        assert len(groups) == row["groups"]
        assert sum(one.credit is not None for one in groups) == row["trained_groups"]
        assert sum(one.cut is not None for one in groups) == row["groups_cut"]
    learned = [one for one in kept if one.credit is not None]
    assert 0 < len(learned) < len(kept)
    assert all(estimator(one.tree, one.rewards) == one.credit for one in learned)
    assert all(node.entropies is not None for one in kept for node in one.tree if node.sampled)
    assert all(one.tree[one.tree.roots[0]].messages for one in kept), "the task itself"


def test_what_the_gate_last_said_lies_beside_the_tree(online: Path) -> None:
    said = [json.loads(line) for line in (online / "gate.jsonl").read_text().splitlines()]
    kept = {one.id: one for one in trees.read(online / "trees.jsonl")}
    assert said
    for row in said:
        one = kept[row["group"]]
        assert one.meta["gate"] == {name: row[name] for name in ("audited", "reason", "numbers")}
        assert one.cut == row["cut"]


def without_the_log(value):
    """A result without the names of what was read."""
    if isinstance(value, list):
        return [without_the_log(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {key: without_the_log(one) for key, one in value.items() if key not in ("format", "source", "paths")}


@pytest.mark.parametrize(("command", "code"), [(("audit",), 0), (("gate", "calibrate"), 3)])
def test_figures_from_trees_are_those_from_the_rollout_log(turntree, online, tmp_path, command, code) -> None:
    told = []
    for name in ("rollouts", "trees"):
        turntree(*command, online / f"{name}.jsonl", "--json", tmp_path / f"{name}.json", cwd=tmp_path, code=code)
        told.append(json.loads((tmp_path / f"{name}.json").read_text()))
    assert without_the_log(told[0]) == without_the_log(told[1])
    assert told[0] != told[1], "each says what it read"


def test_some_iterations_are_kept_evenly_and_the_log_of_rollouts_stays_complete(turntree, tmp_path) -> None:
    run = tmp_path / "run"
    small = ("--iterations", 4, "--groups", 2, "--group-size", 2, "--max-turns", 2, "--max-tokens", 12, "--count", 2)
    command = ("train", "online", "--out", run, *small, "--set", "check.tasks=1")
    turntree(*command, "--keep-trees", 2)
    assert [one.iteration for one in trees.read(run / "trees.jsonl")] == [2, 2, 4, 4]
    audited = turntree.json("audit", run, cwd=tmp_path)
    assert audited["log"]["groups"] == 8, "a folder is audited by its rollout log"
    turntree(*command, "--keep-trees", "none", "--overwrite")
    assert not (run / "trees.jsonl").exists()
    assert "neither 'all', 'none' nor a number" in turntree.error(*command, "--keep-trees", "some")
    assert "keep_trees" in turntree.error(*command, "--set", "keep_trees=-1")


def test_a_pivot_run_keeps_its_groups_and_is_audited_by_them(turntree, pivot: Path, tmp_path) -> None:
    kept = list(trees.read(pivot / "trees.jsonl"))
    assert [one.iteration for one in kept] == [2] * 4 + [4] * 4
    estimator = LossConfig().estimator(CreditConfig())
    assert all(estimator(one.tree, one.rewards) == one.credit for one in kept)
    assert all(one.meta["demonstrated"] and one.meta["role"] in ("pivot", "anchor") for one in kept)
    assert all(verdict.reason for one in kept for verdict in one.rewards.verdicts.values())
    audited = turntree.json("audit", pivot, cwd=tmp_path)
    assert audited["log"]["format"] == "trees" and audited["log"]["groups"] == len(kept)


def test_an_evaluation_keeps_its_episodes_beside_its_result(turntree, tmp_path) -> None:
    small = ("--count", 2, "--samples", 2, "--max-turns", 2, "--set", "skills_per_kind=0")
    result = turntree.json("evaluate", *small, "--keep-trees", "--out", tmp_path / "base.json")
    kept = list(trees.read(tmp_path / "base.trees.jsonl"))
    assert [one.id for one in kept] == ["sampled.0", "sampled.1", "greedy.0", "greedy.1"]
    assert [one.tree.task_id for one in kept[:2]] == [row["task"] for row in result["sampled"]["outcomes"]]
    assert [len(one.rewards.verdicts) for one in kept] == [2, 2, 1, 1]
    assert "needs an output file" in turntree.error("evaluate", *small, "--keep-trees")
    turntree("report", tmp_path / "base.trees.jsonl")
    assert "sampled.1" in (tmp_path / "base.trees.html").read_text()
    for name in ("ev-0.5", "ev-0.7"):  # without .json: each has trees of its own
        turntree("evaluate", *small, "--keep-trees", "--out", tmp_path / name)
        turntree("report", tmp_path / f"{name}.trees.jsonl")
        assert (tmp_path / f"{name}.trees.html").exists()


@pytest.mark.parametrize("kind", ["online", "pivot"])
def test_the_pages_of_a_run_open_and_lead_from_the_report_to_the_browser(turntree, request, kind) -> None:
    run = request.getfixturevalue(kind)
    turntree("report", run)
    with browser() as window:
        window.get((run / "report.html").as_uri())
        window.find_element("css selector", "#tree a").click()
        assert window.title == f"Rollout trees of {run.name}"
        window.find_elements("css selector", ".row.completion")[-1].click()
        shown = window.find_element("id", "detail").text
        assert "Turn" in shown and "coloured by entropy" in shown
        assert window.get_log("browser") == []
