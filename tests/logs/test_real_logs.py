"""Logs that the frameworks' own writers made (`real_writers.py`), with TRL 1.16, verl 0.9.1 (both trainers), SkyRL
0.4.0, AReaL 1.0.4, Agent Lightning 1.0.2, NeMo Gym 0.7.0, and checkouts of August 2026 of prime-rl (on verifiers
0.4.0), slime and rLLM: naming the folder is enough, and what is read is what was played."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from real_writers import PLAYED, WRITERS, rollouts

from turntree.cli.main import main
from turntree.logs.read import open_log

REAL = Path(__file__).parent / "real"
FIRST = {"trl": 1}  # the number of the first step
WITHOUT_FAILURES = {  # what stands in the log for a rollout that failed, where the framework does not say that it did
    "verl": [0.0], "verl-v1": [0.0], "skyrl": [0.0], "skyrl-steps": [0.0], "agent-lightning": [0.0], "areal": [],
}  # fmt: skip


def wanted(name: str) -> Counter[tuple[int, tuple[str, ...]]]:
    """The rewards of every group, by step."""
    failed = WITHOUT_FAILURES.get(name, [None])
    return Counter(
        (step + FIRST.get(name, 0), tuple(sorted(str(one) for r in rewards for one in (failed if r is None else [r]))))
        for step, groups in enumerate(PLAYED)
        for rewards in groups.values()
    )


@pytest.mark.parametrize("name", WRITERS)
def test_a_framework_s_own_log_is_recognised_by_its_folder_and_holds_what_was_played(name: str) -> None:
    log = open_log([REAL / name])
    groups = list(log)
    assert log.report.format == name.removesuffix("-v1").removesuffix("-steps")
    assert Counter((g.iteration, tuple(sorted(map(str, g.rewards)))) for g in groups) == wanted(name)
    assert len({group.task for group in groups}) == len({row.question for row in rollouts()})
    assert not log.report.dropped


@pytest.mark.parametrize("name", WRITERS)
def test_its_audit_says_how_many_groups_bought_no_gradient(name: str, tmp_path, capsys) -> None:
    main(["audit", str(REAL / name), "--out", str(tmp_path / "page.html"), "--json", "-"])
    told = json.loads(capsys.readouterr().out)
    assert (told["zero_variance"], told["scored"]) == (4, 6)


def test_a_trajectory_whose_steps_are_rows_is_one_rollout_and_not_one_a_step() -> None:
    assert {r.turns for group in open_log([REAL / "skyrl-steps"]) for r in group.rollouts} == {2}


def test_a_rollout_that_succeeded_at_its_second_try_has_its_reward() -> None:
    rows = (REAL / "prime-rl/rollouts/step_0/train/all/traces.jsonl").read_text().splitlines()
    tried = [trace for row in rows for trace in json.loads(row)["traces"] if trace["errors"]]
    assert tried and all(trace["ok"] for trace in tried)
    assert None not in {reward for g in open_log([REAL / "prime-rl"]) if g.iteration == 0 for reward in g.rewards}


def test_a_failure_beside_a_collection_is_a_rollout_without_a_reward_of_the_same_group(tmp_path) -> None:
    shutil.copytree(REAL / "nemo-gym", tmp_path / "log")
    main_file = tmp_path / "log/rollouts_0.jsonl"
    *kept, last = main_file.read_text().splitlines(keepends=True)
    main_file.write_text("".join(kept))
    failed = {key: value for key, value in json.loads(last).items() if key not in ("response", "reward")}
    failed |= {"_ng_failure_class": "agent_request_failed"}
    (tmp_path / "log/rollouts_0_failures.jsonl").write_text(json.dumps(failed) + "\n")
    log = open_log([tmp_path / "log"])
    assert sorted(len(group.rollouts) for group in log if group.iteration == 0) == [4, 4, 4]
    assert not log.report.dropped
